"""Triton kernels of the stream's single pass, and their autograd functions; the formulas are in stream_update.py.

A program works on one token: all its copies, over a piece of the width (forward) or all of it (backward, whose inner
products need all). No atomics: the gradient of the norm's weight is added up in two stages.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .backend import kernel


# Optional at run time; the flat copies in Hub folders need the import guarded.
try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@kernel
def collapse_kernel(
    x,
    pre,
    collapsed,
    dim,
    stride_token,
    stride_copy,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token's collapsed values [D] from x: [H, D] by strides and pre: fp32 [H]; program: (token, piece of D)."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(H):
        x_i = tl.load(x + t * stride_token + i * stride_copy + d, mask=d < dim, other=0.0).to(tl.float32)
        total += tl.load(pre + t * H + i) * x_i
    tl.store(collapsed + t * dim + d, total.to(collapsed.dtype.element_ty), mask=d < dim)


@kernel
def collapse_backward_kernel(
    x,
    pre,
    grad_collapsed,
    grad_x,
    grad_pre,
    dim,
    stride_token,
    stride_copy,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token's gradients: grad_x: [H, D] and grad_pre: fp32 [H]; program: token."""
    t = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(H):
        pre_i = tl.load(pre + t * H + i)
        products = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, dim, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            x_i = tl.load(x + t * stride_token + i * stride_copy + d, mask=d < dim, other=0.0).to(tl.float32)
            grad = tl.load(grad_collapsed + t * dim + d, mask=d < dim, other=0.0).to(tl.float32)
            products += x_i * grad
            tl.store(grad_x + (t * H + i) * dim + d, (pre_i * grad).to(grad_x.dtype.element_ty), mask=d < dim)
        tl.store(grad_pre + t * H + i, tl.sum(products, axis=0))


