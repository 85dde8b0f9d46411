"""The residual stream after a sublayer, and the vector that the next one reads from it, in one pass.

    out_j = post_j * y + sum_i comb[i, j] * x_i                  the stream, expanded
    h = sum_j pre_j * out_j                                      the next sublayer's input, collapsed

`pre` is known before the sublayer runs, so the stream is read once and written once. h is collapsed from the values
that are stored, so the pass gives what expanding, then collapsing gives.

Backward, from g_j = d loss / d out_j and e = d loss / d h, with G_j = g_j + pre_j * e:

    grad_x_i = sum_j comb[i, j] * G_j          grad_y = sum_j post_j * G_j
    grad_comb[i, j] = <x_i, G_j>               grad_post_j = <y, G_j>
    grad_pre_j = <out_j, e> = post_j * <y, e> + sum_i comb[i, j] * <x_i, e>

so the stream that came out need not be kept.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .backend import resolve_backend
from .precision import compute_dtype, without_autocast
from .stream_mixes import unsupported
from .stream_update_kernels import TritonStreamCollapse, TritonStreamUpdate, triton_collapse, triton_update
from .token_blocks import as_rows, needs_grad, token_blocks


# The formulas


def plain_stream_collapse(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """The formula, for a stream `[..., H, D]`; `pre` in the dtype to compute in."""
    return (pre.unsqueeze(-1) * stream.to(pre.dtype)).sum(-2).to(stream.dtype)


def plain_stream_expand(
    hidden_states: torch.Tensor, stream: torch.Tensor, post: torch.Tensor, comb: torch.Tensor
) -> torch.Tensor:
    """The formula, for a stream `[..., H, D]`; `post` and `comb` in the dtype to compute in."""
    mixed = comb.transpose(-1, -2) @ stream.to(comb.dtype)
    return (mixed + post.unsqueeze(-1) * hidden_states.to(comb.dtype).unsqueeze(-2)).to(stream.dtype)


# Eager: block by block, with the backward written by hand


def eager_collapse(stream: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
    """`stream_collapse` of a stream `[T, H, D]`."""
    collapsed = torch.empty(stream.shape[0], 1, stream.shape[2], dtype=stream.dtype, device=stream.device)
    for x, pre_block, to in token_blocks(stream, pre.unsqueeze(1), collapsed):
        bmm_into(to, pre_block, x.to(pre.dtype))
    return collapsed.squeeze(1)


def eager_update(
    y: torch.Tensor, stream: torch.Tensor, post: torch.Tensor, comb: torch.Tensor, pre: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The expanded stream `[T, H, D]`, and collapsed `[T, D]` (None without `pre`), from y `[T, D]`."""
    dtype, device = stream.dtype, stream.device
    tokens, _, dim = stream.shape
    out = torch.empty(stream.shape, dtype=dtype, device=device)
    collapsed = None if pre is None else torch.empty(tokens, 1, dim, dtype=dtype, device=device)
    blocks = token_blocks(
        stream,
        y.unsqueeze(1),
        post.unsqueeze(2),
        comb.transpose(1, 2),
        None if pre is None else pre.unsqueeze(1),
        out,
        collapsed,
    )
    for x, y_block, post_block, comb_block, pre_block, to, collapsed_to in blocks:
        x, y_block = x.to(comb.dtype), y_block.to(comb.dtype)
        if dtype == comb.dtype:
            torch.mul(post_block, y_block, out=to).baddbmm_(comb_block, x)
        else:
            to.copy_((post_block * y_block).baddbmm_(comb_block, x))
        if pre is not None:
            bmm_into(collapsed_to, pre_block, to.to(comb.dtype))
    return out, None if pre is None else collapsed.squeeze(1)


