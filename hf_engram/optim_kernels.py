"""One step of an Engram table's rows, in place: plain PyTorch, and one Triton kernel. The rule is in optim.py.

For each row r of the step, with its gradient g [d], k steps after it was last of a step:

    s <- beta^k * s + mean(g^2)                 fp32, one a row
    w <- momentum^k * w + 1                     fp32, one a row     } with momentum only;
    m <- momentum^k * m + g                     bf16 [d]            } without, m / w is g
    theta <- decay^k * theta - rate * (m / w) / (sqrt(s) + eps)

in fp32 (fp64 for a table of fp64). The result is rounded to nearest for tables of fp32 and fp16, and stochastically
for those of bf16: up or down with probabilities that make its mean exact, since a step is often smaller than half of
what bf16 can tell apart, and rounding to the nearest would drop it each time. The random bits are a hash of a key, the
row and the column, and so the same on any device, in any order of rows, and after a restart.

A row whose gradient is zero (its squares are, in fp32) is not of the step.
"""

from __future__ import annotations

import math

import torch

from .modeling_engram.ops.backend import device_guard, kernel, resolve_backend


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Elements that are computed at a time on a CPU, for each thread.
CPU_BLOCK = 2**18
# Elements of a tile, and the most of one row in it.
TILE, TILE_DIM = 2048, 1024
# Odd numbers from the golden ratio, that spread rows and columns, and the multipliers of MurmurHash3's finaliser.
SPREAD_ROW, SPREAD_HIGH, SPREAD_COLUMN = 0x9E3779B1, 0x85EBCA77, 0x9E3779B9
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35
MASK_32, MASK_64 = 2**32 - 1, 2**64 - 1


def _int32(number: int) -> int:
    """The number of int32 with the same low 32 bits."""
    return ((number & MASK_32) ^ 2**31) - 2**31


def random_key(seed: int, table: int, step: int) -> int:
    """The key of a table's random bits at a step, an int32: splitmix64's finaliser over the three."""
    key = 0
    for number in (seed, table, step):
        key = (key + number + 0x9E3779B97F4A7C15) & MASK_64
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & MASK_64
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & MASK_64
        key ^= key >> 31
    return _int32(key)


# Eager.


