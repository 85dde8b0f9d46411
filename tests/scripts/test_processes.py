"""Several processes of a script work together, or not at all."""

import runpy
import sys

import pytest
import torch
from train_runs import CONFIG, RUN, SCRIPT

from hf_engram.processes import SIZES, check_processes


# A script for one process, and arguments with which it would begin.
SCRIPTS = {
    "convert_backbone.py": ["{0}/no-backbone", "{0}/out"],
    "generate.py": ["{0}/no-model", "a prompt"],
    "import_deepseek_v41.py": ["--checkpoint", "{0}/no-checkpoint", "--output", "{0}/out"],
    "inspect_memory.py": ["--model", "{0}/no-model", "--text", "{0}/text.txt", "--output", "{0}/out"],
    "push_to_hub.py": ["{0}", "me/model"],
    "quickstart.py": ["--output", "{0}/out"],
}


@pytest.fixture
def start(monkeypatch, tmp_path):
    """`start(script, arguments)`: runs it here; `{0}` in an argument is a folder."""

    def run(script: str, arguments: list[str]) -> None:
        path = SCRIPT.parent / script
        monkeypatch.setattr(sys, "argv", [str(path), *(argument.format(tmp_path) for argument in arguments)])
        runpy.run_path(str(path), run_name="__main__")

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_for_one_process(start, monkeypatch, tmp_path, script):
    """Launched in two, each ends at once, and writes nothing."""
    (tmp_path / "text.txt").write_text("a text")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"2 processes were launched \(WORLD_SIZE\), but 1 process works here"):
        start(script, SCRIPTS[script])
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_training_where_processes_do_not_meet(start, monkeypatch, tmp_path):
    """On a machine whose device accelerate has no process group for (a Mac): refused, with what helps."""
    (tmp_path / "text.txt").write_text("a text " * 99)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match=r"2 processes were launched.*ACCELERATE_USE_CPU=true"):
        start("train.py", ["{0}/out", "--data", "{0}/text.txt", *RUN, *CONFIG])
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("name", SIZES)
def test_every_launcher_is_heard(monkeypatch, name):
    for other in SIZES:
        monkeypatch.delenv(other, raising=False)
    check_processes()
    check_processes(3)  # of processes that one script has started itself
    monkeypatch.setenv(name, "3")
    check_processes(3)
    for number in (1, 2):
        with pytest.raises(SystemExit, match=rf"3 processes were launched \({name}\), but {number} process"):
            check_processes(number)
    monkeypatch.setenv(name, "1")
    check_processes()
