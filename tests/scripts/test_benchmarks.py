"""The benchmarks start, and what they measure still exists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script: Path, *arguments: str) -> str:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_help(script):
    assert "usage" in run(script, "--help")


def test_training_step_with_and_without_our_operations():
    """It puts the plain formulas in their places by name."""
    rows = run(FOLDER / "ops.py", "--ops", "step", "hash_step", "--dtypes", "float32", "--rounds", "1")
    assert rows.count("formula") >= 3 and rows.count("ours") >= 3


def test_plain_text_of_a_manual_page(monkeypatch):
    """Markup, comments and the translators' note go; headings, examples and backslashes stay."""
    monkeypatch.syspath_prepend(str(FOLDER))
    from finetune import plain_text

    page = (
        '.\\" a comment\n.TH LS 1\n.SH "NAME"\nls \\- \\fBzeigt\\fP \\f[CR]\\,DATEIEN\\/\\fP\n'
        ".PP\n\n\n\n.B \\-a\nC:\\edos\n"
        ".SH ÜBERSETZUNG\nDie Übersetzung"
    )
    assert plain_text(page) == "NAME\nls - zeigt DATEIEN\n\n-a\nC:\\dos"
