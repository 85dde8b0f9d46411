"""Saving a checkpoint whose tables may be larger than memory, without a moment in which half of it would load.

Files are made in a folder inside the target and moved in place when they are complete. A table that lies on disk is
not read for that: its file is cloned (copy on write) or hard-linked where the file system can and the file holds
nothing else, else its bytes are copied block by block.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.utils import logging

from .table_storage import CHUNK_BYTES, DTYPE_NAMES, MappedTensor, find_tensors, read_header


try:
    import fcntl
except ImportError:
    fcntl = None


# A table in memory of at least so many bytes gets a shard of its own; a smaller one stays with the other weights.
TABLE_SHARD_BYTES = 2**25
# Files up to so large are written without a progress bar.
QUIET_BYTES = 2**26
# linux/fs.h: makes a file share another one's blocks until either is written to.
FICLONE = 0x40049409
_SHARD_NAME = re.compile(r"(.*)-\d{5}-of-\d{5}\.safetensors")
# Folders in which a save is put together, and in them, those of the files that it replaces. Locks may be known to one
# machine only, so the name says which.
STAGED, REPLACED = f".saving-{re.sub('[^A-Za-z0-9.-]', '-', socket.gethostname())}-", ".replaced-"

Tensor = torch.Tensor | MappedTensor


def nbytes(tensor: Tensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def blocks(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, block by block; on the host, whatever device it is on."""
    if not isinstance(tensor, torch.Tensor):
        yield from (memoryview(block.view(torch.uint8).numpy()).cast("B") for block in tensor.chunks())
        return
    rows = max(1, CHUNK_BYTES // max(1, tensor[0].nbytes))
    for row in range(0, len(tensor), rows):
        block = tensor.detach()[row : row + rows].contiguous().view(torch.uint8).cpu()
        yield memoryview(block.numpy()).cast("B")


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a safetensors file within constant memory, and waits until it is on disk."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors.items():
        end = at + nbytes(tensor)
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (
        open(path, "xb") as file,
        logging.tqdm(
            total=at, unit="B", unit_scale=True, desc=f"Writing {path.name}", disable=at <= QUIET_BYTES or None
        ) as progress,
    ):
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            for block in blocks(tensor):
                file.write(block)
                progress.update(len(block))
        file.flush()
        os.fsync(file.fileno())


def clone_file(source: Path, target: Path) -> bool:
    """Whether the file system made `target` share the bytes of `source`: by copy on write, or else as a hard link."""
    if fcntl is not None:
        try:
            with open(source, "rb") as old, open(target, "xb") as new:
                fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
            return True
        except OSError:
            target.unlink(missing_ok=True)
    try:
        os.link(os.path.realpath(source), target)
        return True
    except OSError:
        return False


def write_table(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a table's shard: shares the file that it lies in, if that holds these tensors under these names and no
    others, or writes one.

    Raises:
        OSError: the disk is full, or will be. RuntimeError: the table's file was changed since it was opened.
    """
    mapped = [tensor for tensor in tensors.values() if isinstance(tensor, MappedTensor)]
    sources = {tensor.entry.path for tensor in mapped}
    if len(mapped) == len(tensors) and len(sources) == 1:
        (source,) = sources
        names = {tensor.entry.name for tensor in mapped}
        for tensor in mapped:
            tensor.check()
        if names == set(tensors) == set(read_header(source)) and clone_file(source, path):
            return
    needed, free = sum(map(nbytes, tensors.values())), shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"The table needs {needed:,} bytes, {free:,} are free; nothing was saved", str(path.parent)
        )
    write_tensors(path, tensors)


def lock_folder(folder: Path) -> int | None:
    """Locks a folder for as long as the file descriptor that is returned is open, at most as long as this process
    lives. None where that cannot be done.

    Raises:
        BlockingIOError: it is locked by another save.
    """
    if fcntl is None:
        return None
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor


class StagedSave:
    """A checkpoint that is put together inside its target, in `folder`, and then moved in place.

    The folder of a save whose process was killed stays behind; the next save that succeeds removes it. That the
    process is dead it knows by the lock, which the kernel keeps for the living: without locks, nothing is removed.

    Args:
        target: the folder to save to; made if missing.
        tables: for each table with a shard of its own, its tensors by name.
        variant (`str`, *optional*): as `save_pretrained` has it.
    """

    def __init__(self, target: str | os.PathLike, tables: list[dict[str, Tensor]], variant: str | None = None) -> None:
        self.target, self.tables = Path(target), tables
        self.stem = "model" if variant is None else f"model.{variant}"
        self.single = f"{self.stem}.safetensors"
        self.index = "model.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json"
        self.made_target = not self.target.exists()
        os.makedirs(self.target, exist_ok=True)
        self.folder, self._lock = self._make_folder()
        self.is_finished = False
        self.saved: set[str] = set()

    def _make_folder(self) -> tuple[Path, int | None]:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=STAGED, dir=self.target))
            # Until it is locked, another save may take it for one that was left behind, and remove it.
            try:
                lock = lock_folder(folder)
            except BlockingIOError:
                continue
            if folder.is_dir():
                return folder, lock
            if lock is not None:
                os.close(lock)

    def finish(self) -> None:
        """Adds the tables' shards to the weights that are in `folder`, and an index of all; once."""
        if self.is_finished:
            return
        self.is_finished = True
        if not self.tables:
            return
        index = {"metadata": {}, "weight_map": {}}
        if (self.folder / self.index).is_file():
            index = json.loads((self.folder / self.index).read_text(encoding="utf-8"))
            files = sorted(set(index["weight_map"].values()))
        else:
            files = [self.single]
            index["weight_map"] = dict.fromkeys(read_header(self.folder / self.single), self.single)
        count = len(files) + len(self.tables)
        names = [f"{self.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        renamed = dict(zip(files, names, strict=False))
        for old, new in renamed.items():
            os.rename(self.folder / old, self.folder / new)
        index["weight_map"] = {tensor: renamed[file] for tensor, file in index["weight_map"].items()}
        for name, tensors in zip(names[len(files) :], self.tables, strict=True):
            write_table(self.folder / name, tensors)
            index["weight_map"] |= dict.fromkeys(tensors, name)
        headers = find_tensors(self.folder / name for name in names)
        index["metadata"]["total_size"] = sum(entry.stop - entry.start for entry in headers.values())
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (self.folder / self.index).write_text(text, encoding="utf-8")

    def commit(self) -> None:
        """Moves everything in place. What a checkpoint loads by, its index or its only file, goes first and comes
        last, so that a folder with some files of the one and some of the other does not load. On an error, all is put
        back; files that are replaced are kept in `folder` until all is done."""
        new = {path.name for path in self.folder.iterdir()}
        entries = {self.single, self.index}
        stale = {
            path.name
            for path in self.target.iterdir()
            if (match := _SHARD_NAME.fullmatch(path.name)) and match[1] == self.stem and path.name not in new
        }
        replaced = Path(tempfile.mkdtemp(prefix=REPLACED, dir=self.folder))
        moves: list[tuple[Path, Path]] = []

        def move(source: Path, target: Path) -> None:
            os.rename(source, target)
            moves.append((source, target))

        try:
            for name in sorted((entries | stale | new), key=lambda name: name not in entries):
                if (self.target / name).exists():
                    move(self.target / name, replaced / name)
            for name in sorted(new, key=lambda name: name in entries):
                move(self.folder / name, self.target / name)
        except BaseException:
            for source, target in reversed(moves):
                os.rename(target, source)
            raise
        self.saved = new
        self._remove_folder()
        self._remove_left_behind()

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _remove_left_behind(self) -> None:
        """Removes the folders of saves that were killed, unless one holds the only copy of a file of the target, which
        it was about to replace, and which this save has not replaced."""
        for folder in [path for path in self.target.iterdir() if path.name.startswith(STAGED)]:
            try:
                lock = lock_folder(folder)
            except BlockingIOError:
                continue
            if lock is None:
                continue
            try:
                if all(self._is_replaced(path.name) for path in folder.glob(f"{REPLACED}*/*")):
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)

    def _is_replaced(self, name: str) -> bool:
        shard = _SHARD_NAME.fullmatch(name)
        is_weights = name in (self.single, self.index) or (shard is not None and shard[1] == self.stem)
        return is_weights or (self.target / name).exists()

    def abandon(self) -> None:
        """Leaves the target as it was."""
        self._remove_folder()
        if self.made_target:
            try:
                self.target.rmdir()
            except OSError:
                pass
