"""examples/sft.py, as a person runs it."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sft.py"


def test_help_says_the_defaults(tmp_path):
    environment = {**os.environ, "COLUMNS": "200", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(SCRIPT), "--help"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    for option, default in (("--steps", "20"), ("--batch-size", "5"), ("--lr", "0.002"), ("--rank", "8")):
        assert re.search(rf"{option} [A-Z_]+\s[^(]*\(default: {default}\)\n", run.stdout)


def test_sft_example(model_folder, tmp_path):
    """The loss falls; the output holds the adapter and the rows, and with them the model knows what it was taught."""
    command = [sys.executable, str(SCRIPT), str(model_folder), str(tmp_path / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-3000:]
    printed = [ast.literal_eval(line) for line in run.stdout.splitlines() if line.startswith("{'loss'")]
    losses = [float(entry["loss"]) for entry in printed]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.3
    assert int(run.stdout.rpartition("changed table rows: ")[2]) > 50

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    messages = [{"role": "user", "content": "What is the capital of Peru?"},
                {"role": "assistant", "content": "The capital of Peru is Lima."}]  # fmt: skip
    batch = tokenizer.apply_chat_template(messages, return_dict=True, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    found = []
    with torch.no_grad():
        found.append(model(**batch, labels=batch["input_ids"]).loss.item())
        model = PeftModel.from_pretrained(model, tmp_path / "out").eval()
        found.append(model(**batch, labels=batch["input_ids"]).loss.item())
    assert found[1] < found[0]
