"""A small run of scripts/train.py, and what its output is compared by."""

import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
from safetensors.torch import load_file


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
TEXTS = [text[:1200] for text in list(topics.values())[:12]]
MEMORY = ["engram_layer_ids=[0,1]", "engram_vocab_size=60", "engram_n_heads=2", "engram_head_dim=8"]
CONFIG = ["--config", "hidden_size=16", "intermediate_size=32", "num_hidden_layers=2", "num_attention_heads=2",
          "attention_dropout=0.1", "hc_mult=2", *MEMORY]  # fmt: skip
RUN = ["--vocab-size=300", "--block-size=32", "--batch-size=2", "--warmup=2", "--lr=0.01", "--log-every=1",
       "--eval-every=4", "--eval-blocks=4", "--save-every=4", "--keep=9"]  # fmt: skip


def names_in(output: Path) -> set[str]:
    """Of what a run leaves, apart from TensorBoard's logs, where that is installed."""
    return {path.name for path in output.iterdir()} - {"logs"}


def state_of(checkpoint: Path) -> Path:
    return checkpoint.parent / "training_state" / f"{checkpoint.name}.pt"


def metrics(output: Path) -> list[dict]:
    """Everything that was logged, but for the speed."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def assert_same(actual, expected, where: str = "") -> None:
    """Equal to the bit, through dicts and lists."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, values in enumerate(zip(actual, expected, strict=True)):
            assert_same(*values, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def assert_same_checkpoint(actual: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in actual.iterdir()} == names
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    assert weights
    for name in weights:
        assert_same(load_file(actual / name), load_file(expected / name), name)
    states = [torch.load(state_of(folder), weights_only=True) for folder in (actual, expected)]
    assert states[1]["optimizer"]["state"]
    assert_same(*({k: v for k, v in state.items() if k != "base"} for state in states))
