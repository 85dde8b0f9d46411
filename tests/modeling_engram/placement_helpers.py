"""What the tests of placement and of saving share."""

import json
from pathlib import Path

import torch

from hf_engram import (
    EngramForCausalLM,
)


PLACEMENTS = ["device", "cpu", "disk"]
MIXED = [*PLACEMENTS, ["disk", "device"], ["cpu", "disk"]]


def logits_of(model, ids, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **inputs).logits


def load(folder, placement, cls=EngramForCausalLM, **kwargs):
    return cls.from_pretrained(folder, engram_placement=placement, **kwargs)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
