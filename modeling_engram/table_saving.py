"""Saving a checkpoint whose tables may be larger than memory.

A table that lies on disk is not read for that where its file holds nothing else: in the folder that is saved to, it
stays as it is; from another, it is cloned (copy on write) where the file system can do that. Otherwise its bytes are
copied block by block.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers.utils import logging

from ..configuration.folder_update import FolderUpdate
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
SHARD_NAME = re.compile(r".*-\d{5}-of-\d{5}\.safetensors")

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


def own_file(tensors: dict[str, Tensor]) -> Path | None:
    """The file that holds these tensors under these names, and no others; None if there is no such file.

    Raises:
        RuntimeError: it was changed since it was opened.
    """
    mapped = [tensor for tensor in tensors.values() if isinstance(tensor, MappedTensor)]
    sources = {tensor.entry.path for tensor in mapped}
    if len(mapped) != len(tensors) or len(sources) != 1:
        return None
    for tensor in mapped:
        tensor.check()
    (source,) = sources
    names = {tensor.entry.name for tensor in mapped}
    return source if names == set(tensors) == set(read_header(source)) else None


def clone_file(source: Path, target: Path) -> bool:
    """Whether the file system made `target` share the bytes of `source` by copy on write. A hard link will not do:
    whoever writes into either file writes into both."""
    if fcntl is None:
        return False
    try:
        with open(source, "rb") as old, open(target, "xb") as new:
            fcntl.ioctl(new.fileno(), FICLONE, old.fileno())
        return True
    except OSError:
        target.unlink(missing_ok=True)
        return False


def write_table(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a table's shard: shares the blocks of the file that it lies in, if that holds these tensors under these
    names and no others, or writes one.

    Raises:
        OSError: the disk is full, or will be. RuntimeError: the table's file was changed since it was opened.
    """
    source = own_file(tensors)
    if source is not None and clone_file(source, path):
        for tensor in tensors.values():
            tensor.check()
        return
    needed, free = sum(map(nbytes, tensors.values())), shutil.disk_usage(path.parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC, f"The table needs {needed:,} bytes, {free:,} are free; nothing was saved", str(path.parent)
        )
    write_tensors(path, tensors)


def lies_in(folder: Path, tensors: dict[str, Tensor]) -> str | None:
    """The name of the file in `folder` that holds these tensors under these names, and no others; None if there is no
    such file.

    Raises:
        RuntimeError: the table's file was changed since it was opened.
    """
    source = own_file(tensors)
    if source is None or os.path.realpath(source.parent) != os.path.realpath(folder):
        return None
    return source.name if SHARD_NAME.fullmatch(source.name) else None


def add_tables(update: FolderUpdate, tables: list[dict[str, Tensor]]) -> None:
    """Adds the tables' shards to the weights that are in `update.folder`, and an index of all. A table that lies in
    the target as it is to be stays there, and is not read.

    Raises:
        OSError: the disk is full, or will be. RuntimeError: a table's file was changed since it was opened.
    """
    if not tables:
        return
    index, index_path = {"metadata": {}, "weight_map": {}}, update.folder / update.index
    if index_path.is_file():
        index = json.loads(index_path.read_text(encoding="utf-8"))
        files = sorted(set(index["weight_map"].values()))
    else:
        files = [update.single]
        index["weight_map"] = dict.fromkeys(read_header(update.folder / update.single), update.single)
    kept = [lies_in(update.target, tensors) for tensors in tables]
    count = len(files) + kept.count(None)
    names = [f"{update.stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    renamed = dict(zip(files, names, strict=False))
    for old, new in renamed.items():
        os.rename(update.folder / old, update.folder / new)
    index["weight_map"] = {tensor: renamed[file] for tensor, file in index["weight_map"].items()}
    written, new_names = [update.folder / name for name in renamed.values()], iter(names[len(files) :])
    for tensors, name in zip(tables, kept, strict=True):
        if name is None:
            name = next(new_names)
            write_table(update.folder / name, tensors)
            written.append(update.folder / name)
        else:
            update.checks += [tensor.check for tensor in tensors.values()]
            written.append(update.target / name)
        index["weight_map"] |= dict.fromkeys(tensors, name)
    index["metadata"]["total_size"] = sum(entry.stop - entry.start for entry in find_tensors(written).values())
    index_path.write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
