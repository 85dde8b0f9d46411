"""The examples, as a person runs them."""

import ast
import os
import re
import subprocess
import sys

from safetensors.torch import load_file
from train_runs import (
    SCRIPT,
    TEXTS,
)
from transformers import AutoTokenizer


def test_help_says_the_defaults(tmp_path):
    """Of the Trainer's; the other needs TRL, and has its test in tests/clients."""
    command = [sys.executable, str(SCRIPT.parents[1] / "examples" / "trainer.py"), "--help"]
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    for option, default in (("--steps", "20"), ("--batch-size", "4"), ("--block-size", "64"), ("--lr", "0.001")):
        assert re.search(rf"{option} [A-Z_]+\s[^(]*\(default: {default}\)\n", done.stdout)


def test_trainer_example(finished, tmp_path):
    """examples/trainer.py, as a person runs it: the loss falls, rows change, and the output is a Hub folder."""
    script = SCRIPT.parents[1] / "examples" / "trainer.py"
    (tmp_path / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    folder = finished / "checkpoint-12"
    command = [sys.executable, str(script), str(folder), "text.txt", "out"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(ast.literal_eval(line)["loss"]) for line in done.stdout.splitlines() if line.startswith("{'loss'")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    name = "model.engram_memory.tables.0.weight"
    changed = (before[name] != after[name]).any(1)
    assert changed.any()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 300
    assert (tmp_path / "out" / "modeling_engram.py").is_file()
