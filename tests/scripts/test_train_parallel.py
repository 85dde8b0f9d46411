"""scripts/train.py in two processes."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from train_runs import CONFIG, RUN, SCRIPT, TEXTS, assert_same_checkpoint, metrics
from transformers import AutoTokenizer


def launch_two(*arguments: object, script: Path = SCRIPT) -> None:
    """A script in two processes, on the CPU, which nothing but the absence of another device says. torchrun finds a
    free port; it ends its processes when it is ended itself."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", str(script)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, *map(str, arguments)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            _, errors = process.communicate(timeout=600)
        finally:
            process.terminate()
    assert process.returncode == 0, errors.decode()[-3000:]


@pytest.mark.slow
def test_two_processes(run, corpus, tmp_path):
    """Data parallel on two processes: the losses of one process with twice the batch, also where one of the two has
    fewer batches to evaluate on; and a resumed run goes on to the bit."""
    config = [argument for argument in CONFIG if "dropout" not in argument]
    two = tmp_path / "two"
    launch_two(two, "--data", corpus, *RUN, "--steps=2", "--save-every=1", "--eval-blocks=5", *config)
    run(tmp_path / "one", "--steps=2", "--batch-size=4", "--eval-blocks=5", *config)
    assert len(metrics(two)) == 4
    for one, other in zip(metrics(tmp_path / "one"), metrics(two), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    shutil.copytree(two, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-2")
    launch_two(tmp_path / "again", "--resume")
    assert_same_checkpoint(tmp_path / "again" / "checkpoint-2", two / "checkpoint-2")
    assert metrics(tmp_path / "again") == metrics(two)


@pytest.mark.slow
def test_trainer_example_in_two_processes(finished, tmp_path):
    """One training, not two: with half the batch each, the weights of one process."""
    (tmp_path / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    script, folder = SCRIPT.parents[1] / "examples" / "trainer.py", finished / "checkpoint-12"
    arguments = [folder, tmp_path / "text.txt", "--steps=2", "--block-size=32"]
    launch_two(*arguments, tmp_path / "two", "--batch-size=2", script=script)
    trained = load_file(tmp_path / "two" / "model.safetensors")
    before = load_file(folder / "model.safetensors")
    assert any(not torch.equal(trained[name], before[name]) for name in before)
    state = json.loads((tmp_path / "two" / "checkpoint-2" / "trainer_state.json").read_text())
    n_blocks = state["max_steps"] * 4 / state["epoch"]
    ids = AutoTokenizer.from_pretrained(folder)((tmp_path / "text.txt").read_text())["input_ids"]
    assert n_blocks == pytest.approx(len(ids) // 32, abs=4)  # four blocks a step: two processes of two


def test_models_go_before_their_process_group(run, train, tmp_path, monkeypatch):
    """A DDP model that outlives `end_training` may wait forever for one of its own threads."""
    prepare, end_training, alive = Accelerator.prepare, Accelerator.end_training, []

    def prepare_and_watch(accelerator, *objects):
        prepared = prepare(accelerator, *objects)
        alive.append(weakref.ref(prepared[0]))
        return prepared

    def end_and_look(accelerator):
        alive.append(alive[0]())
        end_training(accelerator)

    monkeypatch.setattr(Accelerator, "prepare", prepare_and_watch)
    monkeypatch.setattr(Accelerator, "end_training", end_and_look)
    run(tmp_path / "run", "--steps=1", *CONFIG)
    assert len(alive) == 2 and alive[1] is None
