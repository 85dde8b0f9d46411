"""The attention of DeepSeek-V4.1 (CSA2): a window of own keys, and entries that some layers compress and share.

    qr = rms(wq_a x; q_norm)               q = wq_b qr as [n, d], last r columns rotated; no norm per head
    kv = rms(wkv x; kv_norm)  [d],         last r columns rotated, then rounded: key and value of all heads
    o  = sparse_attention over the window and the chosen entries           (`sparse_attention.py`)
    last r columns of o_h rotated back by the token's own angle
    z_g = wo_a[g] (heads of group g);      y = wo_b concat(z_g)

A KV source makes entries, latent_j (`compressor.py`) rotated at the group's first position and rounded, and index
keys; an index source chooses (`indexer.py`). Later layers read the entries of the nearest KV source before them, and
reuse the choice of the nearest index source. Each source publishes its own keys in every step, also in one that
closes no group: the reference's decoding scores another source's keys there, which its prefill, hence its training,
does not.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4GroupedLinear

from .cache_rounding import round_fp4_fine, round_fp8
from .compressed_cache import with_entries
from .compressor import DeepseekV41Compressor
from .indexer import DeepseekV41Indexer
from .sparse_attention import sparse_attention
from .token_rows import TokenRows, take
from .v41_layers import DeepseekV41RMSNorm, DeepseekV41RotaryEmbedding, KeepsFloat32, ReleasedLinear, rotate


class SharedGroups(NamedTuple):
    """What a layer's attention leaves to those after it.

    Attributes:
        entries: `[B, T, d]`, and index_keys: `[B, T, di]`, of the last KV source.
        choice: int64 `[B, L, k]`, of the last index source.
        candidates: bool `[B, L, blocks]`, of the candidate source.
    """

    entries: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    choice: torch.Tensor | None = None
    candidates: torch.Tensor | None = None


class DeepseekV41Attention(KeepsFloat32):
    """One layer's attention.

    Args:
        config ([`DeepseekV41TextConfig`]): sizes, and what the layer makes and reads.
        layer_idx (`int`): the layer.
    """

    _float32 = ("sinks",)

    def __init__(self, config, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.num_heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.window, self.rounds, self.o_groups = config.sliding_window, config.cache_rounding, config.o_groups
        self.ratio = config.compress_ratios[layer_idx]
        heads, eps, rounds = self.num_heads * self.head_dim, config.rms_norm_eps, config.activation_rounding

        self.q_a_proj = ReleasedLinear(config.hidden_size, config.q_lora_rank, rounds)
        self.q_a_norm = DeepseekV41RMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = ReleasedLinear(config.q_lora_rank, heads, rounds)
        self.kv_proj = ReleasedLinear(config.hidden_size, self.head_dim, rounds)
        self.kv_norm = DeepseekV41RMSNorm(self.head_dim, eps)
        self.o_a_proj = DeepseekV4GroupedLinear(
            heads // self.o_groups, self.o_groups * config.o_lora_rank, self.o_groups
        )
        self.o_b_proj = ReleasedLinear(self.o_groups * config.o_lora_rank, config.hidden_size, rounds)
        self.sinks = nn.Parameter(torch.zeros(self.num_heads, dtype=torch.float32))
        is_kv_source, is_index_source = (
            layer_idx in ids for ids in (config.kv_source_layer_ids, config.index_source_layer_ids)
        )
        self.compressor = DeepseekV41Compressor(config, self.ratio) if is_kv_source else None
        self.indexer = DeepseekV41Indexer(config, layer_idx) if is_index_source else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: TokenRows,
        rotary: DeepseekV41RotaryEmbedding,
        shared: SharedGroups,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, SharedGroups]:
        """
        Args:
            hidden_states: `[B, L, D]`, the normed input.
            rows: where the tokens stand.
            rotary: of this kind of layer.
            shared: what the layers before have left.
            cache: holds the tokens before, and gets these.

        Returns:
            the output `[B, L, D]`, and what is left to the layers after.
        """
        x = rows.compact(hidden_states)
        cos, sin = rotary(rows.positions)
        query_latents = self.q_a_norm(self.q_a_proj(x))
        queries = rotate(self.q_b_proj(query_latents).unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)
        keys = rotate(self.kv_norm(self.kv_proj(x)), cos, sin)
        keys = round_fp8(keys) if self.rounds else keys
        if cache is not None:
            own = keys.unsqueeze(1)
            keys = cache.update(own, own, self.layer_idx, rows=rows, window=self.window)[0].squeeze(1)
        else:
            keys = F.pad(keys, (0, 0, self.window - 1, 0))

        if self.compressor is not None:
            cache_layer = None if cache is None else cache.layers[self.layer_idx]
            entries, index_keys = self.compress(x, rows, rotary, cache_layer)
            shared = shared._replace(entries=entries, index_keys=index_keys)
        if self.indexer is not None:
            choice, candidates = self.indexer(
                x, query_latents, cos, sin, shared.index_keys, rows.groups[self.ratio], shared.candidates
            )
            shared = shared._replace(choice=choice, candidates=candidates)

        entries, choice = (shared.entries, shared.choice) if self.ratio else (None, None)
        heads = sparse_attention(queries, keys, rows.index, self.window, self.sinks, entries, choice)
        heads = rotate(heads, cos, -sin)
        latents = self.o_a_proj(heads.flatten(2).unflatten(-1, (self.o_groups, -1)))
        return rows.restore(self.o_b_proj(latents.flatten(2))), shared

    def compress(
        self, x: torch.Tensor, rows: TokenRows, rotary: DeepseekV41RotaryEmbedding, cache_layer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries `[B, T, d]` and index keys `[B, T, di]` of all groups that have closed."""
        groups = rows.groups[self.ratio]
        latents = self.compressor(x, rows, cache_layer)
        cos, sin = rotary(take(rows.positions, groups.closing) - (self.ratio - 1))
        entries = rotate(latents, cos, sin)
        entries = round_fp4_fine(entries) if self.rounds else entries
        index_keys = self.indexer.keys(latents, cos, sin)
        if cache_layer is not None:
            return cache_layer.add_entries(entries, index_keys, self.ratio, rows)
        return with_entries(None, entries, groups), with_entries(None, index_keys, groups)
