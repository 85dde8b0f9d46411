"""Rows of a table by their numbers, dequantised: ids `[..., C]` -> `[..., C * d]`.

Forward, for float tables and for quantised ones (e4m3 rows, and a scale of e8m0 for each block of columns):

    out[..., c * d + j] = table[id_c, j]
    out[..., c * d + j] = table[id_c, j] * 2^(scale_byte[id_c, j // block] - 127)

the latter in fp32, where the product is exact (beyond 3.4e38 it is infinite), then one cast. Bytes are decoded in
integer arithmetic, since not every card loads fp8, and on a CPU torch's own conversion is several times slower: e4m3
`s eeee mmm` shifted into fp16's `s eeeee mmmmmmmmmm` is the value times 2^-8, subnormal numbers and zeros of both
signs included; its one NaN, all ones but the sign, becomes fp16's by a carry.

Backward: the gradient of a row is the sum of the output's gradients wherever the row was fetched. Sparse, it holds the
rows that were fetched and nothing else: ids are sorted, and each run of equal ids summed in fp32, in the order of
their positions, so that two passes give the same bits. Quantised tables have no gradient.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .backend import TRITON_DEVICES, device_guard, kernel, resolve_backend


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


TABLE_DTYPE, SCALE_DTYPE = torch.float8_e4m3fn, torch.float8_e8m0fnu
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements that are decoded at a time on a CPU, for each thread: what that takes stays in cache.
CPU_BLOCK = 2**18
# Up to so many, a decode step's, torch's own slow conversion beats the ten operations of ours; the bits are the same.
CPU_FEW = 2**13
# Elements of a tile, and those of a row of it.
TILE, TILE_DIM = 4096, 1024
# Rows that one program sums in turn; longer runs of one id are cut into this many pieces.
RUN_LENGTH, RUN_PIECES = 64, 32


def gather_rows_reference(
    table: torch.Tensor,
    row_ids: torch.Tensor,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The formula in plain PyTorch; arguments as `gather_rows`. What all else here must equal."""
    rows = table[row_ids]
    if scales is not None:
        blocks = rows.float().unflatten(-1, (scales.shape[-1], -1))
        rows = (blocks * scales[row_ids].float().unsqueeze(-1)).flatten(-2)
    return rows.flatten(-2).to(dtype or rows.dtype)


# Eager.


def _embedding(row_ids: torch.Tensor, table: torch.Tensor, sparse: bool = False) -> torch.Tensor:
    """`F.embedding`, which refuses ids out of range before it reads (on a GPU it asserts), with a clearer message."""
    if torch.compiler.is_compiling():
        return F.embedding(row_ids, table, sparse=sparse)
    try:
        return F.embedding(row_ids, table, sparse=sparse)
    except IndexError as error:
        raise IndexError(
            f"`row_ids` must lie between 0 and {table.shape[0] - 1}, the last row of the table, got ids from "
            f"{row_ids.min()} to {row_ids.max()}. Are these the hash ids of another configuration, or another layer?"
        ) from error


def _decode_e4m3(byte: torch.Tensor, bits: torch.Tensor, nan: torch.Tensor, out: torch.Tensor) -> None:
    """int8 -> fp32, exactly, by way of two int16 tensors of the same shape."""
    bits.copy_(byte).bitwise_left_shift_(7)  # s s eeee mmm 0000000
    torch.bitwise_and(bits, 0x3FFF, out=nan).add_(0x80).bitwise_and_(0x4000)
    bits.bitwise_and_(~0x4000).bitwise_or_(nan)
    out.copy_(bits.view(torch.float16)).mul_(256)


