"""Triton kernels of the stream's single pass, and their autograd functions; the formulas are in stream_update.py.

A program works on one token: all its copies, over a piece of the width (forward) or all of it (backward, whose inner
products need all). The stream is read by strides, counted in rows of D.
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
def collapse_kernel(
    x,
    pre,
    collapsed,
    token_rows: int,
    copy_rows: int,
    DIM: tl.constexpr,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token's collapsed values [D] from x: [H, D] by strides and pre: fp32 [H]; program: (token, piece of D)."""
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    total = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(H):
        x_i = tl.load(x + (t * token_rows + i * copy_rows) * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
        total += tl.load(pre + t * H + i) * x_i
    tl.store(collapsed + t * DIM + d, total.to(collapsed.dtype.element_ty), mask=d < DIM)


@kernel
def collapse_backward_kernel(
    x,
    pre,
    grad_collapsed,
    grad_x,
    grad_pre,
    token_rows: int,
    copy_rows: int,
    DIM: tl.constexpr,
    H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token's gradients: grad_x: [H, D] and grad_pre: fp32 [H]; program: token."""
    t = tl.program_id(0).to(tl.int64)
    for i in tl.static_range(H):
        pre_i = tl.load(pre + t * H + i)
        products = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, DIM, BLOCK_D):
            d = start + tl.arange(0, BLOCK_D)
            x_i = tl.load(x + (t * token_rows + i * copy_rows) * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
            grad = tl.load(grad_collapsed + t * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)
            products += x_i * grad
            tl.store(grad_x + (t * H + i) * DIM + d, (pre_i * grad).to(grad_x.dtype.element_ty), mask=d < DIM)
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
    token_rows: int,
    copy_rows: int,
    DIM: tl.constexpr,
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
    inside = d < DIM
    total = post_j[:, None] * tl.load(y + t * DIM + d, mask=inside, other=0.0).to(tl.float32)[None, :]
    for i in tl.static_range(H):
        x_i = tl.load(x + (t * token_rows + i * copy_rows) * DIM + d, mask=inside, other=0.0).to(tl.float32)
        comb_i = tl.load(comb + (t * H + i) * H + j, mask=j < H, other=0.0)
        total += comb_i[:, None] * x_i[None, :]
    stored = total.to(out.dtype.element_ty)
    tl.store(out + (t * H + j[:, None]) * DIM + d[None, :], stored, mask=(j < H)[:, None] & inside[None, :])
    if COLLAPSE:
        pre_j = tl.load(pre + t * H + j, mask=j < H, other=0.0)
        h = tl.sum(pre_j[:, None] * stored.to(tl.float32), axis=0)
        tl.store(collapsed + t * DIM + d, h.to(collapsed.dtype.element_ty), mask=inside)


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
    token_rows: int,
    copy_rows: int,
    DIM: tl.constexpr,
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
    for start in range(0, DIM, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        inside = d < DIM
        grad = tl.load(
            grad_out + (t * H + j[:, None]) * DIM + d[None, :], mask=(j < H)[:, None] & inside[None, :], other=0.0
        ).to(tl.float32)
        y_d = tl.load(y + t * DIM + d, mask=inside, other=0.0).to(tl.float32)
        if COLLAPSE:
            e = tl.load(grad_collapsed + t * DIM + d, mask=inside, other=0.0).to(tl.float32)
            grad += pre_j[:, None] * e[None, :]
            pre_sum += post_j * tl.sum(y_d * e, axis=0)
        grad_y_d = tl.sum(post_j[:, None] * grad, axis=0)
        tl.store(grad_y + t * DIM + d, grad_y_d.to(grad_y.dtype.element_ty), mask=inside)
        post_sum += tl.sum(grad * y_d[None, :], axis=1)
        for i in tl.static_range(H):
            x_i = tl.load(x + (t * token_rows + i * copy_rows) * DIM + d, mask=inside, other=0.0).to(tl.float32)
            comb_i = tl.load(comb + (t * H + i) * H + j, mask=j < H, other=0.0)
            grad_x_i = tl.sum(comb_i[:, None] * grad, axis=0)
            tl.store(grad_x + (t * H + i) * DIM + d, grad_x_i.to(grad_x.dtype.element_ty), mask=inside)
            dots = tl.sum(grad * x_i[None, :], axis=1)
            comb_sum += tl.where(j[:, None] == i, dots[None, :], 0.0)
            if COLLAPSE:
                pre_sum += comb_i * tl.sum(x_i * e, axis=0)
    tl.store(grad_post + t * H + j, post_sum, mask=j < H)
    entry = j[:, None] * H + j[None, :]
    tl.store(grad_comb + t * H * H + entry, comb_sum, mask=(j < H)[:, None] & (j < H)[None, :])
    if COLLAPSE:
        tl.store(grad_pre + t * H + j, pre_sum, mask=j < H)


def launch_sizes(copies: int, dim: int) -> dict:
    """The width, and a program's columns and warps: 16 bytes of 16-bit values a thread, half of that where the copies
    are many."""
    widest = 1024 if copies <= 4 else 512
    block = min(widest, max(64, triton.next_power_of_2(dim)))
    return {"DIM": dim, "BLOCK_D": block, "num_warps": max(1, 4 * block // widest)}


def triton_collapse(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """`stream_collapse` of a stream as `as_rows` gives it."""
    tokens, copies, dim = stream.shape
    collapsed = torch.empty(tokens, dim, dtype=stream.dtype, device=stream.device)
    if tokens:
        sizes = launch_sizes(copies, dim)
        with device_guard(stream):
            collapse_kernel[(tokens, triton.cdiv(dim, sizes["BLOCK_D"]))](
                stream, pre, collapsed, *row_strides(stream), H=copies, **sizes
            )
    return collapsed


def triton_update(
    y: torch.Tensor,
    stream: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `eager_update`."""
    tokens, copies, dim = stream.shape
    out = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    collapsed = None if pre is None else torch.empty(y.shape, dtype=stream.dtype, device=stream.device)
    if tokens:
        sizes = launch_sizes(copies, dim)
        with device_guard(stream):
            update_kernel[(tokens, triton.cdiv(dim, sizes["BLOCK_D"]))](
                y,
                stream,
                post,
                comb,
                pre,
                out,
                collapsed,
                *row_strides(stream),
                H=copies,
                H_PAD=triton.next_power_of_2(copies),
                COLLAPSE=pre is not None,
                **sizes,
            )
    return out, collapsed


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
            with device_guard(stream):
                collapse_backward_kernel[(tokens,)](
                    stream,
                    pre,
                    grad_collapsed.contiguous(),
                    grad_stream,
                    grad_pre,
                    *row_strides(stream),
                    H=copies,
                    **launch_sizes(copies, dim),
                )
        return grad_stream, grad_pre


class TritonStreamUpdate(torch.autograd.Function):
    """`stream_update`, or `stream_expand` where `pre` is None; keeps its inputs."""

    @staticmethod
    def forward(ctx, y, stream, post, comb, pre):
        ctx.save_for_backward(y, stream, post, comb, pre)
        return triton_update(y, stream, post, comb, pre)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_collapsed):
        y, stream, post, comb, pre = ctx.saved_tensors
        tokens, copies, dim = stream.shape
        grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        grad_post, grad_comb = torch.empty_like(post), torch.empty_like(comb)
        grad_pre = None if pre is None else torch.empty_like(pre)
        if tokens:
            with device_guard(stream):
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
                    *row_strides(stream),
                    H=copies,
                    H_PAD=triton.next_power_of_2(copies),
                    COLLAPSE=pre is not None,
                    **launch_sizes(copies, dim),
                )
        return grad_y, grad_stream, grad_post, grad_comb, grad_pre
