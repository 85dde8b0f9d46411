"""Triton kernels of the stream's mixing weights, and their autograd function; the formulas are in stream_mixes.py.

Forward: `project_kernel` reads the stream once, for its products with `fn` and its sums of squares; `mix_kernel` does
the rest of a token in registers. Backward: `mix_backward_kernel` computes the latter again and goes back through it;
`project_backward_kernel` reads the stream once more, for its own gradient and that of `fn`. No atomics: sums over
programs are partial sums, added up in order. The stream is read by strides, counted in rows of D.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .backend import device_guard, kernel
from .token_blocks import row_strides


# Optional at run time; the flat copies in Hub folders need the import guarded.
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@kernel
def project_kernel(
    x,
    fn,
    z_parts,
    square_parts,
    tokens: int,
    token_rows: int,
    copy_rows: int,
    DIM: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products with `fn` and sums of squares of BLOCK_T tokens, over every num_programs(1)-th piece of their stream.

    x: [T, H, D] by strides; fn: fp32 [M, H * D] -> z_parts: fp32 [splits, T, M]; square_parts: fp32 [splits, T]
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m = tl.arange(0, M_PAD)
    live = t < tokens
    product = tl.zeros([BLOCK_T, M_PAD], tl.float32)
    squares = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    pieces = tl.cdiv(DIM, BLOCK_D)
    for piece in range(tl.program_id(1), H * pieces, tl.num_programs(1)):
        copy = piece // pieces
        d = (piece % pieces) * BLOCK_D + tl.arange(0, BLOCK_D)
        inside = d < DIM
        tile = tl.load(
            x + (t[:, None] * token_rows + copy * copy_rows) * DIM + d[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(
            fn + (m[None, :] * H + copy) * DIM + d[:, None], mask=inside[:, None] & (m < M)[None, :], other=0.0
        )
        product = tl.dot(tile, weight, product, input_precision=PRECISION)
        squares += tile * tile
    row = tl.program_id(1) * tokens + t
    tl.store(z_parts + row[:, None] * M + m[None, :], product, mask=live[:, None] & (m < M)[None, :])
    tl.store(square_parts + row, tl.sum(squares, axis=1), mask=live)


@kernel
def sinkhorn_start(logits, hc_eps: float, h, H: tl.constexpr):
    """Per token: the row softmax [T, H, H] of the logits, and the matrix that Sinkhorn starts from.

    Padding becomes an identity beside the matrix, which Sinkhorn leaves alone.
    """
    copies = h < H
    logits = tl.where(copies[None, None, :], logits, float("-inf"))
    exp = tl.exp(logits - tl.max(logits, axis=2)[:, :, None])
    softmax = exp / tl.sum(exp, axis=2)[:, :, None]
    valid = copies[:, None] & copies[None, :]
    identity = tl.where(h[:, None] == h[None, :], 1.0, 0.0)
    return softmax, tl.where(valid[None, :, :], softmax + hc_eps, identity[None, :, :])


@kernel
def sinkhorn_rounds(matrix, rounds: int, hc_eps: float):
    """Row and column divisors [T, H] after the first division of columns and `rounds` of rows, then columns."""
    col = tl.sum(matrix, axis=1) + hc_eps
    row = col * 0.0 + 1.0
    for _ in range(rounds):
        row = tl.sum(matrix / col[:, None, :], axis=2) + hc_eps * row
        col = tl.sum(matrix / row[:, :, None], axis=1) + hc_eps * col
    return row, col


@kernel
def mix_kernel(
    z_parts,
    square_parts,
    scale,
    base,
    z,
    rstd,
    pre,
    post,
    comb,
    tokens: int,
    splits: int,
    rounds: int,
    norm_eps: float,
    hc_eps: float,
    DIM: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """The mixing weights of BLOCK_T tokens from the partial sums of `project_kernel`; all fp32.

    z: [T, (2 + H) * H] and rstd: [T] are kept for backward; pre, post: [T, H]; comb: [T, H, H]
    """
    M: tl.constexpr = (2 + H) * H
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, H_PAD)
    live = t < tokens
    vector = live[:, None] & (h < H)[None, :]
    inside = (h < H)[:, None] & (h < H)[None, :]
    square = live[:, None, None] & inside[None, :, :]
    entry = h[:, None] * H + h[None, :]

    pre_z = tl.zeros([BLOCK_T, H_PAD], tl.float32)
    post_z = tl.zeros([BLOCK_T, H_PAD], tl.float32)
    comb_z = tl.zeros([BLOCK_T, H_PAD, H_PAD], tl.float32)
    squares = tl.zeros([BLOCK_T], tl.float32)
    for split in range(splits):
        row = split * tokens + t
        pre_z += tl.load(z_parts + row[:, None] * M + h[None, :], mask=vector, other=0.0)
        post_z += tl.load(z_parts + row[:, None] * M + H + h[None, :], mask=vector, other=0.0)
        comb_z += tl.load(z_parts + row[:, None, None] * M + 2 * H + entry[None, :, :], mask=square, other=0.0)
        squares += tl.load(square_parts + row, mask=live, other=0.0)
    norm = 1.0 / tl.sqrt(squares / (H * DIM) + norm_eps)
    norm = tl.where(live, norm, 1.0)
    pre_z, post_z, comb_z = pre_z * norm[:, None], post_z * norm[:, None], comb_z * norm[:, None, None]
    tl.store(rstd + t, norm, mask=live)
    tl.store(z + t[:, None] * M + h[None, :], pre_z, mask=vector)
    tl.store(z + t[:, None] * M + H + h[None, :], post_z, mask=vector)
    tl.store(z + t[:, None, None] * M + 2 * H + entry[None, :, :], comb_z, mask=square)

    pre_logits = pre_z * tl.load(scale) + tl.load(base + h, mask=h < H, other=0.0)[None, :]
    post_logits = post_z * tl.load(scale + 1) + tl.load(base + H + h, mask=h < H, other=0.0)[None, :]
    comb_logits = comb_z * tl.load(scale + 2) + tl.load(base + 2 * H + entry, mask=inside, other=0.0)[None, :, :]
    tl.store(pre + t[:, None] * H + h[None, :], 1.0 / (1.0 + tl.exp(-pre_logits)) + hc_eps, mask=vector)
    tl.store(post + t[:, None] * H + h[None, :], 2.0 / (1.0 + tl.exp(-post_logits)), mask=vector)

    _, matrix = sinkhorn_start(comb_logits, hc_eps, h, H)
    row, col = sinkhorn_rounds(matrix, rounds, hc_eps)
    mixed = matrix / row[:, :, None] / col[:, None, :]
    tl.store(comb + t[:, None, None] * (H * H) + entry[None, :, :], mixed, mask=square)


@kernel
def mix_backward_kernel(
    z,
    rstd,
    scale,
    base,
    grad_pre,
    grad_post,
    grad_comb,
    grad_logits,
    grad_product,
    shrink,
    tokens: int,
    rounds: int,
    hc_eps: float,
    DIM: tl.constexpr,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Gradients of BLOCK_T tokens' logits and products with `fn`, [T, (2 + H) * H], and `shrink` [T]; all fp32.

    `grad_stream = grad_product @ fn + shrink * stream`; formulas as in `project_backward` and `sinkhorn_backward`.
    Every round needs the divisors before it: they are computed from the start again (200 rounds for the usual 20), in
    registers, rather than stored.
    """
    M: tl.constexpr = (2 + H) * H
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    h = tl.arange(0, H_PAD)
    live = t < tokens
    vector = live[:, None] & (h < H)[None, :]
    inside = (h < H)[:, None] & (h < H)[None, :]
    square = live[:, None, None] & inside[None, :, :]
    entry = h[:, None] * H + h[None, :]
    pre_at = t[:, None] * M + h[None, :]
    post_at = pre_at + H
    comb_at = t[:, None, None] * M + 2 * H + entry[None, :, :]
    pre_scale, post_scale, comb_scale = tl.load(scale), tl.load(scale + 1), tl.load(scale + 2)

    pre_z = tl.load(z + pre_at, mask=vector, other=0.0)
    post_z = tl.load(z + post_at, mask=vector, other=0.0)
    comb_z = tl.load(z + comb_at, mask=square, other=0.0)
    pre_logits = pre_z * pre_scale + tl.load(base + h, mask=h < H, other=0.0)[None, :]
    post_logits = post_z * post_scale + tl.load(base + H + h, mask=h < H, other=0.0)[None, :]
    comb_logits = comb_z * comb_scale + tl.load(base + 2 * H + entry, mask=inside, other=0.0)[None, :, :]

    grad = tl.load(grad_pre + t[:, None] * H + h[None, :], mask=vector, other=0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-pre_logits))
    grad_pre_logits = grad * sigmoid * (1.0 - sigmoid)
    grad = tl.load(grad_post + t[:, None] * H + h[None, :], mask=vector, other=0.0)
    sigmoid = 1.0 / (1.0 + tl.exp(-post_logits))
    grad_post_logits = 2.0 * grad * sigmoid * (1.0 - sigmoid)

    softmax, matrix = sinkhorn_start(comb_logits, hc_eps, h, H)
    row, col = sinkhorn_rounds(matrix, rounds, hc_eps)
    grad = tl.load(grad_comb + t[:, None, None] * (H * H) + entry[None, :, :], mask=square, other=0.0)
    shared = tl.sum(grad * (matrix / row[:, :, None] / col[:, None, :]), axis=1)
    grad_matrix = (grad - shared[:, None, :]) / row[:, :, None] / col[:, None, :]
    for i in range(rounds):
        shared = tl.sum(grad_matrix * matrix, axis=2) / row
        row, col = sinkhorn_rounds(matrix, rounds - 1 - i, hc_eps)
        grad_matrix -= shared[:, :, None] / col[:, None, :]
        shared = tl.sum(grad_matrix * matrix, axis=1) / col
        grad_matrix -= shared[:, None, :] / row[:, :, None]
    grad_matrix = tl.where(square, grad_matrix, 0.0)
    grad_comb_logits = softmax * (grad_matrix - tl.sum(grad_matrix * softmax, axis=2)[:, :, None])
    grad_comb_logits = tl.where(square, grad_comb_logits, 0.0)

    tl.store(grad_logits + pre_at, grad_pre_logits, mask=vector)
    tl.store(grad_logits + post_at, grad_post_logits, mask=vector)
    tl.store(grad_logits + comb_at, grad_comb_logits, mask=square)
    grad_pre_z, grad_post_z = grad_pre_logits * pre_scale, grad_post_logits * post_scale
    grad_comb_z = grad_comb_logits * comb_scale
    norm = tl.load(rstd + t, mask=live, other=0.0)
    tl.store(grad_product + pre_at, grad_pre_z * norm[:, None], mask=vector)
    tl.store(grad_product + post_at, grad_post_z * norm[:, None], mask=vector)
    tl.store(grad_product + comb_at, grad_comb_z * norm[:, None, None], mask=square)
    dot = tl.sum(grad_pre_z * pre_z + grad_post_z * post_z, axis=1) + tl.sum(tl.sum(grad_comb_z * comb_z, axis=2), 1)
    tl.store(shrink + t, -dot * norm * norm / (H * DIM), mask=live)