def _decode_e8m0(byte: torch.Tensor) -> torch.Tensor:
    """uint8 -> fp32, exactly: 2^-127 is subnormal, and 255 is NaN."""
    byte = byte.to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def _dequantised_rows(
    table: torch.Tensor, row_ids: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """row_ids [N] -> [N, d]."""
    n_ids, dim, n_blocks, device = len(row_ids), table.shape[1], scales.shape[1], table.device
    table, scales = table.view(torch.int8), scales.view(torch.uint8)
    if device.type == "cpu" and n_ids * dim <= CPU_FEW:
        rows = _embedding(row_ids, table).view(TABLE_DTYPE).float().unflatten(-1, (n_blocks, -1))
        factors = F.embedding(row_ids, scales).view(SCALE_DTYPE).float()
        return rows.mul_(factors.unsqueeze(-1)).flatten(-2).to(dtype)

    size = CPU_BLOCK * torch.get_num_threads() // dim if device.type == "cpu" else n_ids
    size = max(1, min(size, n_ids))
    out = torch.empty(n_ids, dim, dtype=dtype, device=device)
    scratch = torch.empty(2, size, dim, dtype=torch.int16, device=device)
    # Of another dtype than fp32, a block is computed apart, and then cast.
    block = None if dtype == torch.float32 else torch.empty(size, dim, dtype=torch.float32, device=device)
    for start in range(0, n_ids, size):
        ids, to = row_ids[start : start + size], out[start : start + size]
        rows = to if block is None else block[: len(ids)]
        _decode_e4m3(_embedding(ids, table), *scratch[:, : len(ids)], rows)
        rows.unflatten(-1, (n_blocks, -1)).mul_(_decode_e8m0(F.embedding(ids, scales)).unsqueeze(-1))
        if block is not None:
            to.copy_(rows)
    return out


def _sorted_with_positions(row_ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids [N] in order, and where each was; equal ones stay in order."""
    bits = len(row_ids).bit_length()
    if row_ids.device.type != "cpu" or bits + rows.bit_length() > 62:
        return row_ids.sort(stable=True)
    # Id and position in one number: numpy sorts such numbers many times faster than torch sorts pairs.
    keys = (row_ids.long().numpy() << bits) | np.arange(len(row_ids))
    keys.sort()
    keys = torch.from_numpy(keys)
    return keys >> bits, keys & ((1 << bits) - 1)


def _runs(row_ids: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of row_ids [N]: the distinct ones, ascending; all positions, run by run; starts and lengths of the runs."""
    ids, positions = _sorted_with_positions(row_ids, rows)
    ids, counts = torch.unique_consecutive(ids, return_counts=True)
    return ids, positions, counts.cumsum(0) - counts, counts


def _sparse_gradient(ids: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Of ids that ascend, which is what coalesced means. Called in a backward pass."""
    indices, values = ids.long().unsqueeze(0).to(table.device), values.to(table.device, table.dtype)
    address, count = values.data_ptr(), len(values)

    def mark() -> None:
        grad = table.grad
        if grad is not None and grad.is_sparse and (grad._values().data_ptr(), grad._nnz()) == (address, count):
            grad._coalesced_(True)

    # Autograd takes a first gradient over as `table.grad` with its memory, but without the mark that it is coalesced,
    # and optimizers would sort it again.
    if table.is_leaf:
        torch.autograd.Variable._execution_engine.queue_callback(mark)
    return torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=False, is_coalesced=True)


class EagerSparseGather(torch.autograd.Function):
    """Rows of a float table [rows, d] by row_ids [N]: [N, d], with a sparse gradient."""

    @staticmethod
    def forward(ctx, table, row_ids, dtype):
        ctx.save_for_backward(row_ids)
        # Not a saved tensor: hooks may move those to the host, and an optimizer may change the table meanwhile.
        ctx.table = table
        return _embedding(row_ids, table).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        (row_ids,), table = ctx.saved_tensors, ctx.table
        if not len(row_ids):
            return _sparse_gradient(row_ids, grad_out, table), None, None
        ids, positions, starts, _ = _runs(row_ids, table.shape[0])
        # A bag of rows is summed in fp32, in order, and rounded once: to the wider of the two types.
        grad_out = grad_out.to(torch.promote_types(grad_out.dtype, table.dtype)).contiguous()
        sums = F.embedding_bag(positions.to(starts.dtype), grad_out, starts, mode="sum")
        return _sparse_gradient(ids, sums, table), None, None


# Triton.


@kernel
def _gather_kernel(
    table_ptr,
    scales_ptr,
    ids_ptr: torch.Tensor,
    out_ptr,
    n_ids: int,
    rows: int,
    ids_stride: int,
    ids_column_stride: int,
    TABLE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,
    QUANTISED: tl.constexpr,
    BLOCK_IDS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_GROUP: tl.constexpr,
):
    """out [N, d]. A tile is some ids by some groups of columns; one scale is for one group."""
    number = tl.program_id(0).to(tl.int64) * BLOCK_IDS + tl.arange(0, BLOCK_IDS)
    ids_at = number // COLUMNS * ids_stride + number % COLUMNS * ids_column_stride
    row = tl.load(ids_ptr + ids_at, mask=number < n_ids, other=0).to(tl.int64)
    known = (row >= 0) & (row < rows)
    tl.device_assert(known, "row id out of range")
    # Where assertions are off, a row that does not exist is NaN.
    known = (known & (number < n_ids))[:, None, None]
    row, number = row[:, None, None], number[:, None, None]

    group = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)[None, :, None]
    lane = tl.arange(0, BLOCK_GROUP)[None, None, :]
    column = group * GROUP + lane
    inside = (lane < GROUP) & (column < DIM)
    if QUANTISED:
        byte = tl.load(table_ptr + row * TABLE_STRIDE + column, mask=known & inside, other=0x7F).to(tl.int16)
        # See _decode_e4m3; a byte is not extended by its sign here.
        bits = ((byte & 0x7F) << 7) | ((byte & 0x80) << 8) | ((((byte & 0x7F) + 1) & 0x80) << 7)
        value = bits.to(tl.float16, bitcast=True).to(tl.float32) * 256
        scale_inside = known & (group * GROUP < DIM)
        scale = tl.load(scales_ptr + row * SCALES_STRIDE + group, mask=scale_inside, other=0xFF).to(tl.int32)
        scale = tl.where(scale == 255, 0x7FC00000, tl.where(scale == 0, 0x00400000, scale << 23))
        value *= scale.to(tl.float32, bitcast=True)
    else:
        value = tl.load(table_ptr + row * TABLE_STRIDE + column, mask=known & inside, other=float("nan"))
        if table_ptr.dtype.element_ty != out_ptr.dtype.element_ty:
            value = value.to(tl.float32)
    out_inside = (number < n_ids) & inside
    tl.store(out_ptr + number * DIM + column, value.to(out_ptr.dtype.element_ty), mask=out_inside)


@kernel
def _sum_runs_kernel(
    grad_out_ptr,
    positions_ptr: torch.Tensor,
    starts_ptr: torch.Tensor,
    ends_ptr: torch.Tensor,
    sums_ptr,
    n_runs: int,
    DIM: tl.constexpr,
    BLOCK_RUNS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """sums [runs, d]: of the rows of grad_out [N, d] at positions[start:end], one after the other."""
    run = tl.program_id(0).to(tl.int64) * BLOCK_RUNS + tl.arange(0, BLOCK_RUNS)
    column = tl.program_id(1) * BLOCK_DIM + tl.arange(0, BLOCK_DIM)[None, :]
    start = tl.load(starts_ptr + run, mask=run < n_runs, other=0)
    count = tl.load(ends_ptr + run, mask=run < n_runs, other=0) - start
    total = tl.zeros([BLOCK_RUNS, BLOCK_DIM], tl.float32)
    for index in range(0, tl.max(count, axis=0)):
        position = tl.load(positions_ptr + start + index, mask=index < count, other=0)
        # Compared as a column: Triton 3.7 fails on a comparison that is widened, at some widths.
        inside = (index < count[:, None]) & (column < DIM)
        total += tl.load(grad_out_ptr + position[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
    inside = (run < n_runs)[:, None] & (column < DIM)
    tl.store(sums_ptr + run[:, None] * DIM + column, total.to(sums_ptr.dtype.element_ty), mask=inside)


def _gather_tile(dim: int, group: int | None) -> dict[str, int]:
    """Tile of the gather: pieces of rows of up to TILE_DIM elements, TILE in all. Without scales, such a piece is a
    group of its own."""
    if group is None:
        group = min(triton.next_power_of_2(dim), TILE_DIM)
    block_group = triton.next_power_of_2(group)
    block_groups = min(triton.next_power_of_2(triton.cdiv(dim, group)), max(1, TILE_DIM // block_group))
    block_ids = max(1, TILE // (block_groups * block_group))
    return {"GROUP": group, "BLOCK_IDS": block_ids, "BLOCK_GROUPS": block_groups, "BLOCK_GROUP": block_group}


def _launch_gather(
    table: torch.Tensor, row_ids: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """row_ids [T, C] on a GPU, table there or in pinned host memory -> [T * C, d]."""
    rows, dim = table.shape
    n_ids = row_ids.numel()
    out = torch.empty(n_ids, dim, dtype=dtype, device=row_ids.device)
    if not n_ids:
        return out
    tile = _gather_tile(dim, None if scales is None else dim // scales.shape[1])
    grid = (
        triton.cdiv(n_ids, tile["BLOCK_IDS"]),
        triton.cdiv(triton.cdiv(dim, tile["GROUP"]), tile["BLOCK_GROUPS"]),
    )
    # What turns the kernel's assertion on; torch.compile does so itself.
    options = {} if torch.compiler.is_compiling() else {"debug": True, "sanitize_overflow": False}
    with device_guard(row_ids):
        _gather_kernel[grid](
            table if scales is None else table.view(torch.uint8),
            None if scales is None else scales.view(torch.uint8),
            row_ids,
            out,
            n_ids,
            rows,
            row_ids.stride(0),
            row_ids.stride(1),
            TABLE_STRIDE=table.stride(0),
            SCALES_STRIDE=0 if scales is None else scales.stride(0),
            COLUMNS=row_ids.shape[1],
            DIM=dim,
            QUANTISED=scales is not None,
            num_warps=4,
            **tile,
            **options,
        )
    return out


def _launch_sums(
    grad_out: torch.Tensor, positions: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    n_runs, dim = len(starts), grad_out.shape[1]
    sums = torch.empty(n_runs, dim, dtype=dtype, device=grad_out.device)
    block_dim = min(triton.next_power_of_2(dim), TILE_DIM)
    block_runs = max(1, TILE // 2 // block_dim)
    grid = (triton.cdiv(n_runs, block_runs), triton.cdiv(dim, block_dim))
    with device_guard(grad_out):
        _sum_runs_kernel[grid](
            grad_out,
            positions,
            starts,
            ends,
            sums,
            n_runs,
            DIM=dim,
            BLOCK_RUNS=block_runs,
            BLOCK_DIM=block_dim,
            num_warps=4,
        )
    return sums


class TritonGather(torch.autograd.Function):
    """The gather's kernels: table [rows, d], row_ids [T, C], scales [rows, d / block] or None -> [T * C, d]."""

    @staticmethod
    def forward(ctx, table, row_ids, scales, dtype, sparse_grad):
        ctx.save_for_backward(row_ids)
        ctx.rows, ctx.dtype = table.shape[0], table.dtype
        ctx.table = table if sparse_grad else None
        return _launch_gather(table, row_ids, scales, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        row_ids = ctx.saved_tensors[0].reshape(-1)
        table, rows, dtype = ctx.table, ctx.rows, ctx.dtype
        if table is None:
            grad_table = torch.ops.aten.embedding_dense_backward(grad_out.to(dtype), row_ids, rows, -1, False)
            return grad_table, None, None, None, None
        if not len(row_ids):
            return _sparse_gradient(row_ids, grad_out, table), None, None, None, None
        grad_out = grad_out.contiguous()
        ids, positions, starts, counts = _runs(row_ids, rows)
        # Some rows, as those of padding, occur thousands of times: such a run is summed by several programs.
        long = (counts > RUN_LENGTH).nonzero().squeeze(-1)
        ends = starts + torch.where(counts > RUN_LENGTH, 0, counts)
        values = _launch_sums(grad_out, positions, starts, ends, dtype)
        if len(long):
            cuts = torch.arange(RUN_PIECES + 1, device=long.device) * counts[long, None] // RUN_PIECES
            cuts += starts[long, None]
            starts, ends = cuts[:, :-1].flatten(), cuts[:, 1:].flatten()
            pieces = _launch_sums(grad_out, positions, starts, ends, torch.float32)
            values[long] = pieces.unflatten(0, (-1, RUN_PIECES)).sum(1).to(values.dtype)
        return _sparse_gradient(ids, values, table), None, None, None, None


def _check(table: torch.Tensor, row_ids: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype | None) -> None:
    if table.ndim != 2 or row_ids.ndim == 0:
        raise ValueError(
            f"`table` must be [rows, d] and `row_ids` [..., C], got {list(table.shape)} and {list(row_ids.shape)}."
        )
    if row_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"`row_ids` must be int64 or int32, got {row_ids.dtype}.")
    if dtype is not None and dtype not in (*FLOAT_DTYPES, torch.float64):
        raise TypeError(f"`dtype` must be fp32, bf16, fp16 or fp64, got {dtype}.")
    if table.dtype != TABLE_DTYPE:
        if table.dtype not in (*FLOAT_DTYPES, torch.float64):
            raise TypeError(f"`table` must be fp32, bf16, fp16, fp64 or {TABLE_DTYPE} with scales, got {table.dtype}.")
        if scales is not None:
            raise ValueError(
                f"`scales` belong to a table of {TABLE_DTYPE}; this one is {table.dtype}: leave them out."
            )
        return
    if scales is None:
        raise ValueError(f"A table of {TABLE_DTYPE} needs `scales`, {SCALE_DTYPE} [rows, d / block].")
    if scales.dtype != SCALE_DTYPE:
        raise TypeError(f"`scales` must be {SCALE_DTYPE}, got {scales.dtype}.")
    rows, dim = table.shape
    if scales.ndim != 2 or scales.shape[0] != rows or scales.shape[1] == 0 or dim % scales.shape[1]:
        raise ValueError(
            f"For a table of {[rows, dim]}, `scales` must be [{rows}, n] with n a divisor of {dim}, got "
            f"{list(scales.shape)}."
        )
    if scales.device != table.device:
        raise ValueError(f"`scales` must lie beside the table on {table.device}, got {scales.device}.")
    if table.requires_grad or scales.requires_grad:
        raise ValueError("Quantised tables are frozen in training: set `requires_grad` of table and scales to False.")


def _unsupported(
    table: torch.Tensor, row_ids: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, dense_grad: bool
) -> str | None:
    """Why the kernels cannot take these inputs, or None if they can."""
    if not {table.dtype, dtype} <= {*FLOAT_DTYPES, TABLE_DTYPE}:
        return (
            f"it takes tables and dtypes of fp32, bf16 and fp16, and quantised tables, got {table.dtype} and {dtype}"
        )
    tensors = [table] if scales is None else [table, scales]
    if any(tensor.stride(1) != 1 for tensor in tensors):
        return "the columns of the table or its scales do not lie side by side"
    if table.device.type == "cpu" and row_ids.device.type in TRITON_DEVICES:
        if torch.compiler.is_compiling() or not all(tensor.is_pinned() for tensor in tensors):
            return "the table lies in host memory that is not pinned"
        if dense_grad:
            return "the gradient of a table in host memory would be dense; `sparse_grad=True` makes it sparse"
    return None


def gather_rows(
    table: torch.Tensor,
    row_ids: torch.Tensor,
    scales: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    sparse_grad: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Fetches rows of a table and, if it is quantised, dequantises them.

    The rows come from where the table lies: beside the ids; in pinned host memory, which a GPU's kernel reads in
    place; or on any other device, to which the ids are sent and from which the rows come back.

    Args:
        table: `[rows, d]`, fp32, bf16, fp16 (fp64), or float8_e4m3fn with `scales`.
        row_ids: int64 or int32 `[..., C]`, each from 0 to rows - 1.
        scales: float8_e8m0fnu `[rows, d / block]` for a table of float8_e4m3fn, else None.
        dtype: of the result; None for the table's own, or fp32 for a quantised table.
        sparse_grad: gives the table a sparse gradient `[rows, d]` in its dtype: coalesced, equal ids summed in fp32.
            In a graph of `torch.compile`, where the number of distinct rows is not known, equal ids are left to
            `coalesce()`. False: a dense gradient, as `F.embedding` has it.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        `[..., C * d]` on the device of `row_ids`.

    Raises:
        IndexError: an id out of range, on a CPU; on a GPU an assertion of the device fails.
        TypeError, ValueError: dtypes or shapes that do not fit; a quantised table that requires a gradient.
    """
    _check(table, row_ids, scales, dtype)
    if dtype is None:
        dtype = torch.float32 if table.dtype == TABLE_DTYPE else table.dtype
    needs_grad = table.requires_grad and torch.is_grad_enabled()
    if torch.compiler.is_compiling() and not needs_grad and (scales is not None or table.device != row_ids.device):
        return _opaque_gather(table, row_ids, scales, dtype, backend)
    unsupported = _unsupported(table, row_ids, scales, dtype, needs_grad and not sparse_grad)
    runs_on = row_ids if table.device.type == "cpu" else table
    backend = resolve_backend("gather_rows", backend, runs_on, unsupported)

    *leading, columns = row_ids.shape
    shape, device = (*leading, columns * table.shape[1]), row_ids.device
    if backend == "eager" or table.device.type != "cpu":
        row_ids = row_ids.to(table.device)
    if needs_grad and sparse_grad and torch.compiler.is_compiling():
        rows = F.embedding(row_ids, table, sparse=True).to(dtype)
    elif backend == "triton":
        row_ids = row_ids.reshape(row_ids.shape[:-1].numel(), columns)
        rows = TritonGather.apply(table, row_ids, scales, dtype, sparse_grad)
    elif scales is not None:
        rows = _dequantised_rows(table, row_ids.reshape(-1), scales, dtype)
    elif needs_grad and sparse_grad:
        rows = EagerSparseGather.apply(table, row_ids.reshape(-1), dtype)
    else:
        rows = _embedding(row_ids, table).to(dtype)
    return rows.reshape(shape).to(device)


# One call in a graph. Inductor has no code for e8m0, would copy a quantised table to hand a kernel its bytes, and
# gives kernels tensors of one device only. Each copy of this code in a process has an operation of its own.
@torch.library.custom_op(
    f"hf_engram::gather_rows_{zlib.crc32(__name__.encode()):08x}",
    mutates_args=(),
    schema="(Tensor table, Tensor row_ids, Tensor? scales, ScalarType dtype, str? backend) -> Tensor",
)
def _opaque_gather(table, row_ids, scales, dtype, backend):
    return gather_rows(table, row_ids, scales, dtype, backend=backend)


@_opaque_gather.register_fake
def _(table, row_ids, scales, dtype, backend):
    *leading, columns = row_ids.shape
    return row_ids.new_empty((*leading, columns * table.shape[1]), dtype=dtype)
