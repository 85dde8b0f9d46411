"""The compressor of DeepSeek-V4.1: m tokens to one latent.

    m = 1:  latent_j = rms(wkv x_j; norm)
    m > 1:  u = wkv x, a = wgate x, in fp32 until the norm; group j = tokens jm .. jm + m - 1 of a document
            latent_j = rms(sum_i softmax_i(a)_c * u_ic ; norm)            softmax over the m tokens, for each column c

Groups do not overlap. What a group that is still open consists of waits in the cache, in fp32.
"""

from typing import Any

import torch
from torch import nn

from .token_rows import TokenRows
from .v41_layers import DeepseekV41RMSNorm, Float32Linear


class DeepseekV41Compressor(nn.Module):
    """Of a KV source.

    Args:
        config ([`DeepseekV41TextConfig`]): sizes.
        ratio (`int`): m.
    """

    def __init__(self, config, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        linear = nn.Linear if ratio == 1 else Float32Linear
        self.kv_proj = linear(config.hidden_size, config.head_dim, bias=False)
        self.gate_proj = linear(config.hidden_size, config.head_dim, bias=False) if ratio > 1 else None
        self.kv_norm = DeepseekV41RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, rows: TokenRows, cache_layer: Any = None) -> torch.Tensor:
        """
        Args:
            x: `[B, L, D]`, live tokens first.
            rows: where they stand.
            cache_layer ([`CompressedCacheLayer`], *optional*): holds the open group.

        Returns:
            the latents `[B, N, d]` of the groups that close, in the order of `rows.groups[ratio].closing`.
        """
        groups, ratio = rows.groups[self.ratio], self.ratio
        if ratio == 1:
            return self.kv_norm(self.kv_proj(x[:, : groups.closing.shape[1]]))
        parts = torch.cat([self.kv_proj(x), self.gate_proj(x)], -1)
        if cache_layer is not None:
            full = cache_layer.open_parts(parts, ratio, rows)
        else:
            full = nn.functional.pad(parts, (0, 0, ratio - 1, 0))
        # Rows ahead of the new tokens; the group that closes with token i ends at row i + ahead.
        ahead = full.shape[1] - x.shape[1]
        members = groups.closing.unsqueeze(-1) + torch.arange(ahead - ratio + 1, ahead + 1, device=x.device)
        batch, count, _ = members.shape
        own = members.flatten(1).unsqueeze(-1).expand(-1, -1, full.shape[-1])
        values, gates = full.gather(1, own).view(batch, count, ratio, full.shape[-1]).chunk(2, -1)
        return self.kv_norm((gates.softmax(2) * values).sum(2).to(x.dtype))
