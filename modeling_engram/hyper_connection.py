"""The tie between a sublayer and the multi-copy residual stream."""

import math
from collections.abc import Callable

import torch
from torch import nn

from .ops.residual_stream import stream_collapse, stream_expand, stream_mixes, stream_update


Mixes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Logit by which a copy prefers itself at the start: for 4 copies, 95 % of a copy stays its own.
SELF_LOGIT = 4.0


def collapse(stream: torch.Tensor, pre: torch.Tensor | None) -> torch.Tensor:
    """The vector that a sublayer reads: the stream `[B, L, H, D]` collapsed with the `pre` of the sublayer before it,
    or copy 0 where there is none (the first sublayer, and every one of a plain residual)."""
    return stream[:, :, 0] if pre is None else stream_collapse(stream, pre)


class HyperConnection(nn.Module):
    """Parameters by which one sublayer writes into the stream of H copies; with H = 1, a plain residual without any.

    At the start it mixes like an ordinary residual: `scale` is zero, so the mixing weights are those of `base`: `post`
    is one, `pre` is 1/H, and each copy keeps mostly to itself. The copies start equal; `fn` starts random, so that
    from the first step of `scale` on they differ.

    The parameters are kept in fp32 at least, whatever dtype the model is cast to: their products go through
    exponentials and 20 rounds of normalisation.

    Args:
        config ([`EngramConfig`]): sizes and constants.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.hc_mult = config.hc_mult
        self.norm_eps = config.rms_norm_eps
        self.hc_eps = config.hc_eps
        self.sinkhorn_iters = config.hc_sinkhorn_iters
        if self.hc_mult > 1:
            n_mixes = (2 + self.hc_mult) * self.hc_mult
            self.fn = nn.Parameter(torch.empty(n_mixes, self.hc_mult * config.hidden_size, dtype=torch.float32))
            self.base = nn.Parameter(torch.empty(n_mixes, dtype=torch.float32))
            self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def initial_base(self) -> torch.Tensor:
        """fp32 `[(2 + H) * H]` on CPU: the `base` at which the stream behaves like an ordinary residual."""
        share = 1 / self.hc_mult - self.hc_eps
        pre = torch.full((self.hc_mult,), math.log(share / (1 - share)), dtype=torch.float32, device="cpu")
        comb = SELF_LOGIT * torch.eye(self.hc_mult, dtype=torch.float32, device="cpu")
        return torch.cat([pre, torch.zeros_like(pre), comb.flatten()])

    def forward(self, stream: torch.Tensor) -> Mixes | None:
        """The mixing weights (`pre`, `post`, `comb`) from the stream `[B, L, H, D]` that enters the sublayer."""
        if self.hc_mult == 1:
            return None
        return stream_mixes(stream, self.fn, self.scale, self.base, self.norm_eps, self.hc_eps, self.sinkhorn_iters)

    @staticmethod
    def expand(
        hidden_states: torch.Tensor, stream: torch.Tensor, mixes: Mixes | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Writes a sublayer's output `[B, L, D]` into the stream that entered it.

        Returns:
            the stream `[B, L, H, D]`, and the `pre` with which the next sublayer collapses it.
        """
        if mixes is None:
            return stream + hidden_states.unsqueeze(2), None
        pre, post, comb = mixes
        return stream_expand(hidden_states, stream, post, comb), pre

    @staticmethod
    def expand_and_collapse(
        hidden_states: torch.Tensor, stream: torch.Tensor, mixes: Mixes | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """`expand`, and `collapse` of the result, in one pass over the stream.

        Returns:
            the vector `[B, L, D]` that the next sublayer reads, the stream `[B, L, H, D]`, and the `pre` between them.
        """
        if mixes is None:
            stream = stream + hidden_states.unsqueeze(2)
            return stream[:, :, 0], stream, None
        pre, post, comb = mixes
        stream, hidden_states = stream_update(hidden_states, stream, post, comb, pre)
        return hidden_states, stream, pre

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True):
        def keep_precision(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if torch.finfo(moved.dtype).bits < 32:
                return tensor.to(moved.device, torch.float32)
            return moved

        return super()._apply(keep_precision, recurse)
