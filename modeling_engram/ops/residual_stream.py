"""The multi-copy residual stream (manifold-constrained hyper-connections, as DeepSeek-V4.1 passes it on).

A sublayer (attention or MLP) reads one vector and writes one vector, while the stream carries H copies. Three small
sets of weights, computed from the stream that enters the sublayer, tie them together:

- `pre` [H] collapses the copies to one vector, for the *next* sublayer (so the collapse needs nothing new);
- `post` [H] says how much of the sublayer's output each copy gets;
- `comb` [H, H] mixes the copies among themselves; Sinkhorn normalisation makes it nearly doubly stochastic.
"""

import torch
from torch.nn import functional as F

from .backend import NO_KERNEL, resolve_backend
from .precision import compute_dtype, without_autocast


def stream_mixes(
    stream: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm_eps: float,
    hc_eps: float,
    sinkhorn_iters: int,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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
    resolve_backend("stream_mixes", backend, stream, NO_KERNEL)
    copies = stream.shape[-2]
    dtype = compute_dtype(stream.dtype)
    flat = stream.flatten(-2).to(dtype)
    fn, scale, base = fn.to(dtype), scale.to(dtype), base.to(dtype)
    with without_autocast(stream.device):
        z = F.linear(flat, fn)
    z = z * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
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


def stream_collapse(stream: torch.Tensor, pre: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """One vector from the copies: `sum_h pre_h * x_h`, summed in fp32 (fp64 for fp64), cast once.

    Args:
        stream: `[B, L, H, D]`.
        pre: `[B, L, H]`.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        `[B, L, D]` in the stream's dtype.
    """
    resolve_backend("stream_collapse", backend, stream, NO_KERNEL)
    dtype = compute_dtype(stream.dtype)
    return (pre.to(dtype).unsqueeze(-1) * stream.to(dtype)).sum(-2).to(stream.dtype)


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
    resolve_backend("stream_expand", backend, stream, NO_KERNEL)
    dtype = compute_dtype(stream.dtype)
    with without_autocast(stream.device):
        mixed = comb.to(dtype).transpose(-1, -2) @ stream.to(dtype)
    return (mixed + post.to(dtype).unsqueeze(-1) * hidden_states.to(dtype).unsqueeze(-2)).to(stream.dtype)
