"""The folder of a training run: what is in it is complete, whenever the run is killed.

    OUTPUT/checkpoint-<step>/                      a Hub folder: the model, or an adapter, and the tokenizer
    OUTPUT/training_state/checkpoint-<step>.pt     what it takes to go on from there: optimizer, random generators
    OUTPUT/run.json                                the run's arguments
    OUTPUT/metrics.jsonl                           what was logged, one step a line

Files and folders are written under a name that begins with a dot, and get their own when they are on disk. A state is
written before its checkpoint and removed after it, so that each checkpoint has one.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


STATE_FOLDER = "training_state"
STATE_NAMES = {"step", "base", "data_sha256", "generators", "optimizer"}
ARGUMENTS_FILE, METRICS_FILE = "run.json", "metrics.jsonl"
CHECKPOINT_NAME = re.compile("checkpoint-[0-9]+")


def checkpoints(output: Path) -> list[Path]:
    """The folders checkpoint-<step>, oldest first."""
    folders = [path for path in output.glob("checkpoint-*") if CHECKPOINT_NAME.fullmatch(path.name)]
    return sorted(folders, key=lambda folder: int(folder.name.rpartition("-")[2]))


def check_is_model(source: str) -> None:
    """Refuses folders of a run, from which no model loads (its own, an adapter's), and paths that lead nowhere.

    Raises:
        ValueError: `source` is such a folder; says what to name instead.
    """
    folder = Path(source)
    is_path = source.startswith((".", "~", os.sep)) or source.count("/") > 1
    if not folder.exists() and (is_path or ("/" in source and folder.parent.is_dir())):
        raise ValueError(f"{source} does not exist. (A model on the Hub is named owner/name.)")
    if not folder.is_dir() or (folder / "config.json").exists():
        return
    if found := checkpoints(folder):
        raise ValueError(
            f"{source} is the folder of a training run: name one of its checkpoints, such as {found[-1]}."
        )
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{source} is an adapter: merge it into its base first (its README.md says how).")


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


def weights_sha256(folder: Path) -> str:
    """Digest of a checkpoint's weights: of each file its name, its size and its content, or of a large one, its header
    and 256 pieces from its beginning to its end."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            if size <= 2**28:
                while piece := file.read(2**20):
                    digest.update(piece)
                continue
            for i in range(256):
                file.seek(i * (size - 2**16) // 255)
                digest.update(file.read(2**16))
    return digest.hexdigest()


def save_state(checkpoint: Path, state: dict[str, Any], folder: Path) -> None:
    """Writes the state that belongs to a checkpoint, before that has its name; `folder` is where it is complete."""
    with written_whole(_state_path(checkpoint)) as path:
        torch.save({**state, "weights_sha256": weights_sha256(folder)}, path)


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The state that belongs to a checkpoint, on the CPU.

    Raises:
        ValueError: it is not there, damaged, or another checkpoint's.
    """
    path = _state_path(checkpoint)
    remedy = f"begin another with --model {checkpoint}, or remove {checkpoint} to go on from the one before it"
    if not path.exists():
        raise ValueError(f"{path} is missing, so the run cannot go on: {remedy}.")
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of the many kinds that a damaged file makes torch raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{path} is damaged ({reason}), so the run cannot go on: {remedy}.") from error
    if not isinstance(state, dict) or not state.keys() >= STATE_NAMES:
        raise ValueError(f"{path} holds no state of a run, so that it cannot go on: {remedy}.")
    if type(state["step"]) is not int or f"checkpoint-{state['step']}" != checkpoint.name:
        raise ValueError(f"{path} is the state of step {state['step']!r}, so the run cannot go on: {remedy}.")
    # Older versions have not noted it.
    if state.get("weights_sha256", "") not in ("", weights_sha256(checkpoint)):
        raise ValueError(
            f"{path} was not written with the weights in {checkpoint}, so the run cannot go on: {remedy}."
        )
    return state


def check_arguments(output: Path, arguments: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Refuses recorded arguments that are none of a run's: of another type than the default, or out of range.

    Raises:
        ValueError: names the argument.
    """
    for name, value in arguments.items():
        default = defaults.get(name)
        if isinstance(default, bool):
            right = isinstance(value, bool)
        elif isinstance(default, int):
            right = type(value) is int and value >= min(1, default)
        elif isinstance(default, float):
            right = type(value) in (int, float) and math.isfinite(value)
        else:
            right = not isinstance(default, str) or isinstance(value, str)
        if not right:
            raise ValueError(
                f"{output / ARGUMENTS_FILE} was changed: `{name}` is {value!r}, where a run has a value like "
                f"{default!r}. Restore it, or begin another run."
            )


def save_arguments(output: Path, arguments: dict[str, Any]) -> None:
    with written_whole(output / ARGUMENTS_FILE) as path:
        path.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")


def load_arguments(output: Path) -> dict[str, Any] | None:
    """The arguments that the run was last started with; None if there is no run.

    Raises:
        ValueError: the file is damaged.
    """
    path = output / ARGUMENTS_FILE
    if not path.exists():
        return None
    try:
        arguments = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): restore it, or begin another run.") from error
    if not isinstance(arguments, dict):
        raise ValueError(f"{path} holds no arguments of a run: restore it, or begin another run.")
    return arguments


def log_metrics(output: Path, step: int, values: dict[str, float]) -> None:
    with (output / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")


def keep_metrics(output: Path, step: int) -> None:
    """Drops what was logged after a checkpoint: these steps are taken again.

    Raises:
        ValueError: a line is none of a run's.
    """
    path = output / METRICS_FILE
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that a kill has cut off is one of those.
    try:
        kept = [f"{line}\n" for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} has a line that is none of a run's metrics: remove that, or the file.") from error
    with written_whole(path) as temporary:
        temporary.write_text("".join(kept), encoding="utf-8")