@kernel
def update_kernel(
    y,
    x,
    post,
    comb,
    pre,
    out,
    collapsed,
    dim,
    stride_token,
    stride_copy,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLLAPSE: tl.constexpr,
):
    """One token's stream after the sublayer and, with COLLAPSE, its collapsed values; program: (token, piece of D).

    y: [D]; x: [H, D] by strides; post, pre: fp32 [H]; comb: fp32 [H, H] -> out: [H, D]; collapsed: [D]
    """
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, H_PAD)
    post_j = tl.load(post + t * H + j, mask=j < H, other=0.0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = d < dim
    total = post_j[:, None] * tl.load(y + t * dim + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(H):
        x_i = tl.load(x + t * stride_token + i * stride_copy + d, mask=inside, other=0.0).to(tl.float32)
        comb_i = tl.load(comb + (t * H + i) * H + j, mask=j < H, other=0.0)
        total += comb_i[:, None] * x_i[None, :]
    stored = total.to(out.dtype.element_ty)
    tl.store(out + (t * H + j[:, None]) * dim + d[None, :], stored, mask=(j < H)[:, None] & inside[None, :])
    if COLLAPSE:
        pre_j = tl.load(pre + t * H + j, mask=j < H, other=0.0)
        h = tl.sum(pre_j[:, None] * stored.to(tl.float32), axis=0)
        tl.store(collapsed + t * dim + d, h.to(collapsed.dtype.element_ty), mask=inside)


@kernel
def norm_kernel(
    h,
    weight,
    normed,
    dim,
    eps,
    BLOCK_D: tl.constexpr,
):
    """RMSNorm of one token's collapsed values [D], which are in the cache still; program: token.

    A kernel of its own, since a token's mean needs all pieces of D: what other threads have stored is certain to be
    there only at a kernel's end (Triton's barrier does not wait for stores to global memory on AMD).
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    value = tl.load(h + t * dim + d, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
    # As LlamaRMSNorm: cast, then multiplied by the weight.
    value = (value * rstd).to(h.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + t * dim + d, (scale * value).to(normed.dtype.element_ty), mask=inside)


@kernel
def update_backward_kernel(
    y,
    x,
    post,
    comb,
    pre,
    grad_out,
    grad_collapsed,
    grad_y,
    grad_x,
    grad_post,
    grad_comb,
    grad_pre,
    dim,
    stride_token,
    stride_copy,
    H: tl.constexpr,
    H_PAD: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLLAPSE: tl.constexpr,
):
    """One token's gradients, shaped as in `update_kernel`; formulas in stream_update.py. program: token."""
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, H_PAD)
    post_j = tl.load(post + t * H + j, mask=j < H, other=0.0)
    post_sum = tl.zeros([H_PAD], tl.float32)
    comb_sum = tl.zeros([H_PAD, H_PAD], tl.float32)
    if COLLAPSE:
        pre_j = tl.load(pre + t * H + j, mask=j < H, other=0.0)
        pre_sum = tl.zeros([H_PAD], tl.float32)
    for start in range(0, dim, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = d < dim
        grad = tl.load(
            grad_out + (t * H + j[:, None]) * dim + d[None, :], mask=(j < H)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        y_d = tl.load(y + t * dim + d, mask=inside, other=0.0).to(tl.float32)
        if COLLAPSE:
            e = tl.load(grad_collapsed + t * dim + d, mask=inside, other=0.0).to(tl.float32)
            grad += pre_j[:, None] * e[None, :]
            pre_sum += post_j * tl.sum(y_d * e, axis=0)
        grad_y_d = tl.sum(post_j[:, None] * grad, axis=0)
        tl.store(grad_y + t * dim + d, grad_y_d.to(grad_y.dtype.element_ty), mask=inside)
        post_sum += tl.sum(grad * y_d[None, :], axis=1)
        for i in tl.static_range(H):
            x_i = tl.load(x + t * stride_token + i * stride_copy + d, mask=inside, other=0.0).to(tl.float32)
            comb_i = tl.load(comb + (t * H + i) * H + j, mask=j < H, other=0.0)
            grad_x_i = tl.sum(comb_i[:, None] * grad, axis=0)
            tl.store(grad_x + (t * H + i) * dim + d, grad_x_i.to(grad_x.dtype.element_ty), mask=inside)
            dots = tl.sum(grad * x_i[None, :], axis=1)
            comb_sum += tl.where(j[:, None] == i, dots[None, :], 0.0)
            if COLLAPSE:
                pre_sum += comb_i * tl.sum(x_i * e, axis=0)
    tl.store(grad_post + t * H + j, post_sum, mask=j < H)
    entry = j[:, None] * H + j[None, :]
    tl.store(grad_comb + t * H * H + entry, comb_sum, mask=(j < H)[:, None] & (j < H)[None, :])
    if COLLAPSE:
        tl.store(grad_pre + t * H + j, pre_sum, mask=j < H)


@kernel
def norm_backward_kernel(
    h,
    weight,
    grad_normed,
    grad_h,
    out,
    weight_parts,
    tokens,
    dim,
    eps,
    BLOCK_D: tl.constexpr,
):
    """Gradient through the RMSNorm, added to that of the collapsed vector, over every num_programs(0)-th token.

    With r = rsqrt(mean(h^2) + eps), n = h * r and w = grad_normed * weight:
    `out = grad_h + r * (w - n * mean(w * n))`.

    h, grad_normed, grad_h: [T, D]; weight: [D] -> out: fp32 [T, D]; weight_parts: fp32 [programs, D], to be added up
    """
    d = tl.arange(0, BLOCK_D)
    inside = d < dim
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = d.to(tl.int64) + tl.cast(t, tl.int64) * dim
        value = tl.load(h + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_normed + at, mask=inside, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(value * value, axis=0) / dim + eps)
        value *= rstd
        total += grad * value.to(h.dtype.element_ty).to(tl.float32)
        grad *= scale
        grad = rstd * (grad - value * (tl.sum(grad * value, axis=0) / dim))
        tl.store(out + at, grad + tl.load(grad_h + at, mask=inside, other=0.0).to(tl.float32), mask=inside)
    tl.store(weight_parts + tl.program_id(0) * dim + d, total, mask=inside)


# Programs that share the tokens of a norm's gradient: enough to fill a device, few enough to add up.
NORM_PROGRAMS = 256


def launch_sizes(copies: int, dim: int) -> dict:
    """Columns and warps of a program: 16 bytes of 16-bit values a thread, half of that where the copies are many."""
    widest = 1024 if copies <= 4 else 512
    block = min(widest, max(64, triton.next_power_of_2(dim)))
    return {"BLOCK_D": block, "num_warps": max(1, 4 * block // widest)}


def norm_launch_sizes(dim: int) -> dict:
    """A norm's program holds a token's whole vector."""
    block = triton.next_power_of_2(dim)
    return {"BLOCK_D": block, "num_warps": min(16, max(1, block // 512))}


def triton_collapse(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """`stream_collapse` of a stream `[T, H, D]` with unit stride in D."""
    tokens, copies, dim = stream.shape
    collapsed = torch.empty(tokens, dim, dtype=stream.dtype, device=stream.device)
    if tokens:
        sizes = launch_sizes(copies, dim)
        collapse_kernel[(tokens, triton.cdiv(dim, sizes["BLOCK_D"]))](
            stream, pre, collapsed, dim, *stream.stride()[:2], H=copies, **sizes
        )
    return collapsed


def triton_update(
    y: torch.Tensor,
    stream: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """As `eager_update`, and the norm `[T, D]` (None without `norm_weight`)."""
    tokens, copies, dim = stream.shape
    out = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    collapsed = None if pre is None else torch.empty(y.shape, dtype=stream.dtype, device=stream.device)
    normed = None
    if norm_weight is not None:
        dtype = torch.promote_types(norm_weight.dtype, stream.dtype)
        normed = torch.empty(y.shape, dtype=dtype, device=stream.device)
    if tokens:
        sizes = launch_sizes(copies, dim)
        update_kernel[(tokens, triton.cdiv(dim, sizes["BLOCK_D"]))](
            y,
            stream,
            post,
            comb,
            pre,
            out,
            collapsed,
            dim,
            *stream.stride()[:2],
            H=copies,
            H_PAD=triton.next_power_of_2(copies),
            COLLAPSE=pre is not None,
            **sizes,
        )
        if norm_weight is not None:
            norm_kernel[(tokens,)](collapsed, norm_weight, normed, dim, norm_eps, **norm_launch_sizes(dim))
    return out, collapsed, normed


class TritonStreamCollapse(torch.autograd.Function):
    """`stream_collapse` of a stream `[T, H, D]`."""

    @staticmethod
    def forward(ctx, stream, pre):
        ctx.save_for_backward(stream, pre)
        return triton_collapse(stream, pre)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_collapsed):
        stream, pre = ctx.saved_tensors
        tokens, copies, dim = stream.shape
        grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        grad_pre = torch.empty_like(pre)
        if tokens:
            collapse_backward_kernel[(tokens,)](
                stream,
                pre,
                grad_collapsed.contiguous(),
                grad_stream,
                grad_pre,
                dim,
                *stream.stride()[:2],
                H=copies,
                **launch_sizes(copies, dim),
            )
        return grad_stream, grad_pre


class TritonStreamUpdate(torch.autograd.Function):
    """`stream_update`, or `stream_expand` where `pre` is None; keeps its inputs and, for the norm, the collapsed."""

    @staticmethod
    def forward(ctx, y, stream, post, comb, pre, norm_weight, norm_eps):
        out, collapsed, normed = triton_update(y, stream, post, comb, pre, norm_weight, norm_eps)
        kept = None if norm_weight is None else collapsed
        ctx.save_for_backward(y, stream, post, comb, pre, norm_weight, kept)
        ctx.norm_eps = norm_eps
        return out, collapsed, normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_collapsed, grad_normed):
        y, stream, post, comb, pre, norm_weight, collapsed = ctx.saved_tensors
        tokens, copies, dim = stream.shape
        grad_weight = None
        if norm_weight is not None:
            grad_collapsed, grad_weight = norm_backward(
                collapsed, norm_weight, grad_normed, grad_collapsed, ctx.norm_eps
            )
        grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        grad_post, grad_comb = torch.empty_like(post), torch.empty_like(comb)
        grad_pre = None if pre is None else torch.empty_like(pre)
        if tokens:
            update_backward_kernel[(tokens,)](
                y,
                stream,
                post,
                comb,
                pre,
                grad_out.contiguous(),
                None if pre is None else grad_collapsed.contiguous(),
                grad_y,
                grad_stream,
                grad_post,
                grad_comb,
                grad_pre,
                dim,
                *stream.stride()[:2],
                H=copies,
                H_PAD=triton.next_power_of_2(copies),
                COLLAPSE=pre is not None,
                **launch_sizes(copies, dim),
            )
        return grad_y, grad_stream, grad_post, grad_comb, grad_pre, grad_weight, None


def norm_backward(
    collapsed: torch.Tensor, weight: torch.Tensor, grad_normed: torch.Tensor, grad_collapsed: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the collapsed vectors, fp32 `[T, D]`, and of the norm's weight `[D]`."""
    tokens, dim = collapsed.shape
    grad = torch.empty(tokens, dim, dtype=torch.float32, device=collapsed.device)
    programs = min(tokens, NORM_PROGRAMS)
    parts = torch.empty(programs, dim, dtype=torch.float32, device=collapsed.device)
    if tokens:
        norm_backward_kernel[(programs,)](
            collapsed,
            weight,
            grad_normed.contiguous(),
            grad_collapsed.contiguous(),
            grad,
            parts,
            tokens,
            dim,
            eps,
            **norm_launch_sizes(dim),
        )
    return grad, parts.sum(0).to(weight.dtype)
