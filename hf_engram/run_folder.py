"""The folder of a training run: what is in it is complete, whenever the run is killed.

    OUTPUT/checkpoint-<step>/                      a Hub folder: the model, or an adapter, and the tokenizer
    OUTPUT/training_state/checkpoint-<step>.pt     what it takes to go on from there: optimizer, random generators
    OUTPUT/run.json                                the run's arguments
    OUTPUT/metrics.jsonl                           what was logged, one step a line

Files and folders are written under a name that begins with a dot, and get their own when they are on disk. A state is
written before its checkpoint and removed after it, so that each checkpoint has one.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


STATE_FOLDER = "training_state"
ARGUMENTS_FILE, METRICS_FILE = "run.json", "metrics.jsonl"


def checkpoints(output: Path) -> list[Path]:
    """The folders checkpoint-<step>, oldest first."""
    return sorted(output.glob("checkpoint-*[0-9]"), key=lambda folder: int(folder.name.rpartition("-")[2]))


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Deletes a file or folder, if it is there; under another name, since a deletion may be interrupted."""
    if path.exists():
        _delete(path.rename(path.with_name(f".{path.name}.old")))


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """A temporary path to make a file or folder at; it gets its name when all is on disk, and else is removed.

    Raises:
        OSError: it could not be written; says how much room is left on the disk.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    _delete(temporary)
    try:
        yield temporary
        for part in (*temporary.rglob("*"), temporary):
            descriptor = os.open(part, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        temporary.replace(path)
    # A full disk is an OSError, a SafetensorError or torch's RuntimeError, depending on who was writing.
    except Exception as error:
        free = shutil.disk_usage(path.parent).free / 2**20
        raise OSError(f"{path} could not be written, with {free:,.0f} MiB left on its disk: {error}.") from error
    finally:
        _delete(temporary)


def tidy(output: Path, keep: int | None = None) -> None:
    """Removes what a killed run has left half-written or half-deleted, and all checkpoints but the newest `keep`."""
    states = output / STATE_FOLDER
    for folder in (output, states):
        for rest in (*folder.glob(".*.tmp"), *folder.glob(".*.old")):
            _delete(rest)
    for folder in checkpoints(output)[:-keep] if keep else ():
        remove(folder)
    known = {_state_path(folder) for folder in checkpoints(output)}
    for path in states.glob("*.pt"):
        if path not in known:
            path.unlink()


def _state_path(checkpoint: Path) -> Path:
    return checkpoint.parent / STATE_FOLDER / f"{checkpoint.name}.pt"


def save_state(checkpoint: Path, state: dict[str, Any]) -> None:
    """Writes the state that belongs to a checkpoint; to be called before the checkpoint is written."""
    with written_whole(_state_path(checkpoint)) as path:
        torch.save(state, path)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state that belongs to a checkpoint, on the CPU.

    Raises:
        ValueError: it is not there.
    """
    path = _state_path(checkpoint)
    if not path.exists():
        raise ValueError(f"{path} is missing, so the run cannot go on: begin another with --model {checkpoint}.")
    return torch.load(path, weights_only=True, map_location="cpu")


def save_arguments(output: Path, arguments: dict[str, Any]) -> None:
    with written_whole(output / ARGUMENTS_FILE) as path:
        path.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")


def load_arguments(output: Path) -> dict[str, Any] | None:
    """The arguments that the run was last started with; None if there is no run."""
    path = output / ARGUMENTS_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def log_metrics(output: Path, step: int, values: dict[str, float]) -> None:
    with (output / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")


def keep_metrics(output: Path, step: int) -> None:
    """Drops what was logged after a checkpoint: these steps are taken again."""
    path = output / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that a kill has cut off is one of those.
    kept = [f"{line}\n" for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    with written_whole(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
