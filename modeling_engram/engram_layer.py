"""The Engram layer: table rows to keys and a value, written into the residual stream through a gate."""

import torch
from torch import nn

from .ops.engram_gate import engram_gate, gate_and_value


class EngramLayer(nn.Module):
    """Writes an n-gram lookup into the residual stream.

    `wkv` turns the rows of a token's n-grams into one key per copy of the stream and one value; the value is added to
    every copy, gated by how well the key matches it. Tables start at zero, so a fresh layer changes nothing: its first
    gradient reaches the tables, and from the second step on `wkv`.

    Args:
        config ([`EngramConfig`]): sizes.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.hc_mult = config.hc_mult
        self.eps = config.rms_norm_eps
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.wkv = nn.Linear(columns * config.engram_head_dim, (self.hc_mult + 1) * self.hidden_size, bias=False)
        self.q_weight = nn.Parameter(torch.ones(self.hc_mult, self.hidden_size))
        self.k_weight = nn.Parameter(torch.ones(self.hc_mult, self.hidden_size))

    def forward(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: the stream, `[B, L, H, D]`.
            embeddings: the fetched rows, `[B, L, C * engram_head_dim]`.
            token_mask: bool `[B, L]` or None; where False, the stream passes through bit for bit.

        Returns:
            the stream, `[B, L, H, D]`, in its dtype.
        """
        # Not the weight's dtype, which is int8 where it is quantised.
        kv = self.wkv(embeddings.to(hidden_states.dtype))
        return engram_gate(hidden_states, kv, self.q_weight, self.k_weight, token_mask, eps=self.eps)

    def read(
        self, hidden_states: torch.Tensor, embeddings: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `forward` adds to the stream, in its parts: arguments as there.

        Returns:
            keys `[B, L, H, D]` and values `[B, L, D]` in the stream's dtype, and gates `[B, L, H]` in fp32, zero where
            `token_mask` is False. To copy h of the stream, `forward` adds `gates[..., h, None] * values`.
        """
        kv = self.wkv(embeddings.to(hidden_states.dtype))
        keys, values = kv.split([self.hc_mult * self.hidden_size, self.hidden_size], dim=-1)
        gates, _ = gate_and_value(hidden_states, kv, self.q_weight, self.k_weight, self.eps)
        if token_mask is not None:
            gates = gates.masked_fill(~token_mask.unsqueeze(-1), 0)
        return keys.unflatten(-1, (self.hc_mult, self.hidden_size)), values, gates
