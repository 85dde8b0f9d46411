"""The Engram gate: a value written to every copy of the stream, weighted by how well its key matches that copy.

Forward, per token and copy h, with `w = q_weight * k_weight` (they are only ever used as a product):

    a = rsqrt(mean(x_h^2) + eps)          b = rsqrt(mean(key_h^2) + eps)
    dot = a * b * D^-0.5 * sum_d x_h * w_h * key_h
    gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot))
    out_h = x_h + gate * value

Backward, from g_h = d loss / d out_h:

    d value = sum_h gate * g_h
    d gate  = <g_h, value>
    d dot   = d gate * gate * (1 - gate) / (2 * sqrt(|dot|))       0 where |dot| < 1e-6, where the clamp is flat
    p  = d dot * a * b * D^-0.5                                    through the sum of products
    px = -d dot * dot * a^2 / D                                    through a: d a / d x = -a^3 * x / D
    pk = -d dot * dot * b^2 / D                                    through b
    d x_h   = g_h + p * w_h * key_h + px * x_h
    d key_h = p * w_h * x_h + pk * key_h
    d w_h   = sum over tokens of p * x_h * key_h

So backward needs x, kv, w and three numbers a token and copy: dot, a and b. Nothing here is a matrix product, and so
neither autocast nor reduced matmul precision touches it. Source: the Engram layer of DeepSeek-V4.1.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from .backend import device_guard, kernel, resolve_backend
from .precision import compute_dtype
from .token_blocks import as_rows, row_strides


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


# Keeps the gradient of the square root finite at a dot product of zero.
MIN_ABS_DOT = 1e-6
MAX_COPIES = 8


def gate_and_value(
    hidden_states: torch.Tensor, kv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate `[..., H]` and the value `[..., D]` that it weights, in the compute dtype; as `engram_gate`."""
    copies, dim = hidden_states.shape[-2:]
    dtype = compute_dtype(hidden_states.dtype)
    x = hidden_states.to(dtype)
    key, value = kv.to(dtype).split([copies * dim, dim], dim=-1)
    key = key.unflatten(-1, (copies, dim))
    weight = q_weight.to(dtype) * k_weight.to(dtype)

    rstd = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x * weight * key).sum(-1) * rstd * dim**-0.5
    # copysign, not sign: the gate at a dot product of zero is sigmoid(+-0.001), not 0.5.
    root = dot.abs().clamp_min(MIN_ABS_DOT).sqrt()
    return torch.sigmoid(with_sign(root, dot)), value


def with_sign(root: torch.Tensor, dot: torch.Tensor) -> torch.Tensor:
    """`copysign(root, dot)`, for root above zero."""
    if not torch.compiler.is_compiling():
        return torch.copysign(root, dot)
    # The same, without an operation that ONNX lacks: 1 / -0 is negative, as -0 is not.
    return torch.where(torch.where(dot == 0, dot.reciprocal(), dot) < 0, -root, root)


