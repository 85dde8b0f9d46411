"""Rows on their way to where they are used: requested before the first layer, awaited by the layer that reads them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .ops.gather_rows import gather_rows
from .table_storage import DiskRows, DiskTable, workers


# Requests of `prefetch` that wait for their forward; the oldest are dropped.
PREFETCHED = 8


def distinct_ids(row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct ids, ascending, of int64 `[n]`, and for each of the n its place among them."""
    if len(row_ids) < 256 and (row_ids[1:] > row_ids[:-1]).all():
        # Those of one token, a decode step's, are: each column has its own range of rows.
        return row_ids, np.arange(len(row_ids))
    bits = len(row_ids).bit_length()
    if not len(row_ids) or row_ids.min() < 0 or int(row_ids.max()).bit_length() + bits > 62:
        return np.unique(row_ids, return_inverse=True)
    # Id and position in one number: sorting such numbers is many times faster than sorting with positions.
    keys = (row_ids << bits) | np.arange(len(row_ids))
    keys.sort()
    ids, positions = keys >> bits, keys & ((1 << bits) - 1)
    is_first = np.ones(len(ids), dtype=bool)
    np.not_equal(ids[1:], ids[:-1], out=is_first[1:])
    inverse = np.empty_like(positions)
    inverse[positions] = np.cumsum(is_first) - 1
    return ids[is_first], inverse


class DiskRequest:
    """Rows of one table on disk; each distinct row is read once.

    Args:
        table ([`DiskTable`]): the table.
        row_ids: int64 `[B, L, C]`, on the host.
        device: where the rows are wanted.
    """

    def __init__(self, table: DiskTable, row_ids: torch.Tensor, device: torch.device) -> None:
        ids, inverse = distinct_ids(row_ids.numpy().reshape(-1))
        self.rows: DiskRows = table.request(ids, pin=device.type == "cuda")
        self.inverse = torch.from_numpy(inverse).view(row_ids.shape)

    def gather(self, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
        """`[B, L, C * d]` on `device`: the distinct rows cross over, and are spread and dequantised there."""
        weight, scale = self.rows.result()
        inverse = self.inverse
        if device.type != "cpu":
            # As bytes: not every device copies fp8.
            weight, scale = (
                None if t is None else t.view(torch.uint8).to(device, non_blocking=True).view(t.dtype)
                for t in (weight, scale)
            )
            inverse = inverse.to(device, non_blocking=True)
        return gather_rows(weight, inverse, scale, dtype)


class RowRequest:
    """What one Engram layer waits for.

    On a GPU, the work is queued on a stream of its own by a worker thread, or at once where no file is read; on a CPU
    it is done when the layer asks.

    Args:
        work: a function that gives the rows.
        device: where they are wanted.
        in_thread: whether the function waits for a file.
        tensors: the function's arguments: all that it reads of the device's memory.
    """

    def __init__(
        self, work: Callable[..., torch.Tensor], device: torch.device, in_thread: bool, *tensors: torch.Tensor
    ) -> None:
        self.work, self.device, self.tensors = work, device, tensors
        self.future = self.done = None
        if device.type != "cuda":
            return
        self.ready = torch.cuda.current_stream(device).record_event()
        # Made on this stream, read on the side stream: not to be handed out again before that is through with them.
        for tensor in tensors:
            tensor.record_stream(side_stream(device))
        if in_thread:
            self.future = workers().submit(self._run_on_stream)
        else:
            self.done = self._run_on_stream()

    def _run_on_stream(self) -> tuple[torch.Tensor, Any]:
        stream = side_stream(self.device)
        with torch.no_grad(), torch.cuda.stream(stream):
            stream.wait_event(self.ready)
            return self.work(*self.tensors), stream.record_event()

    @torch.compiler.disable
    def result(self) -> torch.Tensor:
        """The rows `[B, L, C * d]`; waits for them."""
        if self.device.type != "cuda":
            return self.work(*self.tensors)
        rows, event = self.done if self.future is None else self.future.result()
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        # Made on the side stream, used on this one: not to be handed out again before it is through.
        rows.record_stream(current)
        return rows


def awaited(rows: torch.Tensor | RowRequest | None) -> torch.Tensor | None:
    """The rows, whether they are there or on their way."""
    return rows.result() if isinstance(rows, RowRequest) else rows


_streams: dict[torch.device, Any] = {}


def side_stream(device: torch.device) -> Any:
    """The stream on which rows travel to a GPU: one a device."""
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class Prefetched:
    """Requests that `prefetch` started, by their hash ids, until the forward that uses them. Safe for threads."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: deque = deque(maxlen=PREFETCHED)

    def put(self, hash_ids: torch.Tensor, requests: list[DiskRequest | None]) -> None:
        with self.lock:
            self.entries.append((hash_ids, requests))

    def take(self, hash_ids: torch.Tensor) -> list[DiskRequest | None] | None:
        if not self.entries:
            return None
        with self.lock:
            for index, (known, requests) in enumerate(self.entries):
                if known.shape == hash_ids.shape and torch.equal(known, hash_ids):
                    del self.entries[index]
                    return requests
        return None

    def clear(self) -> None:
        with self.lock:
            self.entries.clear()

    # A copy of a model has asked for nothing yet.
    def __deepcopy__(self, memo: Any) -> Prefetched:
        return Prefetched()

    def __reduce__(self):
        return Prefetched, ()
