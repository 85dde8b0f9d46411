"""The folder of a training run: a state belongs to its checkpoint, and recorded numbers are checked before use."""

import shutil

import pytest
import torch
from safetensors.torch import save_file

from hf_engram import run_folder
from hf_engram.run_folder import check_arguments, load_state, save_state


STATE = {"base": None, "data_sha256": "0", "generators": [], "optimizer": {}}


@pytest.fixture
def checkpoint(tmp_path):
    for step in (5, 10):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file({"w": torch.full((3,), float(step))}, folder / "model.safetensors")
        save_state(folder, {"step": step, **STATE}, folder)
    return tmp_path / "checkpoint-10"


def test_state(checkpoint):
    state = load_state(checkpoint)
    assert state["step"] == 10 and state["optimizer"] == {}


def test_state_of_another_step(checkpoint):
    states = checkpoint.parent / run_folder.STATE_FOLDER
    shutil.copy(states / "checkpoint-5.pt", states / "checkpoint-10.pt")
    with pytest.raises(ValueError, match=r"state of step 5, .*begin another with --model .*checkpoint-10"):
        load_state(checkpoint)


def test_weights_of_another_checkpoint(checkpoint):
    shutil.copy(checkpoint.with_name("checkpoint-5") / "model.safetensors", checkpoint)
    with pytest.raises(ValueError, match=r"not written with the weights in .*checkpoint-10"):
        load_state(checkpoint)


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", "10"), ("steps", 0), ("steps", 1.5), ("lr", "x"), ("lr", float("nan")), ("bf16", 1), ("split", 3)],
)
def test_recorded_arguments(tmp_path, name, value):
    defaults = {"steps": 1000, "lr": 1e-3, "bf16": False, "split": "train", "seed": 0, "model": None}
    check_arguments(tmp_path, {**defaults, "model": "x", "lr": 1, "seed": 3}, defaults)
    with pytest.raises(ValueError, match=rf"run\.json was changed: `{name}` is"):
        check_arguments(tmp_path, {**defaults, name: value}, defaults)
