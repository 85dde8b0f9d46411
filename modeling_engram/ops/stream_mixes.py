"""The mixing weights of one sublayer, from the residual stream that enters it: projection, sigmoids, Sinkhorn.

Sinkhorn's rounds divide a matrix A by its row and column sums in turn, so its result is `A[i, j] / (row_i * col_j)`.
The eager version and the kernels keep only the two vectors of divisors. Dividing `C = A / (row x col)` by its column
sums plus eps multiplies `col_j` by `sum_i C[i, j] + eps`, which makes it

    col_j <- sum_i A[i, j] / row_i + eps * col_j        (and rows alike),

a matrix-vector product a step; the rounds are computed again in backward, not stored.
"""

from __future__ import annotations

import math

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .backend import resolve_backend
from .precision import compute_dtype, without_autocast
from .stream_mixes_kernels import TritonStreamMixes, triton_mixes
from .token_blocks import as_rows, needs_grad, token_blocks


# As many as the kernels hold in registers.
MAX_COPIES = 8
# pre [T, H], post [T, H], comb [T, H, H]
Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


# The formulas


def plain_stream_mixes(
    stream: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
) -> Mixes:
    """The formula, for a stream `[..., H, D]`; `fn`, `scale` and `base` in the dtype to compute in."""
    copies = stream.shape[-2]
    flat = stream.flatten(-2).to(fn.dtype)
    z = F.linear(flat, fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre_z, post_z, comb_z = z.split([copies, copies, copies * copies], dim=-1)
    pre_base, post_base, comb_base = base.split([copies, copies, copies * copies])

    pre = torch.sigmoid(pre_z * scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post_z * scale[1] + post_base)
    comb = torch.softmax((comb_z * scale[2] + comb_base).unflatten(-1, (copies, copies)), dim=-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return pre, post, comb


# Eager: block by block, with the backward written by hand


def project(stream: torch.Tensor, fn: torch.Tensor, norm_eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """z `[T, (2 + H) * H]` and the reciprocal norms `[T, 1]` of a stream `[T, H, D]`, in the dtype of `fn`."""
    z = fn.new_empty(stream.shape[0], fn.shape[0])
    norm = fn.new_empty(stream.shape[0], 1)
    for x, z_block, norm_block in token_blocks(stream, z, norm):
        x = x.flatten(1).to(fn.dtype)
        torch.mm(x, fn.t(), out=z_block)
        torch.linalg.vector_norm(x, dim=1, keepdim=True, out=norm_block)
    rstd = norm.square_().div_(fn.shape[1]).add_(norm_eps).rsqrt_()
    return z.mul_(rstd), rstd


def project_backward(
    stream: torch.Tensor, fn: torch.Tensor, z: torch.Tensor, rstd: torch.Tensor, grad_z: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the stream and of `fn`.

    With x the flattened stream of K = H * D values, `p = x @ fn^T`, `r = rsqrt(mean(x^2) + norm_eps)`, `z = p * r`:
    `grad_p = grad_z * r`; `grad_r = <grad_z, p>`, and `dr/dx = -r^3 / K * x`, hence
    `grad_x = grad_p @ fn - (r^2 / K * <grad_z, z>) * x` and `grad_fn = grad_p^T @ x`.
    """
    grad_p = grad_z * rstd
    shrink = (grad_z * z).sum(1, keepdim=True).mul_(rstd.square()).div_(-fn.shape[1])
    grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
    grad_fn = torch.zeros_like(fn)
    for x, grad_x, grad_p_block, shrink_block in token_blocks(stream, grad_stream.flatten(1), grad_p, shrink):
        x = x.flatten(1).to(fn.dtype)
        if grad_x.dtype == fn.dtype:
            torch.mul(x, shrink_block, out=grad_x).addmm_(grad_p_block, fn)
        else:
            grad_x.copy_(torch.addmm(x * shrink_block, grad_p_block, fn))
        grad_fn.addmm_(grad_p_block.t(), x)
    return grad_stream, grad_fn


def sinkhorn_divisors(
    matrix: torch.Tensor, eps: float, iters: int, keep: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Row and column divisors `[T, H, 1]` of positive matrices `[T, H, H]` after every round, or the last alone.

    Every round but the first (columns alone) is two matrix-vector products: rows, then columns.
    """
    kept = iters if keep else 1
    buffers = matrix.new_empty(2 * kept + 1, *matrix.shape[:2], 1).unbind()
    rows, cols, inverse = buffers[:kept], buffers[kept:-1], buffers[-1]
    transposed = matrix.transpose(1, 2).contiguous()
    rows[0].fill_(1)
    torch.sum(transposed, 2, keepdim=True, out=cols[0]).add_(eps)
    for i in range(1, iters):
        now, before = (i, i - 1) if keep else (0, 0)
        torch.reciprocal(cols[before], out=inverse)
        torch.baddbmm(rows[before], matrix, inverse, beta=eps, out=rows[now])
        torch.reciprocal(rows[now], out=inverse)
        torch.baddbmm(cols[before], transposed, inverse, beta=eps, out=cols[now])
    return rows, cols


def sinkhorn_backward(matrix: torch.Tensor, eps: float, iters: int, grad_comb: torch.Tensor) -> torch.Tensor:
    """Gradient `[T, H, H]` of the matrix A that Sinkhorn starts from; the rounds are computed again.

    A column step `C' = C / s`, `s_j = sum_i C[i, j] + eps`, gives `grad_C = (grad_C' - u) / s` with
    `u_j = sum_i (grad_C' * C')[i, j]`. For `W = grad_C / (row x col)`, with which C is written as A, that is
    `u_j = sum_i (W * A)[i, j]` and `W -= u / (row x col)`, divisors as after the step; a row step alike. As u is taken
    from W itself, each step removes again what rounding left along the directions that Sinkhorn ignores.
    """
    rows, cols = sinkhorn_divisors(matrix, eps, iters, keep=True)
    inverse_rows = torch.stack(rows).reciprocal_()
    inverse_cols = torch.stack(cols).reciprocal_().transpose(2, 3)
    # The last column step, before the scaling rounds: where all rows of `grad_comb` are alike, this is zero.
    scaling = inverse_rows[-1] * inverse_cols[-1]
    grad = (grad_comb - (grad_comb * matrix * scaling).sum(1, keepdim=True)) * scaling
    for i in range(iters - 1, 0, -1):
        u = (grad * matrix).sum(2, keepdim=True)
        grad.baddbmm_(u.mul_(inverse_rows[i]), inverse_cols[i - 1], alpha=-1)
        u = (grad * matrix).sum(1, keepdim=True)
        grad.baddbmm_(inverse_rows[i - 1], u.mul_(inverse_cols[i - 1]), alpha=-1)
    return grad


def mix(z: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, copies: int, hc_eps: float, iters: int) -> Mixes:
    """`pre`, `post` and `comb` from z `[T, (2 + H) * H]`."""
    sizes = [copies, copies, copies * copies]
    parts = zip(base.split_with_sizes(sizes), z.split_with_sizes(sizes, 1), scale.unbind(), strict=True)
    pre, post, comb = (torch.addcmul(part_base, part_z, part_scale) for part_base, part_z, part_scale in parts)
    matrix = torch.softmax(comb.view(-1, copies, copies), dim=-1).add_(hc_eps)
    rows, cols = sinkhorn_divisors(matrix, hc_eps, iters)
    comb = matrix.div_(rows[-1]).div_(cols[-1].transpose(1, 2))
    return pre.sigmoid_().add_(hc_eps), post.sigmoid_().mul_(2), comb


def mix_one_token(z: torch.Tensor, scale: torch.Tensor, base: torch.Tensor, hc_eps: float, iters: int) -> Mixes:
    """`mix` for one token and four copies, on the CPU: a decode step.

    On 16 numbers an operation of PyTorch is all overhead, and Sinkhorn is hundreds of them; Python's own arithmetic,
    written out, takes half the time (and is fp64).
    """
    scales = scale.tolist()
    parts = zip(base.tolist(), z[0].tolist(), strict=True)
    logits = [b + value * scales[min(i // 4, 2)] for i, (b, value) in enumerate(parts)]
    # tanh does not overflow.
    gates = [0.5 + 0.5 * math.tanh(0.5 * logit) for logit in logits[:8]]
    matrix = []
    for i in range(8, 24, 4):
        top = max(logits[i : i + 4])
        exps = [math.exp(logit - top) for logit in logits[i : i + 4]]
        total = sum(exps)
        matrix.append([exp / total + hc_eps for exp in exps])
    transposed = list(zip(*matrix, strict=True))
    rows = [1.0] * 4
    cols = [sum(col) + hc_eps for col in transposed]
    for _ in range(iters - 1):
        p, q, r, s = (1 / col for col in cols)
        sums = [a * p + b * q + c * r + d * s for a, b, c, d in matrix]
        rows = [total + hc_eps * row for total, row in zip(sums, rows, strict=True)]
        p, q, r, s = (1 / row for row in rows)
        sums = [a * p + b * q + c * r + d * s for a, b, c, d in transposed]
        cols = [total + hc_eps * col for total, col in zip(sums, cols, strict=True)]
    comb = [
        a / (row * col) for values, row in zip(matrix, rows, strict=True) for a, col in zip(values, cols, strict=True)
    ]
    pre, post = [gate + hc_eps for gate in gates[:4]], [2 * gate for gate in gates[4:]]
    pre, post, comb = z.new_tensor(pre + post + comb).split_with_sizes([4, 4, 16])
    return pre.view(1, 4), post.view(1, 4), comb.view(1, 4, 4)


def mix_backward(
    z: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    hc_eps: float,
    iters: int,
    grad_pre: torch.Tensor,
    grad_post: torch.Tensor,
    grad_comb: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of z, `scale` and `base`, through the logits `z * scale + base`."""
    copies = grad_pre.shape[1]
    sizes = [copies, copies, copies * copies]
    scales = torch.cat([part.expand(size) for part, size in zip(scale.unbind(), sizes, strict=True)])
    pre, post, comb = torch.addcmul(base, z, scales).split(sizes, 1)
    pre, post, comb = pre.sigmoid(), post.sigmoid(), comb.unflatten(1, (copies, copies)).softmax(-1)
    grad_matrix = sinkhorn_backward(comb + hc_eps, hc_eps, iters, grad_comb)
    grad_logits = torch.cat(
        [
            grad_pre * pre * (1 - pre),
            2 * grad_post * post * (1 - post),
            (comb * (grad_matrix - (grad_matrix * comb).sum(-1, keepdim=True))).flatten(1),
        ],
        dim=1,
    )
    grad_scale = torch.stack([part.sum() for part in (grad_logits * z).split(sizes, 1)])
    return grad_logits * scales, grad_scale, grad_logits.sum(0)


class EagerStreamMixes(torch.autograd.Function):
    """`stream_mixes` of a stream `[T, H, D]`; keeps the stream, z and the norms for backward."""

    @staticmethod
    def forward(ctx, stream, fn, scale, base, norm_eps, hc_eps, sinkhorn_iters):
        z, rstd = project(stream, fn, norm_eps)
        ctx.save_for_backward(stream, fn, scale, base, z, rstd)
        ctx.constants = hc_eps, sinkhorn_iters
        return mix(z, scale, base, stream.shape[1], hc_eps, sinkhorn_iters)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_pre, grad_post, grad_comb):
        stream, fn, scale, base, z, rstd = ctx.saved_tensors
        with without_autocast(stream.device):
            grad_z, grad_scale, grad_base = mix_backward(
                z, scale, base, *ctx.constants, grad_pre, grad_post, grad_comb
            )
            grad_stream, grad_fn = project_backward(stream, fn, z, rstd, grad_z)
        return grad_stream, grad_fn, grad_scale, grad_base, None, None, None


# Dispatch


def unsupported(stream: torch.Tensor) -> str | None:
    """Why the kernels cannot take this stream; None if they can."""
    if stream.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"the stream is {stream.dtype}, and the kernels compute in fp32"
    if stream.shape[-2] > MAX_COPIES:
        return f"the stream has {stream.shape[-2]} copies, and the kernels hold at most {MAX_COPIES} in registers"
    return None


def stream_mixes(
    stream: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    backend: str | None = None,
) -> Mixes:
    """The mixing weights of one sublayer, from the stream that enters it.

    `z = (flatten(x) @ fn^T) * rsqrt(mean(flatten(x)^2) + norm_eps)`, split into three parts:
    `pre = sigmoid(z * scale0 + base) + hc_eps`, `post = 2 * sigmoid(z * scale1 + base)`, and `comb` = the row softmax
    of `z * scale2 + base`, plus `hc_eps`, then columns, then `sinkhorn_iters - 1` times rows and columns normalised.

    Args:
        stream: `[B, L, H, D]`, any float dtype; computed in fp32 (fp64 for fp64).
        fn: `[(2 + H) * H, H * D]`.
        scale: `[3]`.
        base: `[(2 + H) * H]`.
        norm_eps: added to the mean square.
        hc_eps: added to `pre`, to `comb`, and to the sums that it is divided by.
        sinkhorn_iters: number of column normalisations, >= 1.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        `pre` [B, L, H], `post` [B, L, H] and `comb` [B, L, H, H] (from copy, to copy), in fp32 (fp64 for fp64).
    """
    copies, dim = stream.shape[-2:]
    mixes = (2 + copies) * copies
    if [*fn.shape, *scale.shape, *base.shape] != [mixes, copies * dim, 3, mixes]:
        raise ValueError(
            f"For a stream [..., H, D] = {list(stream.shape)}, fn must be {[mixes, copies * dim]}, scale [3] and base "
            f"{[mixes]}, got {list(fn.shape)}, {list(scale.shape)} and {list(base.shape)}."
        )
    backend = resolve_backend("stream_mixes", backend, stream, unsupported(stream))
    dtype = compute_dtype(stream.dtype)
    parameters = fn.to(dtype), scale.to(dtype), base.to(dtype)
    constants = norm_eps, hc_eps, sinkhorn_iters
    with without_autocast(stream.device):
        if backend == "eager" and torch.compiler.is_compiling():
            return plain_stream_mixes(stream, *parameters, *constants)
        x = as_rows(stream.flatten(0, -3))
        record = needs_grad(x, *parameters)
        if backend == "triton":
            parameters = [parameter.contiguous() for parameter in parameters]
            if record:
                mixes = TritonStreamMixes.apply(x, *parameters, *constants)
            else:
                mixes, _, _ = triton_mixes(x, *parameters, *constants)
        elif record:
            mixes = EagerStreamMixes.apply(x, *parameters, *constants)
        else:
            z, _ = project(x, parameters[0], norm_eps)
            # Without eps a column may add up to 0, which Python does not divide by.
            if x.shape[:2] == (1, 4) and x.device.type == "cpu" and hc_eps > 0:
                mixes = mix_one_token(z, *parameters[1:], hc_eps, sinkhorn_iters)
            else:
                mixes = mix(z, *parameters[1:], x.shape[1], hc_eps, sinkhorn_iters)
    pre, post, comb = mixes
    lead = stream.shape[:-1]
    return pre.view(lead), post.view(lead), comb.view(*lead, lead[-1])