def _mix(bits: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's finaliser of int32 numbers, in place. Shifts of int32 are arithmetic, hence the masks."""
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    bits *= _int32(MIX_1)
    bits ^= (bits >> 13).bitwise_and_(0x7FFFF)
    bits *= _int32(MIX_2)
    bits ^= (bits >> 16).bitwise_and_(0xFFFF)
    return bits


def random_bits(rows: torch.Tensor, dim: int, key: int) -> torch.Tensor:
    """Random int32 numbers [n, dim], all 32 bits of them, for rows: int64 [n]."""
    low = ((rows & MASK_32) * SPREAD_ROW + (rows >> 32) * SPREAD_HIGH) & MASK_32
    row_bits = _mix(((low ^ 2**31) - 2**31).to(torch.int32).bitwise_xor_(key))
    columns = torch.arange(dim, device=rows.device) * SPREAD_COLUMN & MASK_32
    return _mix(row_bits.unsqueeze(1) + ((columns ^ 2**31) - 2**31).to(torch.int32))


def stochastic_round(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """fp32 -> bf16: up in magnitude if the 16 bits that bf16 lacks exceed 16 random ones, else down."""
    bits = values.view(torch.int32) + random.bitwise_and(0xFFFF)
    bits.bitwise_and_(~0xFFFF)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


def eager_update(
    table: torch.Tensor,
    rows: torch.Tensor,
    grads: torch.Tensor,
    state: dict[str, torch.Tensor],
    step: int,
    rate: float,
    beta: float,
    momentum: float,
    eps: float,
    decay: float,
    key: int,
) -> None:
    """As `update_rows`; on a CPU in blocks, so that rows are still in the cache when they are written."""
    if table.device.type == "cpu":
        size = max(1, CPU_BLOCK * torch.get_num_threads() // table.shape[1])
        blocks = zip(rows.split(size), grads.split(size), strict=True)
    else:
        blocks = [(rows, grads)]
    for block in blocks:
        _eager_block(table, *block, state, step, rate, beta, momentum, eps, decay, key)


def _eager_block(table, rows, grads, state, step, rate, beta, momentum, eps, decay, key) -> None:
    """As `update_rows`."""
    grads = grads.to(torch.promote_types(table.dtype, torch.float32))
    squares = grads.square().mean(1)
    active = squares != 0
    if not active.all():
        rows, grads, squares = rows[active], grads[active], squares[active]
    elapsed = (step - state["last_step"].index_select(0, rows)).to(squares.dtype)
    second = state["second_moment"].index_select(0, rows).mul_(beta**elapsed).add_(squares)
    state["second_moment"].index_copy_(0, rows, second)
    state["last_step"].index_fill_(0, rows, step)
    if "momentum" in state:
        kept = momentum**elapsed
        weight = state["momentum_weight"].index_select(0, rows).mul_(kept).add_(1)
        grads = torch.addcmul(grads, state["momentum"].index_select(0, rows), kept.unsqueeze(1))
        state["momentum_weight"].index_copy_(0, rows, weight)
        state["momentum"].index_copy_(0, rows, grads.to(state["momentum"].dtype))
        grads = grads / weight.unsqueeze(1)
    factor = rate / second.sqrt_().add_(eps)
    values = table.index_select(0, rows).to(grads.dtype)
    if decay != 1.0:
        values *= (decay**elapsed).unsqueeze(1)
    values.addcmul_(grads, factor.unsqueeze(1), value=-1)
    if table.dtype == torch.bfloat16:
        values = stochastic_round(values, random_bits(rows, table.shape[1], key))
    table.index_copy_(0, rows, values.to(table.dtype))


# Triton.


@kernel
def _mix_kernel(bits):
    """`_mix` of uint32."""
    bits ^= bits >> 16
    bits *= 0x85EBCA6B
    bits ^= bits >> 13
    bits *= 0xC2B2AE35
    bits ^= bits >> 16
    return bits


@kernel
def _update_kernel(
    table_ptr,
    rows_ptr,
    grads_ptr,
    second_ptr,
    last_ptr,
    momentum_ptr,
    weight_ptr,
    n_rows: int,
    step: int,
    key: int,
    rate: float,
    log2_beta: float,
    log2_momentum: float,
    log2_decay: float,
    eps: float,
    TABLE_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DECAY: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """A program updates BLOCK_ROWS rows, in pieces of BLOCK_DIM columns; the first pass over them makes the mean."""
    number = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = tl.load(rows_ptr + number, mask=number < n_rows, other=0)
    squares = tl.zeros([BLOCK_ROWS], tl.float32)
    for start in tl.static_range(0, DIM, BLOCK_DIM):
        column = start + tl.arange(0, BLOCK_DIM)[None, :]
        inside = (number < n_rows)[:, None] & (column < DIM)
        grad = tl.load(grads_ptr + number[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
        squares += tl.sum(grad * grad, axis=1)
    squares /= DIM
    active = squares != 0.0

    elapsed = (step - tl.load(last_ptr + row, mask=active, other=0)).to(tl.float32)
    second = tl.exp2(elapsed * log2_beta) * tl.load(second_ptr + row, mask=active, other=0.0) + squares
    tl.store(second_ptr + row, second, mask=active)
    tl.store(last_ptr + row, tl.zeros([BLOCK_ROWS], tl.int32) + step, mask=active)
    factor = rate / (tl.sqrt(second) + eps)
    if MOMENTUM:
        kept = tl.exp2(elapsed * log2_momentum)
        weight = kept * tl.load(weight_ptr + row, mask=active, other=0.0) + 1.0
        tl.store(weight_ptr + row, weight, mask=active)
        factor /= weight

    for start in tl.static_range(0, DIM, BLOCK_DIM):
        column = start + tl.arange(0, BLOCK_DIM)[None, :]
        inside = active[:, None] & (column < DIM)
        grad = tl.load(grads_ptr + number[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
        if MOMENTUM:
            momentum_at = momentum_ptr + row[:, None] * DIM + column
            grad += kept[:, None] * tl.load(momentum_at, mask=inside, other=0.0).to(tl.float32)
            tl.store(momentum_at, grad.to(momentum_ptr.dtype.element_ty), mask=inside)
        table_at = table_ptr + row[:, None] * TABLE_STRIDE + column
        value = tl.load(table_at, mask=inside, other=0.0).to(tl.float32)
        if DECAY:
            value *= tl.exp2(elapsed * log2_decay)[:, None]
        value -= factor[:, None] * grad
        if STOCHASTIC:
            low, high = row.to(tl.uint32), (row >> 32).to(tl.uint32)
            random = _mix_kernel((low * 0x9E3779B1 + high * 0x85EBCA77) ^ tl.cast(key, tl.uint32))
            random = _mix_kernel(random[:, None] + column.to(tl.uint32) * 0x9E3779B9)
            bits = value.to(tl.uint32, bitcast=True)
            finite = (bits & 0x7F800000) != 0x7F800000
            bits = tl.where(finite, (bits + (random & 0xFFFF)) & 0xFFFF0000, bits)
            value = bits.to(tl.float32, bitcast=True)
        tl.store(table_at, value.to(table_ptr.dtype.element_ty), mask=inside)


def _launch_update(table, rows, grads, state, step, rate, beta, momentum, eps, decay, key) -> None:
    """As `update_rows`."""
    n_rows, dim = grads.shape
    block_dim = min(triton.next_power_of_2(dim), TILE_DIM)
    block_rows = max(1, TILE // block_dim)
    with device_guard(table):
        _update_kernel[(triton.cdiv(n_rows, block_rows),)](
            table,
            rows.contiguous(),
            grads.contiguous(),
            state["second_moment"],
            state["last_step"],
            state.get("momentum"),
            state.get("momentum_weight"),
            n_rows,
            step,
            key,
            rate,
            math.log2(beta),
            math.log2(momentum) if momentum else 0.0,
            math.log2(decay),
            eps,
            TABLE_STRIDE=table.stride(0),
            DIM=dim,
            MOMENTUM="momentum" in state,
            DECAY=decay != 1.0,
            STOCHASTIC=table.dtype == torch.bfloat16,
            BLOCK_ROWS=block_rows,
            BLOCK_DIM=block_dim,
            num_warps=4,
        )


def _unsupported(table: torch.Tensor, grads: torch.Tensor) -> str | None:
    """Why the kernel cannot take these inputs, or None if it can."""
    if not {table.dtype, grads.dtype} <= set(FLOAT_DTYPES):
        return f"it takes tables and gradients of fp32, bf16 and fp16, got {table.dtype} and {grads.dtype}"
    if table.stride(1) != 1:
        return "the columns of the table do not lie side by side"
    return None


def update_rows(
    table: torch.Tensor,
    rows: torch.Tensor,
    grads: torch.Tensor,
    state: dict[str, torch.Tensor],
    *,
    step: int,
    rate: float,
    beta: float,
    momentum: float,
    eps: float,
    decay: float,
    key: int,
    backend: str | None = None,
) -> None:
    """Updates some rows of a table and of its state, in place.

    Args:
        table: `[rows, d]`, fp32, bf16, fp16 (fp64 without the kernel).
        rows: int64 `[n]`, distinct numbers of rows.
        grads: `[n, d]`, their gradients, finite.
        state: `second_moment` fp32 `[rows]`, `last_step` int32 `[rows]` (0: none yet); with momentum also `momentum`
            bf16 `[rows, d]` and `momentum_weight` fp32 `[rows]`. All zeros before the first step.
        step: number of this step, from 1.
        rate: rms of the very first step of a row.
        beta, momentum, decay: what remains after one step of the second moment, the momentum and the row.
        eps: added to the root of the second moment.
        key: of the random bits, from `random_key`.
        backend: `"eager"`, `"triton"` or None to choose.
    """
    backend = resolve_backend("update_rows", backend, table, _unsupported(table, grads))
    if not len(rows):
        return
    update = _launch_update if backend == "triton" else eager_update
    update(table, rows, grads, state, step, rate, beta, momentum, eps, decay, key)