def engram_gate_reference(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The formula in plain PyTorch; arguments as `engram_gate`. What all else here must equal."""
    x = hidden_states.to(compute_dtype(hidden_states.dtype))
    if token_mask is not None:
        # What lies under the mask may be anything, and 0 * nan is not 0, neither here nor in backward.
        dead = ~token_mask.unsqueeze(-1)
        x = x.masked_fill(dead.unsqueeze(-1), 0)
        kv = kv.masked_fill(dead, 0)
    gate, value = gate_and_value(x, kv, q_weight, k_weight, eps)
    out = (x + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(hidden_states.dtype)
    if token_mask is not None:
        out = torch.where(token_mask[..., None, None], out, hidden_states)
    return out


# Eager: blocks of tokens small enough that what is computed for one stays in cache.

# Elements of the stream in a block. On CPU 1 MB in fp32 for each thread: smaller blocks would stay in a nearer cache,
# but threads must meet after every operation of every block. Elsewhere enough to fill a device.
CPU_BLOCK = 2**18
CPU_BLOCK_THREADS = 4
DEVICE_BLOCK = 2**24


def _row_blocks(
    x: torch.Tensor, live: torch.Tensor | None, dtype: torch.dtype
) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Walks the rows of x [T, H, D]: all of them in slices, or, if not all are live, the live ones by their numbers.

    Yields the rows and two scratch tensors of the block's shape.
    """
    tokens, copies, dim = x.shape
    block = DEVICE_BLOCK
    if x.device.type == "cpu":
        block = CPU_BLOCK * min(torch.get_num_threads(), CPU_BLOCK_THREADS)
    size = max(1, block // (copies * dim))
    scratch = torch.empty(2, min(size, tokens), copies, dim, dtype=dtype, device=x.device)
    for start in range(0, tokens if live is None else len(live), size):
        rows = slice(start, min(start + size, tokens)) if live is None else live[start : start + size]
        count = rows.stop - start if live is None else len(rows)
        yield rows, scratch[0, :count], scratch[1, :count]


def _destination(to: torch.Tensor, rows: slice | torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Where to compute a block of the result `to`: in place if it can be, else in `scratch`, for `_write` to bring."""
    return to[rows] if isinstance(rows, slice) and to.dtype == scratch.dtype else scratch


def _write(to: torch.Tensor, rows: slice | torch.Tensor, block: torch.Tensor) -> None:
    if not isinstance(rows, slice):
        to[rows] = block.to(to.dtype)
    elif to[rows].data_ptr() != block.data_ptr():
        to[rows] = block


def _gate(dot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gate, and the square root in it."""
    root = dot.abs().clamp_min_(MIN_ABS_DOT).sqrt_()
    return torch.copysign(root, dot).sigmoid_(), root


class EagerEngramGate(torch.autograd.Function):
    """The gate without kernels. x [T, H, D], kv [T, (H + 1) * D], weight [H, D] in compute dtype, token_mask [T]."""

    @staticmethod
    def forward(ctx, x, kv, weight, token_mask, eps):
        tokens, copies, dim = x.shape
        live = None if token_mask is None or token_mask.all() else token_mask.nonzero().squeeze(-1)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if live is not None:
            out.copy_(x)
        # Of each token and copy: dot, and the reciprocal norms of stream and key.
        stats = weight.new_empty(3, tokens, copies)
        for rows, work, _ in _row_blocks(x, live, weight.dtype):
            x_block, kv_block = x[rows].to(weight.dtype), kv[rows].to(weight.dtype)
            key, value = kv_block[:, :-dim].unflatten(-1, (copies, dim)), kv_block[:, -dim:].unsqueeze(1)

            rstd_x = torch.linalg.vector_norm(x_block, dim=-1).square_().div_(dim).add_(eps).rsqrt_()
            rstd_k = torch.linalg.vector_norm(key, dim=-1).square_().div_(dim).add_(eps).rsqrt_()
            dot = torch.mul(x_block, weight, out=work).mul_(key).sum(-1).mul_(rstd_x * rstd_k).mul_(dim**-0.5)
            stats[:, rows] = torch.stack([dot, rstd_x, rstd_k])

            gate, _ = _gate(dot)
            to = _destination(out, rows, work)
            _write(out, rows, torch.addcmul(x_block, gate.unsqueeze(-1), value, out=to))
        ctx.save_for_backward(x, kv, weight, live, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, kv, weight, live, stats = ctx.saved_tensors
        needs_x, needs_kv, needs_weight = ctx.needs_input_grad[:3]
        copies, dim = weight.shape
        grad_x = grad_kv = grad_key = grad_value = grad_weight = None
        if needs_x:
            grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
            if live is not None:
                grad_x.copy_(grad_out)
        if needs_kv:
            grad_kv = torch.empty_like(kv, memory_format=torch.contiguous_format)
            if live is not None:
                grad_kv.zero_()
            grad_key, grad_value = grad_kv[:, :-dim].unflatten(-1, (copies, dim)), grad_kv[:, -dim:]
        if needs_weight:
            grad_weight = torch.zeros_like(weight)

        for rows, work, work2 in _row_blocks(x, live, weight.dtype):
            x_block, kv_block = x[rows].to(weight.dtype), kv[rows].to(weight.dtype)
            grad_block = grad_out[rows].to(weight.dtype)
            key, value = kv_block[:, :-dim].unflatten(-1, (copies, dim)), kv_block[:, -dim:].unsqueeze(1)
            dot, rstd_x, rstd_k = stats[:, rows]

            gate, root = _gate(dot)
            grad_gate = torch.mul(grad_block, value, out=work).sum(-1)
            grad_dot = (grad_gate * gate * (1 - gate) / (2 * root)).masked_fill_(dot.abs() < MIN_ABS_DOT, 0)
            p = (grad_dot * rstd_x * rstd_k * dim**-0.5).unsqueeze(-1)
            px = (grad_dot * dot * rstd_x.square() / -dim).unsqueeze(-1)
            pk = (grad_dot * dot * rstd_k.square() / -dim).unsqueeze(-1)

            if needs_kv:
                _write(grad_value, rows, torch.mul(grad_block, gate.unsqueeze(-1), out=work).sum(1))
            if needs_kv or needs_weight:
                torch.mul(x_block, p, out=work)
            if needs_weight:
                grad_weight += torch.mul(work, key, out=work2).sum(0)
            if needs_kv:
                to = _destination(grad_key, rows, work)
                _write(grad_key, rows, torch.addcmul(work.mul_(weight), pk, key, out=to))
            if needs_x:
                to = _destination(grad_x, rows, work)
                torch.mul(key, weight, out=work)
                _write(grad_x, rows, torch.addcmul(grad_block, work, p, out=to).addcmul_(px, x_block))
        return grad_x, grad_kv, grad_weight, None, None


# Triton. Programs of the first two kernels take a token with all its copies, so that the value is read once; the third
# walks a run of tokens with one piece of a copy, so that its share of the weight gradient stays in registers. The
# stream is read by strides, counted in rows of D.


@kernel
def _forward_kernel(
    x_ptr,
    kv_ptr,
    weight_ptr,
    mask_ptr: torch.Tensor,
    out_ptr,
    stats_ptr,
    tokens: int,
    x_token_rows: int,
    x_copy_rows: int,
    eps: float,
    COPIES: tl.constexpr,
    DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    MIN_ABS_DOT: tl.constexpr,
    BLOCK_COPIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """out [T, H, D] and stats [3, T, H] (dot, reciprocal norms of stream and key; 0, 0, 0 under the mask)."""
    token = tl.program_id(0).to(tl.int64)
    copy = tl.arange(0, BLOCK_COPIES)
    x_row = x_ptr + (token * x_token_rows + copy[:, None] * x_copy_rows) * DIM
    key_row = kv_ptr + (token * (COPIES + 1) + copy[:, None]) * DIM
    value_row = kv_ptr + (token * (COPIES + 1) + COPIES) * DIM
    live = 1
    if HAS_MASK:
        live = tl.load(mask_ptr + token).to(tl.int32)

    xx = tl.zeros([BLOCK_COPIES, BLOCK_DIM], tl.float32)
    kk = tl.zeros([BLOCK_COPIES, BLOCK_DIM], tl.float32)
    xk = tl.zeros([BLOCK_COPIES, BLOCK_DIM], tl.float32)
    for start in range(0, DIM, BLOCK_DIM):
        column = start + tl.arange(0, BLOCK_DIM)[None, :]
        inside = (copy[:, None] < COPIES) & (column < DIM * live)
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(key_row + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + copy[:, None] * DIM + column, mask=inside, other=0.0)
        xx += x * x
        kk += key * key
        xk += x * weight * key
    rstd_x = tl.rsqrt(tl.sum(xx, axis=1) / DIM + eps)
    rstd_k = tl.rsqrt(tl.sum(kk, axis=1) / DIM + eps)
    dot = tl.sum(xk, axis=1) * rstd_x * rstd_k * (DIM**-0.5)
    stats = stats_ptr + token * COPIES + copy
    tl.store(stats, dot, mask=copy < COPIES)
    plane = tl.cast(tokens, tl.int64) * COPIES
    tl.store(stats + plane, rstd_x, mask=copy < COPIES)
    tl.store(stats + plane * 2, rstd_k, mask=copy < COPIES)

    # copysign: the sign bit, which -0 has too.
    root = tl.sqrt(tl.maximum(tl.abs(dot), MIN_ABS_DOT))
    gate = tl.sigmoid(tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root))
    out_row = out_ptr + (token * COPIES + copy[:, None]) * DIM
    for start in range(0, DIM, BLOCK_DIM):
        column = start + tl.arange(0, BLOCK_DIM)[None, :]
        inside = (copy[:, None] < COPIES) & (column < DIM)
        x = tl.load(x_row + column, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(value_row + column, mask=column < DIM * live, other=0.0).to(tl.float32)
        # Not x + 0 under the mask: that is not x for a negative zero.
        out = tl.where(live != 0, x + gate[:, None] * value, x)
        tl.store(out_row + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@kernel
def _gate_backward_kernel(
    grad_out_ptr,
    kv_ptr,
    mask_ptr: torch.Tensor,
    stats_ptr,
    grad_kv_ptr,
    factors_ptr,
    tokens: int,
    COPIES: tl.constexpr,
    DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GRAD_KV: tl.constexpr,
    MIN_ABS_DOT: tl.constexpr,
    BLOCK_COPIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """The value half of grad_kv [T, (H + 1) * D], and factors [3, T, H]: p, px and pk (see the top of the file)."""
    token = tl.program_id(0).to(tl.int64)
    copy = tl.arange(0, BLOCK_COPIES)
    live = 1
    if HAS_MASK:
        live = tl.load(mask_ptr + token).to(tl.int32)
    row = token * COPIES + copy
    plane = tl.cast(tokens, tl.int64) * COPIES
    dot = tl.load(stats_ptr + row, mask=copy < COPIES, other=0.0)
    rstd_x = tl.load(stats_ptr + plane + row, mask=copy < COPIES, other=0.0)
    rstd_k = tl.load(stats_ptr + plane * 2 + row, mask=copy < COPIES, other=0.0)
    root = tl.sqrt(tl.maximum(tl.abs(dot), MIN_ABS_DOT))
    gate = tl.sigmoid(tl.where(dot.to(tl.int32, bitcast=True) < 0, -root, root))

    products = tl.zeros([BLOCK_COPIES, BLOCK_DIM], tl.float32)
    for start in range(0, DIM, BLOCK_DIM):
        column = start + tl.arange(0, BLOCK_DIM)[None, :]
        inside = (copy[:, None] < COPIES) & (column < DIM * live)
        grad_out = tl.load(grad_out_ptr + row[:, None] * DIM + column, mask=inside, other=0.0).to(tl.float32)
        value_at = (token * (COPIES + 1) + COPIES) * DIM + column
        value = tl.load(kv_ptr + value_at, mask=column < DIM * live, other=0.0).to(tl.float32)
        products += grad_out * value
        if GRAD_KV:
            grad_value = tl.sum(grad_out * gate[:, None], axis=0)[None, :]
            tl.store(grad_kv_ptr + value_at, grad_value.to(grad_kv_ptr.dtype.element_ty), mask=column < DIM)

    grad_dot = tl.sum(products, axis=1) * gate * (1 - gate) / (2 * root)
    grad_dot = tl.where(tl.abs(dot) < MIN_ABS_DOT, 0.0, grad_dot)
    tl.store(factors_ptr + row, grad_dot * rstd_x * rstd_k * (DIM**-0.5), mask=copy < COPIES)
    tl.store(factors_ptr + plane + row, grad_dot * dot * rstd_x * rstd_x * (-1 / DIM), mask=copy < COPIES)
    tl.store(factors_ptr + plane * 2 + row, grad_dot * dot * rstd_k * rstd_k * (-1 / DIM), mask=copy < COPIES)


@kernel
def _stream_backward_kernel(
    grad_out_ptr,
    x_ptr,
    kv_ptr,
    weight_ptr,
    mask_ptr: torch.Tensor,
    factors_ptr,
    grad_x_ptr,
    grad_kv_ptr,
    partial_ptr,
    tokens: int,
    run: int,
    x_token_rows: int,
    x_copy_rows: int,
    COPIES: tl.constexpr,
    DIM: tl.constexpr,
    HAS_MASK: tl.constexpr,
    GRAD_X: tl.constexpr,
    GRAD_KV: tl.constexpr,
    GRAD_WEIGHT: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """grad_x, the keys of grad_kv, and, per run of tokens, a partial sum of grad_weight: partial [runs, H, D]."""
    pieces = tl.cdiv(DIM, BLOCK_DIM)
    first = tl.program_id(0) // (COPIES * pieces)
    copy = tl.program_id(0) % (COPIES * pieces) // pieces
    column = tl.program_id(0) % pieces * BLOCK_DIM + tl.arange(0, BLOCK_DIM)
    plane = tl.cast(tokens, tl.int64) * COPIES
    weight = tl.load(weight_ptr + copy * DIM + column, mask=column < DIM, other=0.0)
    grad_weight = tl.zeros([BLOCK_DIM], tl.float32)
    for index in range(first * run, tl.minimum(first * run + run, tokens)):
        token = tl.cast(index, tl.int64)
        inside = column < DIM
        live = 1
        if HAS_MASK:
            live = tl.load(mask_ptr + token).to(tl.int32)
        row = token * COPIES + copy
        p = tl.load(factors_ptr + row)
        px = tl.load(factors_ptr + plane + row)
        pk = tl.load(factors_ptr + plane * 2 + row)
        x_at = x_ptr + (token * x_token_rows + copy * x_copy_rows) * DIM + column
        key_at = (token * (COPIES + 1) + copy) * DIM + column
        x = tl.load(x_at, mask=column < DIM * live, other=0.0).to(tl.float32)
        key = tl.load(kv_ptr + key_at, mask=column < DIM * live, other=0.0).to(tl.float32)
        if GRAD_X:
            grad_out = tl.load(grad_out_ptr + row * DIM + column, mask=inside, other=0.0).to(tl.float32)
            grad_x = tl.where(live != 0, grad_out + p * weight * key + px * x, grad_out)
            tl.store(grad_x_ptr + row * DIM + column, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
        if GRAD_KV:
            grad_key = p * weight * x + pk * key
            tl.store(grad_kv_ptr + key_at, grad_key.to(grad_kv_ptr.dtype.element_ty), mask=inside)
        if GRAD_WEIGHT:
            grad_weight += p * x * key
    if GRAD_WEIGHT:
        partial_at = partial_ptr + (first.to(tl.int64) * COPIES + copy) * DIM + column
        tl.store(partial_at, grad_weight, mask=column < DIM)


def _token_tile(copies: int, dim: int) -> dict[str, int]:
    """Tile of the kernels that take a token at a time: up to 2048 elements, 16 a thread."""
    block_copies = triton.next_power_of_2(copies)
    block_dim = min(triton.next_power_of_2(dim), 2048 // block_copies)
    warps = max(1, min(4, block_copies * block_dim // 512))
    return {"BLOCK_COPIES": block_copies, "BLOCK_DIM": block_dim, "num_warps": warps}


def _run_tile(dim: int) -> dict[str, int]:
    """Tile of the kernel that walks runs of tokens: up to 1024 columns, 8 a thread."""
    block_dim = min(triton.next_power_of_2(dim), 1024)
    return {"BLOCK_DIM": block_dim, "num_warps": max(1, min(4, block_dim // 256))}


def _run_length(tokens: int, pieces: int) -> int:
    """Tokens that one program walks: long runs make few partial sums, short ones enough programs for any device."""
    return max(1, min(64, tokens * pieces // 1024))


class TritonEngramGate(torch.autograd.Function):
    """The gate's kernels. x [T, H, D], kv [T, (H + 1) * D], weight [H, D] fp32, token_mask [T]."""

    @staticmethod
    def forward(ctx, x, kv, weight, token_mask, eps):
        tokens = x.shape[0]
        copies, dim = weight.shape  # A parameter's: numbers also where torch.compile takes x's for symbols.
        x, kv, weight = as_rows(x), kv.contiguous(), weight.contiguous()
        token_mask = None if token_mask is None else token_mask.contiguous().view(torch.uint8)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        stats = weight.new_empty(3, tokens, copies)
        if tokens:
            with device_guard(x):
                _forward_kernel[(tokens,)](
                    x,
                    kv,
                    weight,
                    token_mask,
                    out,
                    stats,
                    tokens,
                    *row_strides(x),
                    eps,
                    COPIES=copies,
                    DIM=dim,
                    HAS_MASK=token_mask is not None,
                    MIN_ABS_DOT=MIN_ABS_DOT,
                    **_token_tile(copies, dim),
                )
        ctx.save_for_backward(x, kv, weight, token_mask, stats)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, kv, weight, token_mask, stats = ctx.saved_tensors
        needs_x, needs_kv, needs_weight = ctx.needs_input_grad[:3]
        tokens = x.shape[0]
        copies, dim = weight.shape
        tile = _run_tile(dim)
        pieces = copies * triton.cdiv(dim, tile["BLOCK_DIM"])
        run = _run_length(tokens, pieces)
        runs = triton.cdiv(tokens, run)

        grad_out = grad_out.contiguous()
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        grad_kv = torch.empty_like(kv, memory_format=torch.contiguous_format) if needs_kv else None
        partial = weight.new_empty(runs, copies, dim) if needs_weight else None
        factors = torch.empty_like(stats)
        if tokens:
            with device_guard(x):
                _gate_backward_kernel[(tokens,)](
                    grad_out,
                    kv,
                    token_mask,
                    stats,
                    grad_kv,
                    factors,
                    tokens,
                    COPIES=copies,
                    DIM=dim,
                    HAS_MASK=token_mask is not None,
                    GRAD_KV=needs_kv,
                    MIN_ABS_DOT=MIN_ABS_DOT,
                    **_token_tile(copies, dim),
                )
                _stream_backward_kernel[(runs * pieces,)](
                    grad_out,
                    x,
                    kv,
                    weight,
                    token_mask,
                    factors,
                    grad_x,
                    grad_kv,
                    partial,
                    tokens,
                    run,
                    *row_strides(x),
                    COPIES=copies,
                    DIM=dim,
                    HAS_MASK=token_mask is not None,
                    GRAD_X=needs_x,
                    GRAD_KV=needs_kv,
                    GRAD_WEIGHT=needs_weight,
                    **tile,
                )
        # The second stage of the reduction, in an order that does not depend on the launch.
        return grad_x, grad_kv, None if partial is None else partial.sum(0), None, None


def _unsupported(hidden_states: torch.Tensor, *others: torch.Tensor) -> str | None:
    """Why the kernels cannot take these inputs, or None if they can."""
    dtypes = {hidden_states.dtype, *(tensor.dtype for tensor in others)}
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"it takes fp32, bf16 and fp16, got {sorted(map(str, dtypes))}"
    if hidden_states.shape[-2] > MAX_COPIES:
        return f"it takes up to {MAX_COPIES} copies, got {hidden_states.shape[-2]}"
    return None


def _formula_will_do(hidden_states: torch.Tensor) -> bool:
    # Compilers fuse the formula themselves, and would unroll the loop over blocks. One token is a decode step, in
    # which what counts is the number of calls. Never a question of gradients: a checkpointed layer, run once without
    # and once with them, must give the same bits twice.
    if torch.compiler.is_compiling() or hidden_states.is_meta:
        return True
    # Not to be asked of sizes that a compiler keeps open, which it would fix.
    return hidden_states.shape[:-2].numel() == 1


def engram_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    token_mask: torch.Tensor | None = None,
    eps: float = 1e-6,
    backend: str | None = None,
) -> torch.Tensor:
    """Adds the gated value to every copy of the residual stream.

    Per token and copy h, with RMS norms over D: `dot = <norm(x_h) * q_h, norm(key_h) * k_h> / sqrt(D)`,
    `gate = sigmoid(copysign(sqrt(max(|dot|, 1e-6)), dot))`, `out_h = x_h + gate * value`. All in fp32 (fp64 for fp64),
    cast once at the end. Differentiable once in all four tensors.

    Args:
        hidden_states: the stream x, `[..., H, D]`.
        kv: `[..., (H + 1) * D]`: one key per copy, then the value that all copies share.
        q_weight, k_weight: `[H, D]`.
        token_mask: bool `[...]` or None; where False, the stream and its gradient pass through bit for bit, and
            whatever kv holds there is ignored.
        eps: added to the mean squares.
        backend: `"eager"`, `"triton"` (fp32, bf16, fp16; up to 8 copies) or None to choose.

    Returns:
        `[..., H, D]` in the dtype of `hidden_states`.
    """
    *leading, copies, dim = hidden_states.shape
    if kv.shape != (*leading, (copies + 1) * dim) or not q_weight.shape == k_weight.shape == (copies, dim):
        raise ValueError(
            f"For hidden_states [..., H, D] = {list(hidden_states.shape)}, kv must be [..., (H + 1) * D] and both "
            f"weights [H, D], got {list(kv.shape)}, {list(q_weight.shape)} and {list(k_weight.shape)}."
        )
    if token_mask is not None and token_mask.dtype != torch.bool:
        raise TypeError(f"`token_mask` must be bool, got {token_mask.dtype}: pass `token_mask != 0`.")
    unsupported = _unsupported(hidden_states, kv, q_weight, k_weight)
    backend = resolve_backend("engram_gate", backend, hidden_states, unsupported)
    if backend == "eager" and _formula_will_do(hidden_states):
        return engram_gate_reference(hidden_states, kv, q_weight, k_weight, token_mask, eps)

    dtype = compute_dtype(hidden_states.dtype)
    weight = q_weight.to(dtype) * k_weight.to(dtype)
    if token_mask is not None:
        token_mask = token_mask.expand(leading).reshape(-1)
    function = TritonEngramGate if backend == "triton" else EagerEngramGate
    x, kv = hidden_states.reshape(-1, copies, dim), kv.reshape(-1, (copies + 1) * dim)
    out = function.apply(x, kv, weight, token_mask, eps)
    return out.view(hidden_states.shape)
