"""The indexer of DeepSeek-V4.1: which groups a token attends to.

    key_j    = rms(wk latent_j; k_norm)                        then rotated at the group's first position, rounded
    query    = wq_b qr as [heads, di]                          then rotated, rounded
    w        = weights_proj x * di^-1/2 * heads^-1/2
    score_tj = sum_h w_h * relu(<query_h, key_j>)              -inf where t may not see j
    choice_t = the k highest j, ascending; -1 in the places that are left over

An index source that is no KV source scores the keys of the nearest KV source before it. One layer's indexer also keeps
*candidates*: of blocks of consecutive groups, each worth the maximum of its scores, the best few, and always that of
the newest visible group. Its own choice is not restricted; those of later index sources are, to groups of these
blocks.
"""

import torch
from torch import nn
from torch.nn import functional as F

from .cache_rounding import round_fp4
from .token_rows import Groups
from .v41_layers import DeepseekV41RMSNorm, ReleasedLinear, rotate


# Products of queries and keys that are held at a time.
PRODUCTS_AT_A_TIME = 2**24


class DeepseekV41Indexer(nn.Module):
    """Of an index source.

    Args:
        config ([`DeepseekV41TextConfig`]): sizes.
        layer_idx (`int`): the layer; tells whether it makes keys, and candidates.
    """

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = config.index_n_heads, config.index_head_dim
        self.topk = config.index_topk
        self.rounds = config.cache_rounding
        self.block_size, self.topk_blocks = config.candidate_block_size, config.candidate_topk_blocks
        candidate_source = config.candidate_source_layer_id
        self.makes_candidates = layer_idx == candidate_source
        self.is_restricted = candidate_source is not None and layer_idx > candidate_source
        self.q_b_proj = ReleasedLinear(
            config.q_lora_rank, self.num_heads * self.head_dim, rounds=config.activation_rounding
        )
        self.weights_proj = nn.Linear(config.hidden_size, self.num_heads, bias=False)
        self.k_proj = self.k_norm = None
        if layer_idx in config.kv_source_layer_ids:
            self.k_proj = nn.Linear(config.head_dim, self.head_dim, bias=False)
            self.k_norm = DeepseekV41RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys(self, latents: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Latents `[B, N, d]` before rotation to index keys `[B, N, di]`."""
        keys = rotate(self.k_norm(self.k_proj(latents)), cos, sin)
        return round_fp4(keys) if self.rounds else keys

    @torch.no_grad()
    def forward(
        self,
        x: torch.Tensor,
        query_latents: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        groups: Groups,
        candidates: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Args:
            x: `[B, L, D]`. query_latents: `[B, L, q_lora_rank]`.
            cos, sin: of the tokens.
            keys: `[B, T, di]` of all slots.
            groups: what each token may see.
            candidates: bool `[B, L, blocks]` of the candidate source; None before it.

        Returns:
            the choice, int64 `[B, L, min(k, T)]`, and the candidates.
        """
        batch, length, _ = x.shape
        slots = keys.shape[1]
        queries = rotate(self.q_b_proj(query_latents).view(batch, length, self.num_heads, self.head_dim), cos, sin)
        queries = round_fp4(queries) if self.rounds else queries
        weights = self.weights_proj(x) * (self.head_dim**-0.5 * self.num_heads**-0.5)
        choices, kept = [], []
        step = max(1, PRODUCTS_AT_A_TIME // max(batch * self.num_heads * slots, 1))
        for at in range(0, length, step):
            part = slice(at, at + step)
            low, high = groups.low[:, part, None], groups.high[:, part, None]
            # Beyond what the chunk can see there is nothing to score.
            reach = slots if step >= length else int(high.amax())
            scores = self.scores(queries[:, part], weights[:, part], keys[:, :reach])
            slot = torch.arange(reach, device=x.device)
            scores = scores.masked_fill((slot < low) | (slot >= high), -torch.inf)
            if self.makes_candidates:
                blocks = self.best_blocks(scores, high)
                kept.append(F.pad(blocks, (0, -(-slots // self.block_size) - blocks.shape[-1])))
            elif self.is_restricted:
                allowed = candidates[:, part].repeat_interleave(self.block_size, -1)[..., :reach]
                scores = scores.masked_fill(~allowed, -torch.inf)
            best = scores.topk(min(self.topk, reach), -1)
            # Ascending, with empty places at the end.
            choice = best.indices.masked_fill(best.values == -torch.inf, slots).sort(-1).values
            choice = choice.masked_fill(choice == slots, -1)
            choices.append(F.pad(choice, (0, min(self.topk, slots) - choice.shape[-1]), value=-1))
        if self.makes_candidates:
            candidates = torch.cat(kept, 1)
        return torch.cat(choices, 1), candidates

    @staticmethod
    def scores(queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """`[B, Q, heads, di]`, `[B, Q, heads]`, `[B, T, di]` to `[B, Q, T]`; each step in the model's dtype."""
        batch, length, heads, _ = queries.shape
        products = (queries.flatten(1, 2) @ keys.transpose(1, 2)).view(batch, length, heads, keys.shape[1])
        return (F.relu(products) * weights.unsqueeze(-1)).sum(2)

    def best_blocks(self, scores: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        """bool `[B, Q, blocks]` of scores `[B, Q, T]`, -inf where a group cannot be seen; `high` `[B, Q, 1]`."""
        count = -(-scores.shape[-1] // self.block_size)
        padded = F.pad(scores, (0, count * self.block_size - scores.shape[-1]), value=-torch.inf)
        blocks = padded.unflatten(-1, (count, self.block_size)).amax(-1)
        reachable = blocks > -torch.inf
        newest = torch.arange(count, device=blocks.device) == (high - 1) // self.block_size
        best = blocks.masked_fill(newest, torch.inf).topk(min(self.topk_blocks, count), -1).indices
        return torch.zeros_like(reachable).scatter(-1, best, True) & reachable
