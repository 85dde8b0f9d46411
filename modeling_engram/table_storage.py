"""Tables on disk: rows of a tensor in a safetensors file, by their numbers, without reading the rest.

A safetensors file is an 8-byte little-endian length, a JSON header of that length, and the tensors' bytes. A table is
memory-mapped read-only where it lies, whatever else the file holds; nothing is unpickled, copied, or written beside
it. The mapping is never touched by the process itself, which a page beyond the end of a file that was truncated would
end: the kernel copies rows out of it, through a pipe, many at a time (`writev`), and says if it cannot. Before rows
are read, a sample of them shows whether the kernel has them cached. If so, they are copied when they
are asked for. If not, the kernel is asked to read them ahead, all at once and, where they are many, from several
threads, which keeps the drive's queue full.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from ..configuration.folder_update import CONFIG_FILE


# The dtypes that a table or its scales may have, as safetensors names them.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
# What safetensors itself allows.
MAX_HEADER_BYTES = 100_000_000
# Threads that read, and the rows that are worth a thread: on disk, and in the kernel's cache.
WORKERS, COLD_ROWS, CACHED_ROWS = 16, 32, 8192
# Bytes at a time where a whole table is read.
CHUNK_BYTES = 2**24


class TensorEntry(NamedTuple):
    """Where a tensor lies: file, name, dtype (as safetensors names it), shape, and its bytes' range in the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(path: str | os.PathLike) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file by name; reads the header only.

    Raises:
        OSError: the file cannot be read.
        ValueError: not a safetensors file, or shorter than its header says.
    """
    path = Path(path)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ValueError(f"{path} is not a safetensors file, or it is truncated: its header does not fit in it.")
        try:
            header = json.loads(file.read(length))
            entries = {
                name: TensorEntry(path, name, item["dtype"], tuple(item["shape"]), *item["data_offsets"])
                for name, item in header.items()
                if name != "__metadata__"
            }
        except (UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a safetensors file: its header cannot be read ({error!r}).") from error
    data = 8 + length
    entries = {
        name: entry._replace(start=data + entry.start, stop=data + entry.stop) for name, entry in entries.items()
    }
    end = max((entry.stop for entry in entries.values()), default=data)
    if end > size:
        raise ValueError(f"{path} is truncated: its tensors end at byte {end}, the file at {size}. Fetch it again.")
    return entries


def find_tensors(source: str | os.PathLike | Iterable[str | os.PathLike]) -> dict[str, TensorEntry]:
    """The tensors of a checkpoint by name; reads headers only.

    Args:
        source: a safetensors file, several of them, or a folder with model.safetensors or
            model.safetensors.index.json (a model's own, or its snapshot in the Hub cache).

    Raises:
        FileNotFoundError: a folder without such files, or without a file that its index names.
        OSError, ValueError: see [`read_header`].
    """
    if isinstance(source, (str, os.PathLike)):
        folder = Path(source)
        if not folder.is_dir():
            return read_header(folder)
        names = [SINGLE_FILE, INDEX_FILE]
        if (folder / CONFIG_FILE).is_file():
            # Which file the weights are in, where a save was killed, see `FolderUpdate`.
            name = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8")).get("transformers_weights")
            names = names if name is None else [name]
        entry = next((name for name in names if (folder / name).is_file()), None)
        if entry is None:
            raise FileNotFoundError(f"{folder} has neither {' nor '.join(names)}.")
        if entry.endswith(".safetensors"):
            return read_header(folder / entry)
        weight_map = json.loads((folder / entry).read_text(encoding="utf-8"))["weight_map"]
        source = [folder / name for name in sorted(set(weight_map.values()))]
    entries: dict[str, TensorEntry] = {}
    for path in source:
        entries.update(read_header(path))
    return entries


class MappedTensor:
    """A tensor `[rows, n]` of a safetensors file, memory-mapped read-only. Safe to use from many threads.

    Args:
        entry ([`TensorEntry`]): which tensor.

    Raises:
        OSError: the file cannot be opened.
        ValueError: not of two dimensions, of a dtype that no table has, or of another size than its shape says.
    """

    def __init__(self, entry: TensorEntry) -> None:
        self.entry = entry
        if entry.dtype not in DTYPES or len(entry.shape) != 2 or 0 in entry.shape:
            raise ValueError(
                f"{entry.name} in {entry.path} is {entry.dtype} {list(entry.shape)}, not a table: [rows, columns] of "
                f"{', '.join(DTYPES)}."
            )
        self.dtype, self.shape = DTYPES[entry.dtype], entry.shape
        self.row_bytes = entry.shape[1] * self.dtype.itemsize
        if entry.stop - entry.start != entry.shape[0] * self.row_bytes:
            raise ValueError(f"{entry.name} in {entry.path} has another number of bytes than its shape asks for.")
        self.file = os.open(entry.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self.file)
        self.stat = self._identity(os.fstat(self.file))
        self.check()
        # A mapping starts on a page.
        start = entry.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._skip = entry.start - start
        self._map = mmap.mmap(self.file, entry.stop - start, access=mmap.ACCESS_READ, offset=start)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
        self._address = np.frombuffer(self._map, np.uint8, 1, self._skip).ctypes.data

    @staticmethod
    def _identity(stat: os.stat_result) -> tuple[int, ...]:
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns

    def check(self) -> None:
        """Raises unless the file is as it was when it was opened. Called before and after every read: what was written
        over in between are no rows of this table.

        Raises:
            RuntimeError: truncated, written to, replaced or removed since.
        """
        path = self.entry.path
        now = self._identity(os.fstat(self.file))
        if now != self.stat or now[2] < self.entry.stop:
            change = "truncated" if now[2] < self.entry.stop else "written to"
        else:
            try:
                change = None if self._identity(os.stat(path)) == self.stat else "replaced"
            except OSError as error:
                change = f"removed ({error.strerror})"
        if change is not None:
            raise RuntimeError(
                f"{path}, which holds the table {self.entry.name}, was {change} while open: load again."
            )

    def is_cached(self, row_ids: np.ndarray) -> bool:
        """Whether the kernel has a sample of these rows in its cache; False where it does not tell."""
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        buffer, start, row_bytes = [bytearray(self.row_bytes)], self.entry.start, self.row_bytes
        try:
            for row in row_ids[:: max(1, len(row_ids) // (4 + len(row_ids) // 256))].tolist():
                if os.preadv(self.file, buffer, start + row * row_bytes, os.RWF_NOWAIT) != row_bytes:
                    return False
        except OSError:
            return False
        return True

    def read_ahead(self, row_ids: np.ndarray) -> None:
        """Asks the kernel to fetch these rows, and returns at once."""
        if not hasattr(mmap, "MADV_WILLNEED"):
            return
        page, advise, advice = mmap.PAGESIZE, self._map.madvise, mmap.MADV_WILLNEED
        first = (row_ids * self.row_bytes + self._skip) & -page
        length = (row_ids + 1) * self.row_bytes + self._skip - first
        for start, size in zip(first.tolist(), length.tolist(), strict=True):
            advise(advice, start, size)

    def gather(self, row_ids: np.ndarray, out: np.ndarray) -> None:
        """Copies rows (int64 `[N]`, known to be in range) into `out`, uint8 `[N, row_bytes]`.

        Raises:
            RuntimeError: the file was truncated, written to, replaced or removed since it was opened.
        """
        if len(row_ids):
            (self._gather if writev is not None else self._gather_by_reads)(row_ids, memoryview(out.reshape(-1)))
        self.check()

    def _gather(self, row_ids: np.ndarray, out: memoryview) -> None:
        source, target = pipe_of_thread()
        vectors = np.empty((len(row_ids), 2), np.uint64)
        vectors[:, 0], vectors[:, 1] = self._address + row_ids * self.row_bytes, self.row_bytes
        address, done = vectors.ctypes.data, 0
        while done < len(out):
            row, part = divmod(done, self.row_bytes)
            if part:
                vectors[row] = (
                    int(vectors[row, 0]) + int(vectors[row, 1]) - self.row_bytes + part,
                    self.row_bytes - part,
                )
            # As much as the pipe holds.
            copied = writev(target, address + row * vectors.itemsize * 2, min(len(row_ids) - row, IOV_MAX))
            if copied <= 0:
                error = ctypes.get_errno()
                self.check()
                raise RuntimeError(
                    f"{self.entry.path} cannot be read, rows of {self.entry.name}: {os.strerror(error)}."
                )
            end = done + copied
            while done < end:
                done += os.readv(source, [out[done:end]])

    def _gather_by_reads(self, row_ids: np.ndarray, out: memoryview) -> None:
        size = self.row_bytes
        with _lock:
            for at, start in enumerate((self.entry.start + row_ids * size).tolist()):
                os.lseek(self.file, start, os.SEEK_SET)
                data = os.read(self.file, size)
                if len(data) != size:
                    self.check()
                    raise RuntimeError(f"{self.entry.path} ended early while {self.entry.name} was read.")
                out[at * size : (at + 1) * size] = data

    def chunks(self) -> Iterator[torch.Tensor]:
        """The whole tensor in blocks of rows, each `[n, columns]`, read past the mapping."""
        step = max(1, CHUNK_BYTES // self.row_bytes)
        with open(self.entry.path, "rb", buffering=0) as file:
            file.seek(self.entry.start)
            for row in range(0, self.shape[0], step):
                count = min(step, self.shape[0] - row)
                block = torch.empty(count * self.row_bytes, dtype=torch.uint8)
                view, at = memoryview(block.numpy()), 0
                while at < len(view):
                    read = file.readinto(view[at:])
                    self.check()
                    if not read:
                        raise RuntimeError(f"{self.entry.path} ended early while {self.entry.name} was read.")
                    at += read
                yield block.view(self.dtype).view(count, self.shape[1])


class DiskTable:
    """A table on disk, `[rows, d]`, with its scales `[rows, d / block]` if it is quantised. Open it with
    [`open_table`], so that all who use one table share it.

    Attributes:
        weight ([`MappedTensor`]), scale ([`MappedTensor`], *optional*): its tensors.
        rows, dim (`int`): the table's shape.
        dtype (`torch.dtype`): of the rows.
    """

    def __init__(self, weight: MappedTensor, scale: MappedTensor | None = None) -> None:
        self.weight, self.scale = weight, scale
        (self.rows, self.dim), self.dtype = weight.shape, weight.dtype
        name, path = weight.entry.name, weight.entry.path
        if (self.dtype == torch.float8_e4m3fn) != (scale is not None) or self.dtype == torch.float8_e8m0fnu:
            raise ValueError(
                f"{name} in {path} is {weight.entry.dtype} and {'has' if scale else 'lacks'} scales: a table of "
                "F8_E4M3 needs them, one of another dtype has none."
            )
        if scale is None:
            return
        if scale.dtype != torch.float8_e8m0fnu or scale.shape[0] != self.rows or self.dim % scale.shape[1]:
            raise ValueError(
                f"{scale.entry.name} in {scale.entry.path} is {scale.entry.dtype} {list(scale.shape)}; for the table "
                f"{name}, {[self.rows, self.dim]}, scales are F8_E8M0 [{self.rows}, n] with n a divisor of {self.dim}."
            )

    @property
    def tensors(self) -> tuple[MappedTensor, ...]:
        return (self.weight,) if self.scale is None else (self.weight, self.scale)

    def request(self, row_ids: np.ndarray, pin: bool = False) -> DiskRows:
        """Starts to read rows, and returns at once.

        Args:
            row_ids: int64 `[N]`, ascending and distinct.
            pin: whether to read into pinned memory, which an accelerator copies from by itself.

        Raises:
            IndexError: an id beyond the last row.
            RuntimeError: the file was truncated, replaced or removed.
        """
        if len(row_ids) and (row_ids[0] < 0 or row_ids[-1] >= self.rows):
            raise IndexError(
                f"Row ids must lie between 0 and {self.rows - 1}, the last row of {self.weight.entry.name} in "
                f"{self.weight.entry.path}, got ids from {row_ids[0]} to {row_ids[-1]}. Are these the hash ids of "
                "another configuration, or another layer?"
            )
        for tensor in self.tensors:
            tensor.check()
        return DiskRows(self, row_ids, pin)

    # Models that are copied share the table; another process opens it again.
    def __deepcopy__(self, memo: Any) -> DiskTable:
        return self

    def __reduce__(self):
        return _open_entries, tuple(tensor.entry for tensor in self.tensors)


class DiskRows:
    """Rows on their way from disk; made by [`DiskTable.request`]."""

    def __init__(self, table: DiskTable, row_ids: np.ndarray, pin: bool) -> None:
        self.table, self.row_ids = table, row_ids
        count = len(row_ids)
        self.buffers = [
            torch.empty(count, tensor.row_bytes, dtype=torch.uint8, pin_memory=pin) for tensor in table.tensors
        ]
        self.futures: list[Future] = []
        cached = all(tensor.is_cached(row_ids) for tensor in table.tensors)
        step = max(CACHED_ROWS if cached else COLD_ROWS, -(-count // WORKERS))
        if count > step:
            submit = workers().submit
            self.futures = [submit(self._read, slice(at, at + step), not cached) for at in range(0, count, step)]
        elif not cached:
            for tensor in table.tensors:
                tensor.read_ahead(row_ids)

    def _read(self, part: slice, read_ahead: bool = False) -> None:
        if read_ahead:
            for tensor in self.table.tensors:
                tensor.read_ahead(self.row_ids[part])
        for tensor, buffer in zip(self.table.tensors, self.buffers, strict=True):
            tensor.gather(self.row_ids[part], buffer.numpy()[part])

    def result(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Waits for the rows `[N, d]` and their scales `[N, d / block]` or None."""
        if self.futures:
            for future in self.futures:
                future.result()
        else:
            self._read(slice(None))
        weight, *scale = (
            buffer.view(tensor.dtype) for tensor, buffer in zip(self.table.tensors, self.buffers, strict=True)
        )
        return weight, scale[0] if scale else None


# The kernel's, from the C library of the process; None where there is none. Both sides release Python's lock.
writev = getattr(ctypes.CDLL(None, use_errno=True), "writev", None) if os.name == "posix" else None
if writev is not None:
    writev.argtypes, writev.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int], ctypes.c_ssize_t
