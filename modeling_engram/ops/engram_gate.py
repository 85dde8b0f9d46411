"""The Engram gate: a value written to every copy of the stream, weighted by how well its key matches that copy."""

import torch

from .backend import NO_KERNEL, resolve_backend
from .precision import compute_dtype


# Keeps the gradient of the square root finite at a dot product of zero.
MIN_ABS_DOT = 1e-6


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
    cast once at the end. Source: the Engram layer of DeepSeek-V4.1.

    Args:
        hidden_states: the stream x, `[..., H, D]`.
        kv: `[..., (H + 1) * D]`: one key per copy, then the value that all copies share.
        q_weight, k_weight: `[H, D]`.
        token_mask: bool `[...]` or None; where False, the stream passes through bit for bit.
        eps: added to the mean squares.
        backend: `"eager"`, `"triton"` or None to choose.

    Returns:
        `[..., H, D]` in the dtype of `hidden_states`.
    """
    resolve_backend("engram_gate", backend, hidden_states, NO_KERNEL)
    copies, dim = hidden_states.shape[-2:]
    dtype = compute_dtype(hidden_states.dtype)
    key, value = kv.to(dtype).split([copies * dim, dim], dim=-1)
    key = key.unflatten(-1, (copies, dim))
    x = hidden_states.to(dtype)
    weight = q_weight.to(dtype) * k_weight.to(dtype)

    rstd = torch.rsqrt(x.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (x * weight * key).sum(-1) * rstd * dim**-0.5
    # copysign, not sign: the gate at a dot product of zero is sigmoid(+-0.001), not 0.5.
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(MIN_ABS_DOT).sqrt(), dot))
    if token_mask is not None:
        gate = gate.masked_fill(~token_mask.unsqueeze(-1), 0)
    out = (x + gate.unsqueeze(-1) * value.unsqueeze(-2)).to(hidden_states.dtype)
    if token_mask is not None:
        # x + 0 is not x for a negative zero.
        out = torch.where(token_mask[..., None, None], out, hidden_states)
    return out
