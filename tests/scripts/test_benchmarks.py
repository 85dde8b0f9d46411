"""The benchmarks start, and what they measure still exists."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script: Path, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_help(script):
    assert "usage" in run(script, "--help")


def test_training_step_with_and_without_our_operations():
    """It puts the plain formulas in their places by name."""
    rows = run(FOLDER / "ops.py", "--ops", "step", "hash_step", "--dtypes", "float32", "--rounds", "1")
    assert rows.count("formula") >= 3 and rows.count("ours") >= 3