@kernel
def project_backward_kernel(
    x,
    fn,
    grad_product,
    shrink,
    grad_x,
    fn_parts,
    tokens: int,
    token_rows: int,
    copy_rows: int,
    DIM: tl.constexpr,
    H: tl.constexpr,
    M: tl.constexpr,
    M_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients of BLOCK_D columns of the stream and of `fn`, in one read of them, over a share of the tokens.

    x: [T, H, D] by strides; fn: fp32 [M, H * D]; grad_product: fp32 [T, M]; shrink: fp32 [T]
    -> grad_x: [T, H, D]; fn_parts: fp32 [shares, M, H * D], to be added up
    """
    pieces = tl.cdiv(DIM, BLOCK_D)
    copy = tl.program_id(0) // pieces
    d = (tl.program_id(0) % pieces) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < DIM
    m = tl.arange(0, M_PAD)
    fn_at = (m[:, None] * H + copy) * DIM + d[None, :]
    fn_mask = (m < M)[:, None] & inside[None, :]
    weight = tl.load(fn + fn_at, mask=fn_mask, other=0.0)
    grad_fn = tl.zeros([M_PAD, BLOCK_D], tl.float32)
    for start in range(tl.program_id(1) * BLOCK_T, tokens, tl.num_programs(1) * BLOCK_T):
        t = start + tl.arange(0, BLOCK_T).to(tl.int64)
        mask = (t < tokens)[:, None] & inside[None, :]
        x_at = x + (t[:, None] * token_rows + copy * copy_rows) * DIM + d[None, :]
        tile = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
        grad = tl.load(
            grad_product + t[:, None] * M + m[None, :], mask=(t < tokens)[:, None] & (m < M)[None, :], other=0.0
        )
        pull = tl.load(shrink + t, mask=t < tokens, other=0.0)
        out = tl.dot(grad, weight, pull[:, None] * tile, input_precision=PRECISION)
        grad_x_at = grad_x + (t[:, None] * H + copy) * DIM + d[None, :]
        tl.store(grad_x_at, out.to(grad_x.dtype.element_ty), mask=mask)
        grad_fn = tl.dot(tl.trans(grad), tile, grad_fn, input_precision=PRECISION)
    tl.store(fn_parts + tl.program_id(1).to(tl.int64) * (M * H * DIM) + fn_at, grad_fn, mask=fn_mask)


def dot_precision(device: torch.device) -> str:
    """How fp32 products are made: on NVIDIA tensor cores from three TF32 products (as exact as fp32), else plainly."""
    return "tf32x3" if device.type == "cuda" and torch.version.hip is None else "ieee"


def launch_sizes(copies: int, dim: int, device: torch.device) -> dict:
    """What the two kernels with matrix products are compiled for."""
    mixes = (2 + copies) * copies
    padded = max(16, triton.next_power_of_2(mixes))
    precision = dot_precision(device)
    return {
        "DIM": dim,
        "H": copies,
        "M": mixes,
        "M_PAD": padded,
        "BLOCK_T": 32,
        "BLOCK_D": 64 if padded <= 32 else 32,
        "PRECISION": precision,
        # AMD's are twice as wide, and with eight of them values do not stay in registers.
        "num_warps": 8 if padded > 32 and precision == "tf32x3" else 4,
    }


# A device is full with about this many programs.
PROGRAMS = 512
# Tokens of a program of the kernels without matrix products.
MIX_BLOCK = 16


class TritonStreamMixes(torch.autograd.Function):
    """`stream_mixes` of a stream `[T, H, D]`; keeps the stream, z and the norms for backward."""

    @staticmethod
    def forward(ctx, stream, fn, scale, base, norm_eps, hc_eps, sinkhorn_iters):
        outputs, z, rstd = triton_mixes(stream, fn, scale, base, norm_eps, hc_eps, sinkhorn_iters)
        ctx.save_for_backward(stream, fn, scale, base, z, rstd)
        ctx.constants = hc_eps, sinkhorn_iters
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_pre, grad_post, grad_comb):
        stream, fn, scale, base, z, rstd = ctx.saved_tensors
        hc_eps, iters = ctx.constants
        tokens, copies, dim = stream.shape
        grad_logits, grad_product, shrink = torch.empty_like(z), torch.empty_like(z), torch.empty_like(rstd)
        grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        if tokens == 0:
            return grad_stream, *(torch.zeros_like(parameter) for parameter in (fn, scale, base)), None, None, None
        with device_guard(stream):
            mix_backward_kernel[(triton.cdiv(tokens, MIX_BLOCK),)](
                z,
                rstd,
                scale,
                base,
                grad_pre.contiguous(),
                grad_post.contiguous(),
                grad_comb.contiguous(),
                grad_logits,
                grad_product,
                shrink,
                tokens,
                iters - 1,
                hc_eps,
                DIM=dim,
                H=copies,
                H_PAD=triton.next_power_of_2(copies),
                BLOCK_T=MIX_BLOCK,
                num_warps=4,
            )
        sizes = launch_sizes(copies, dim, stream.device)
        columns = copies * triton.cdiv(dim, sizes["BLOCK_D"])
        shares = max(1, min(triton.cdiv(tokens, sizes["BLOCK_T"]), PROGRAMS // columns))
        fn_parts = fn.new_empty(shares, *fn.shape)
        with device_guard(stream):
            project_backward_kernel[(columns, shares)](
                stream,
                fn,
                grad_product,
                shrink,
                grad_stream,
                fn_parts,
                tokens,
                *row_strides(stream),
                **sizes,
            )
        parts = (grad_logits * z).split([copies, copies, copies * copies], 1)
        grad_scale = torch.stack([part.sum() for part in parts])
        return grad_stream, fn_parts.sum(0), grad_scale, grad_logits.sum(0), None, None, None


def triton_mixes(
    stream: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """The mixing weights of a stream as `as_rows` gives it; and z `[T, (2 + H) * H]`, norms `[T]`."""
    tokens, copies, dim = stream.shape
    pre, post = (fn.new_empty(tokens, copies) for _ in range(2))
    comb = fn.new_empty(tokens, copies, copies)
    z, rstd = fn.new_empty(tokens, len(fn)), fn.new_empty(tokens)
    if tokens == 0:
        return (pre, post, comb), z, rstd
    sizes = launch_sizes(copies, dim, stream.device)
    blocks = triton.cdiv(tokens, sizes["BLOCK_T"])
    # Few tokens must not wait for one program to walk through their whole stream.
    splits = max(1, min(copies * triton.cdiv(dim, sizes["BLOCK_D"]), PROGRAMS // blocks))
    z_parts, square_parts = fn.new_empty(splits, tokens, len(fn)), fn.new_empty(splits, tokens)
    with device_guard(stream):
        project_kernel[(blocks, splits)](stream, fn, z_parts, square_parts, tokens, *row_strides(stream), **sizes)
        mix_kernel[(triton.cdiv(tokens, MIX_BLOCK),)](
            z_parts,
            square_parts,
            scale,
            base,
            z,
            rstd,
            pre,
            post,
            comb,
            tokens,
            splits,
            sinkhorn_iters - 1,
            norm_eps,
            hc_eps,
            DIM=dim,
            H=copies,
            H_PAD=triton.next_power_of_2(copies),
            BLOCK_T=MIX_BLOCK,
            num_warps=4,
        )
    return (pre, post, comb), z, rstd
