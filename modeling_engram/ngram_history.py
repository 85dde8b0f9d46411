"""The n-gram history: the last N - 1 tokens of every sequence, kept in Transformers' cache.

The history is the conv state of one "hybrid" cache layer (the first Engram layer's), as integers. Transformers then
reorders it for beams, rolls it back for assisted decoding, resets it, and keeps its address fixed in static caches.
"""

import torch
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
)

from ..tokenization.ngram_hashing import DEAD


class _HistoryCacheLayer(LinearAttentionAndFullAttentionLayer):
    """A "hybrid" cache layer whose batch operations cover the history too; Transformers' cover keys and values
    only."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        for index, state in self.conv_states.items():
            if state is not None:
                self.conv_states[index] = state.repeat_interleave(repeats, dim=0)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        for index, state in self.conv_states.items():
            if state is not None:
                self.conv_states[index] = state[indices]


def has_history(cache: Cache, layer_idx: int) -> bool:
    """Whether the cache holds the history of earlier tokens in layer `layer_idx`."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    return isinstance(layer, LinearAttentionCacheLayerMixin) and cache.has_previous_state(layer_idx, state_idx=0)


def extend_history(stream: torch.Tensor, cache: Cache | None, layer_idx: int, length: int) -> torch.Tensor:
    """Puts the history before `stream`, and `stream` into the history.

    Args:
        stream: int64 `[B, L]` from `encode_stream`.
        cache: the cache that holds the history, or None for a sequence that starts here.
        layer_idx: the cache layer that keeps the history (the first Engram layer's).
        length: N - 1, tokens of history.

    Returns:
        int64 `[B, length + L]`, `DEAD` where the sequence has no history.

    Raises:
        ValueError: the cache keeps no history, or holds tokens that were put there without one.
    """
    if cache is None:
        return F.pad(stream, (length, 0), value=DEAD)
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        raise ValueError(
            f"The {type(cache).__name__} passed to the model has no place for the n-gram history (its layer "
            f"{layer_idx} is {type(layer).__name__}): make it with the model's config, e.g. "
            "`DynamicCache(config=model.config)` or `StaticCache(config=model.config, max_cache_len=...)`."
        )
    if cache.has_previous_state(layer_idx, state_idx=0):
        extended = cache.update_conv_state(stream, layer_idx, state_idx=0, conv_kernel_size=length)
        # A cache that records the past for a rollback returns all of it.
        return extended[:, -(length + stream.shape[1]) :]
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"The cache holds {int(cache.get_seq_length())} tokens but not their n-gram history, since they were "
            "given as `inputs_embeds` without `input_ids`: give `input_ids`, or `use_cache=False`."
        )
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        layer.__class__ = _HistoryCacheLayer
    extended = F.pad(stream, (length, 0), value=DEAD)
    cache.update_conv_state(extended, layer_idx, state_idx=0, conv_kernel_size=length)
    return extended