def bmm_into(to: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`to` becomes the batched product of a and b, whatever its dtype."""
    if to.dtype == a.dtype:
        torch.bmm(a, b, out=to)
    else:
        to.copy_(torch.bmm(a, b))


class EagerStreamCollapse(torch.autograd.Function):
    """`stream_collapse` of a stream `[T, H, D]`."""

    @staticmethod
    def forward(ctx, stream, pre):
        ctx.save_for_backward(stream, pre)
        return eager_collapse(stream, pre)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_collapsed):
        stream, pre = ctx.saved_tensors
        grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        grad_pre = torch.empty_like(pre)
        with without_autocast(stream.device):
            for x, grad, pre_block, grad_x, grad_pre_block in token_blocks(
                stream, grad_collapsed.unsqueeze(1), pre.unsqueeze(2), grad_stream, grad_pre.unsqueeze(2)
            ):
                grad = grad.to(pre.dtype)
                bmm_into(grad_x, pre_block, grad)
                bmm_into(grad_pre_block, x.to(pre.dtype), grad.transpose(1, 2))
        return grad_stream, grad_pre


class EagerStreamUpdate(torch.autograd.Function):
    """`stream_update`, or `stream_expand` where `pre` is None; keeps its inputs."""

    @staticmethod
    def forward(ctx, y, stream, post, comb, pre):
        ctx.save_for_backward(y, stream, post, comb, pre)
        return eager_update(y, stream, post, comb, pre)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out, grad_collapsed):
        y, stream, post, comb, pre = ctx.saved_tensors
        grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        grad_stream = torch.empty(stream.shape, dtype=stream.dtype, device=stream.device)
        grad_post, grad_comb = torch.empty_like(post), torch.empty_like(comb)
        grad_pre = None if pre is None else torch.empty_like(pre)
        blocks = token_blocks(
            stream, y, post, comb, pre, grad_out, grad_collapsed, grad_y, grad_stream, grad_post, grad_comb, grad_pre
        )
        with without_autocast(stream.device):
            for x, y_block, post_block, comb_block, pre_block, grad, e, to_y, to_x, to_post, to_comb, to_pre in blocks:
                x, grad, y_column = (part.to(comb.dtype) for part in (x, grad, y_block.unsqueeze(2)))
                if pre is not None:
                    e = e.to(comb.dtype).unsqueeze(2)
                    grad = torch.addcmul(grad, pre_block.unsqueeze(2), e.transpose(1, 2))
                    to_pre.copy_(post_block * torch.bmm(e.transpose(1, 2), y_column).squeeze(2))
                    to_pre.unsqueeze(2).baddbmm_(comb_block.transpose(1, 2), torch.bmm(x, e))
                bmm_into(to_y.unsqueeze(1), post_block.unsqueeze(1), grad)
                bmm_into(to_post.unsqueeze(2), grad, y_column)
                bmm_into(to_comb, x, grad.transpose(1, 2))
                bmm_into(to_x, comb_block, grad)
        return grad_y, grad_stream, grad_post, grad_comb, grad_pre


# Dispatch


def _check_shapes(stream: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raises ValueError unless each tensor is as long and as wide as the stream asks for."""
    if stream.ndim < 3:
        raise ValueError(f"`stream` must be [..., H, D], got {list(stream.shape)}.")
    *lead, copies, dim = stream.shape
    ends = {"hidden_states": [dim], "pre": [copies], "post": [copies], "comb": [copies, copies]}
    for name, tensor in others.items():
        expected = [*lead, *ends[name]]
        if tensor is not None and list(tensor.shape) != expected:
            raise ValueError(
                f"`{name}` must be {expected} for a stream [..., H, D] = {list(stream.shape)}, got "
                f"{list(tensor.shape)}."
            )


def stream_collapse(stream: torch.Tensor, pre: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """One vector from the copies: `sum_h pre_h * x_h`, summed in fp32 (fp64 for fp64), cast once.

    Args:
        stream: `[B, L, H, D]`.
        pre: `[B, L, H]`.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        `[B, L, D]` in the stream's dtype.
    """
    _check_shapes(stream, pre=pre)
    backend = resolve_backend("stream_collapse", backend, stream, unsupported(stream))
    pre = pre.to(compute_dtype(stream.dtype))
    with without_autocast(stream.device):
        if backend == "eager" and torch.compiler.is_compiling():
            return plain_stream_collapse(stream, pre)
        x, pre = as_rows(stream.flatten(0, -3)), pre.flatten(0, -2)
        record = needs_grad(x, pre)
        if backend == "triton":
            collapsed = (TritonStreamCollapse.apply if record else triton_collapse)(x, pre.contiguous())
        else:
            collapsed = (EagerStreamCollapse.apply if record else eager_collapse)(x, pre)
    return collapsed.view(*stream.shape[:-2], stream.shape[-1])


def stream_expand(
    hidden_states: torch.Tensor,
    stream: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    backend: str | None = None,
) -> torch.Tensor:
    """The stream after a sublayer: `out_j = post_j * y + sum_i comb[i, j] * x_i`, in fp32 (fp64 for fp64), cast once.

    Args:
        hidden_states: the sublayer's output y, `[B, L, D]`.
        stream: the stream that entered it, `[B, L, H, D]`.
        post: `[B, L, H]`.
        comb: `[B, L, H, H]` (from copy, to copy).
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        `[B, L, H, D]` in the stream's dtype.
    """
    _check_shapes(stream, hidden_states=hidden_states, post=post, comb=comb)
    backend = resolve_backend("stream_expand", backend, stream, unsupported(stream))
    return _update(hidden_states, stream, post, comb, None, backend)[0]


def stream_update(
    hidden_states: torch.Tensor,
    stream: torch.Tensor,
    post: torch.Tensor,
    comb: torch.Tensor,
    pre: torch.Tensor,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`stream_expand`, then `stream_collapse` of the result, in one pass over the stream.

    Args:
        hidden_states, stream, post, comb: as for `stream_expand`.
        pre: as for `stream_collapse`.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        the stream `[B, L, H, D]` and the collapsed vectors `[B, L, D]`, in the stream's dtype.
    """
    _check_shapes(stream, hidden_states=hidden_states, post=post, comb=comb, pre=pre)
    backend = resolve_backend("stream_update", backend, stream, unsupported(stream))
    return _update(hidden_states, stream, post, comb, pre, backend)


def _update(hidden_states, stream, post, comb, pre, backend):
    """Expanded, and collapsed (None without `pre`)."""
    dtype = compute_dtype(stream.dtype)
    post, comb, pre = post.to(dtype), comb.to(dtype), None if pre is None else pre.to(dtype)
    collapsed = None
    with without_autocast(stream.device):
        record = needs_grad(hidden_states, stream, post, comb, pre)
        # Inductor fuses the formula; and for a decode step it has the fewest operations.
        # (Asked second: a compiler would fix sizes that it keeps open.)
        if backend == "eager" and (torch.compiler.is_compiling() or stream.shape[:-2].numel() == 1):
            out = plain_stream_expand(hidden_states, stream, post, comb)
            if pre is not None:
                collapsed = plain_stream_collapse(out, pre)
        else:
            y, x = hidden_states.flatten(0, -2), as_rows(stream.flatten(0, -3))
            post, comb = post.flatten(0, -2), comb.flatten(0, -3)
            pre = None if pre is None else pre.flatten(0, -2)
            if backend == "triton":
                update = TritonStreamUpdate.apply if record else triton_update
                y, post, comb = y.contiguous(), post.contiguous(), comb.contiguous()
                pre = None if pre is None else pre.contiguous()
            else:
                update = EagerStreamUpdate.apply if record else eager_update
            out, collapsed = update(y, x, post, comb, pre)
            out = out.view(stream.shape)
            collapsed = None if collapsed is None else collapsed.view(hidden_states.shape)
    return out, collapsed
