"""Norm, linears and rotary embedding of DeepSeek-V4.1.

    rms(x; w) = w * x / sqrt(mean(x^2) + eps)                                         in fp32, cast once

Neighbouring columns (2i, 2i + 1) of the last r columns are a pair that is turned by position * f_i:

    f_i = theta^(-2i/r)
    with YaRN:  c(x) = r ln(L0 / (2 pi x)) / (2 ln theta), lo = max(floor c(beta_fast), 0),
                hi = min(ceil c(beta_slow), r - 1), ramp_i = clamp((i - lo) / max(hi - lo, 0.001), 0, 1),
                f_i -> f_i (1 - ramp_i) + f_i / factor * ramp_i

at every length alike, and without a factor on cosines or scores. Layers without compressed entries turn by
`rope_theta` plainly, the others by `compress_rope_theta` with YaRN.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.deepseek_v4.modeling_deepseek_v4 import apply_rotary_pos_emb

from .cache_rounding import round_fp8


class DeepseekV41RMSNorm(nn.Module):
    """RMSNorm whose weight is multiplied in fp32, before the one cast."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[..., size]` to the same."""
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * x).to(hidden_states.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class KeepsFloat32(nn.Module):
    """A module that keeps some of its own tensors in fp32 at least, whatever dtype it is cast to."""

    _float32: tuple[str, ...] = ()

    def _apply(self, fn, recurse: bool = True):
        before = {name: getattr(self, name).detach() for name in self._float32}
        module = super()._apply(fn, recurse)
        for name, tensor in before.items():
            own = getattr(self, name)
            if torch.finfo(own.dtype).bits < 32:
                own.data = tensor.to(own.device, torch.float32)
        return module


class Float32Linear(nn.Linear):
    """A linear without bias that computes in fp32 and returns fp32, whatever its weight is stored in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), self.weight.float())


class ReleasedLinear(nn.Linear):
    """A linear without bias whose released weight is fp8; with `rounds` it rounds its input to fp8, as there."""

    def __init__(self, in_features: int, out_features: int, rounds: bool) -> None:
        super().__init__(in_features, out_features, bias=False)
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(round_fp8(x) if self.rounds else x)


def inverse_frequencies(size: int, theta: float, scaling: dict | None = None) -> torch.Tensor:
    """fp32 `[size / 2]` on CPU; `scaling` is the config's `rope_scaling`."""
    frequencies = 1.0 / theta ** (torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size)
    if scaling is None:
        return frequencies

    def column(turns: float) -> float:
        length = scaling["original_max_position_embeddings"]
        return size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(column(scaling["beta_fast"])), 0)
    high = min(math.ceil(column(scaling["beta_slow"])), size - 1)
    steps = torch.arange(size // 2, dtype=torch.float32, device="cpu")
    smooth = 1 - ((steps - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies / scaling["factor"] * (1 - smooth) + frequencies * smooth


class DeepseekV41RotaryEmbedding(KeepsFloat32):
    """Cosines and sines of one kind of layer."""

    _float32 = ("inv_freq",)

    def __init__(self, config, compressed: bool) -> None:
        super().__init__()
        self.config, self.compressed = config, compressed
        self.register_buffer("inv_freq", self.frequencies(), persistent=False)

    def frequencies(self) -> torch.Tensor:
        """What `inv_freq` holds: fp32 `[qk_rope_head_dim / 2]` on CPU."""
        config = self.config
        if not self.compressed:
            return inverse_frequencies(config.qk_rope_head_dim, config.rope_theta)
        return inverse_frequencies(config.qk_rope_head_dim, config.compress_rope_theta, config.rope_scaling)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Integer positions `[B, L]` to cosines and sines, fp32 `[B, L, qk_rope_head_dim / 2]`."""
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turns the last columns of `x`, `[B, L, d]` or `[B, L, heads, d]`; with `-sin`, back."""
    if x.ndim == 4:
        return apply_rotary_pos_emb(x, cos, sin, unsqueeze_dim=2)
    return apply_rotary_pos_emb(x.unsqueeze(2), cos, sin, unsqueeze_dim=2).squeeze(2)