IOV_MAX = 1024
_pipes = threading.local()


class _Pipe:
    def __init__(self) -> None:
        self.ends = os.pipe()
        os.set_blocking(self.ends[1], False)
        for end in self.ends:
            weakref.finalize(self, os.close, end)


def pipe_of_thread() -> tuple[int, int]:
    """The ends of a pipe that no other thread uses: to read from, and to write to without waiting."""
    if not hasattr(_pipes, "pipe"):
        _pipes.pipe = _Pipe()
    return _pipes.pipe.ends


# Tables that are open, for whoever opens them again; and the threads that read. Both start anew in a forked process.
_open_tables: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _after_fork() -> None:
    global _lock, _pool, _pipes
    _lock, _pool, _pipes = threading.Lock(), None, threading.local()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def workers() -> ThreadPoolExecutor:
    """The threads that read rows, shared by all tables."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="engram-rows")
        return _pool


def _open_entries(weight: TensorEntry, scale: TensorEntry | None = None) -> DiskTable:
    entries = [weight] if scale is None else [weight, scale]
    key = tuple(
        (os.path.realpath(entry.path), *MappedTensor._identity(os.stat(entry.path)), entry[1:]) for entry in entries
    )
    with _lock:
        table = _open_tables.get(key)
        if table is None:
            _open_tables[key] = table = DiskTable(*map(MappedTensor, entries))
        return table


def open_table(
    source: str | os.PathLike | Iterable[str | os.PathLike] | dict[str, TensorEntry],
    name: str,
    scale_name: str | None = None,
) -> DiskTable:
    """Opens a table where it lies.

    Args:
        source: a safetensors file, several, or a checkpoint's folder, see [`find_tensors`]; or what that returned.
        name: of the table's tensor, `[rows, d]`.
        scale_name: of its scales, for a table of F8_E4M3; they may lie in another file.

    Returns:
        [`DiskTable`]: the same one to all who open the same tensors of the same file.

    Raises:
        KeyError: no tensor of that name. OSError, ValueError: the file, the tensor or its scales are not as they must
        be; the message says what.
    """
    entries = source if isinstance(source, dict) else find_tensors(source)
    for wanted in (name, scale_name):
        if wanted is not None and wanted not in entries:
            known = ", ".join(sorted(entries)[:8])
            raise KeyError(f"There is no tensor {wanted}; there are {known}{', ...' if len(entries) > 8 else ''}.")
    return _open_entries(entries[name], None if scale_name is None else entries[scale_name])


__all__ = ["DiskTable", "MappedTensor", "TensorEntry", "find_tensors", "open_table", "read_header"]
