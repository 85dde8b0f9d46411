"""The experts of DeepSeek-V4.1.

    s = sqrt(softplus(gate x))                                  in fp32
    chosen = the highest of s + bias; of tokens that are not text, of s + bias_vl
    weight_i = s_i / (sum of the chosen s + 1e-20) * routed_scaling_factor
    expert(x) = w2( silu(min(w1 x, lim)) * clamp(w3 x, -lim, lim) * weight )
    y = sum of the chosen experts, in fp32, + shared expert     the same clamps, weight 1

The weight comes before w2, which matters where the product is rounded. The bias only chooses; nothing trains it by
gradients.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .cache_rounding import round_fp8
from .v41_layers import KeepsFloat32, ReleasedLinear


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)` in fp32."""
    return F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)


class DeepseekV41Router(KeepsFloat32):
    """Chooses experts.

    Attributes:
        weight: `[E, D]`.
        e_score_correction_bias, e_score_correction_bias_vl: fp32 `[E]` buffers, for text and for other tokens.
    """

    _float32 = ("e_score_correction_bias", "e_score_correction_bias_vl")

    def __init__(self, config) -> None:
        super().__init__()
        self.top_k, self.scaling = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        for name in self._float32:
            self.register_buffer(name, torch.zeros(config.n_routed_experts, dtype=torch.float32))

    def forward(
        self, x: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            x: `[tokens, D]`. token_mask: bool `[tokens]`, False at tokens that are not text; None for all text.

        Returns:
            scores fp32 `[tokens, E]`, weights fp32 `[tokens, k]` and chosen experts int64 `[tokens, k]`.
        """
        scores = F.softplus(F.linear(x.float(), self.weight.float())).sqrt()
        bias = self.e_score_correction_bias
        if token_mask is not None:
            bias = torch.where(token_mask.unsqueeze(-1), bias, self.e_score_correction_bias_vl)
        chosen = (scores + bias).topk(self.top_k, -1).indices
        weights = scores.gather(-1, chosen)
        return scores, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling, chosen


class DeepseekV41Experts(nn.Module):
    """All routed experts; `gate_up_proj` `[E, 2 I, D]` holds w1, then w3, and `down_proj` `[E, D, I]` w2."""

    def __init__(self, config) -> None:
        super().__init__()
        self.limit, self.rounds = config.swiglu_limit, config.activation_rounding
        experts, width, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, width))
        self.down_proj = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """`x` `[tokens, D]` to fp32 `[tokens, D]`; weights and chosen experts `[tokens, k]` are the router's."""
        x = round_fp8(x) if self.rounds else x
        output = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        experts, order = chosen.flatten().sort(stable=True)
        counts = experts.bincount(minlength=len(self.down_proj)).tolist()
        tokens, weights = order // chosen.shape[1], weights.flatten()[order].unsqueeze(-1)
        at = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            own = tokens[at : at + count]
            gate, up = F.linear(x[own], self.gate_up_proj[expert]).chunk(2, -1)
            inner = (gated(gate, up, self.limit) * weights[at : at + count]).to(x.dtype)
            inner = round_fp8(inner) if self.rounds else inner
            output = output.index_add(0, own, F.linear(inner, self.down_proj[expert]).float())
            at += count
        return output


class DeepseekV41MLP(nn.Module):
    """The shared expert."""

    def __init__(self, config) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        width, inner, rounds = config.hidden_size, config.moe_intermediate_size, config.activation_rounding
        self.gate_proj = ReleasedLinear(width, inner, rounds)
        self.up_proj = ReleasedLinear(width, inner, rounds)
        self.down_proj = ReleasedLinear(inner, width, rounds)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., D]` to the same."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.limit).to(x.dtype))


class DeepseekV41MoE(nn.Module):
    """Router, routed experts and the shared one."""

    def __init__(self, config) -> None:
        super().__init__()
        self.gate = DeepseekV41Router(config)
        self.experts = DeepseekV41Experts(config)
        self.shared_experts = DeepseekV41MLP(config)

    def forward(self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, L, D]` to the same; `token_mask`, bool `[B, L]`, is False at tokens that are not text."""
        x = hidden_states.flatten(0, 1)
        _, weights, chosen = self.gate(x, None if token_mask is None else token_mask.flatten())
        output = self.experts(x, weights, chosen) + self.shared_experts(x)
        return output.to(hidden_states.dtype).view_as(hidden_states)
