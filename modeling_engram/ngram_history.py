"""The n-gram history: the last N - 1 tokens of every sequence, kept in Transformers' cache.

The history is the conv state of one cache layer (the first Engram layer's, a "hybrid" one), as integers. Transformers
then reorders it for beams, rolls it back for assisted decoding, resets it, and keeps its address in static caches.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndStaticFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from ..tokenization.ngram_hashing import DEAD


@lru_cache
def with_history(layer_class: type[CacheLayerMixin]) -> type[CacheLayerMixin]:
    """The cache layer class that keeps the n-gram history beside the keys and values of `layer_class`.

    As Transformers' "hybrid" layers, but: batch operations cover the history; `crop` works at any time, since the
    history of every token is kept unless the layer's size is static; and it is not offloaded with keys and values,
    since it is read before the layer is fetched again.
    """

    class HistoryLayer(LinearAttentionLayer, layer_class):
        is_compileable = layer_class.is_compileable
        is_croppable = getattr(layer_class, "is_croppable", True)
        offload = layer_class.offload
        prefetch = layer_class.prefetch
        get_max_length = layer_class.get_max_length

        def lazy_initialization(self, *args, **kwargs) -> None:
            (layer_class if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

        def reset(self) -> None:
            LinearAttentionLayer.reset(self)
            layer_class.reset(self)

        def _select_history(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
            if self.conv_states[0] is not None:
                self.conv_states[0] = select(self.conv_states[0])

        def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
            self._select_history(lambda ids: ids.index_select(0, beam_idx.to(ids.device)))
            layer_class.reorder_cache(self, beam_idx)

        def crop(self, tokens_to_remove: int) -> None:
            if not self.record_past:
                return LinearAttentionLayer.crop(self, tokens_to_remove)  # raises
            length = self.get_seq_length()
            layer_class.crop(self, tokens_to_remove)
            removed = length - self.get_seq_length()
            if removed:
                self._select_history(lambda ids: ids[:, :-removed])

        def batch_repeat_interleave(self, repeats: int) -> None:
            self._select_history(lambda ids: ids.repeat_interleave(repeats, dim=0))
            layer_class.batch_repeat_interleave(self, repeats)

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            self._select_history(lambda ids: ids[indices])
            layer_class.batch_select_indices(self, indices)

        def __reduce__(self):
            # The class is no module's attribute, by which pickle would find it.
            return _restore, (layer_class, self.__dict__)

    HistoryLayer.__name__ = f"{layer_class.__name__}WithHistory"
    return HistoryLayer


def _restore(layer_class: type[CacheLayerMixin], state: dict[str, Any]) -> CacheLayerMixin:
    layer = object.__new__(with_history(layer_class))
    layer.__dict__.update(state)
    return layer


def make_place(cache: Cache, layer_idx: int) -> None:
    """Turns the cache's layer `layer_idx`, still empty, into one that keeps the history, if it is of a known kind."""
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer_idx:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx]
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        layer.__class__ = with_history(DynamicLayer)
    elif isinstance(layer, DynamicLayer) and not isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.__class__ = with_history(type(layer))
        LinearAttentionLayer.__init__(layer)
    elif type(layer) is LinearAttentionAndStaticFullAttentionLayer and cache.offloading:
        layer.__class__ = with_history(StaticLayer)
    if isinstance(layer, DynamicLayer) and isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.record_past = True


def has_history(cache: Cache, layer_idx: int) -> bool:
    """Whether the cache holds the history of earlier tokens in layer `layer_idx`."""
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    return isinstance(layer, LinearAttentionCacheLayerMixin) and cache.has_previous_state(layer_idx, state_idx=0)


def read_history(cache: Cache, layer_idx: int, length: int) -> torch.Tensor | None:
    """The last tokens that the cache has seen.

    Args:
        cache: the cache that holds the history, or has room for it.
        layer_idx: the cache layer that keeps the history (the first Engram layer's).
        length: N - 1, tokens of history.

    Returns:
        int64 `[B, length]` as `encode_stream` gives them, `DEAD` before the sequence; None where there are none yet.
        The cache may write its next tokens into this tensor.

    Raises:
        ValueError: the cache keeps no history, or holds tokens that were put there without one.
    """
    if has_history(cache, layer_idx):
        # A cache that records the past for a rollback holds all of it.
        return cache.layers[layer_idx].conv_states[0][:, -length:]
    seen = cache.get_seq_length()
    if seen == 0:
        make_place(cache, layer_idx)
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        raise ValueError(
            f"The {type(cache).__name__} passed to the model has no place for the n-gram history (its layer "
            f"{layer_idx} is {type(layer).__name__}): make it with the model's config, e.g. "
            "`DynamicCache(config=model.config)` or `StaticCache(config=model.config, max_cache_len=...)`."
        )
    if seen > 0:
        raise ValueError(
            f"The cache holds {int(seen)} tokens but not their n-gram history, since they were "
            "given as `inputs_embeds` without `input_ids`: give `input_ids`, or `use_cache=False`."
        )
    return None


def append_history(encoded: torch.Tensor, cache: Cache, layer_idx: int, length: int) -> None:
    """Puts tokens int64 `[B, L]` from `encode_stream` into the history that `read_history` found a place for."""
    if not has_history(cache, layer_idx):
        # The cache pads with 0, which is a token's id.
        encoded = F.pad(encoded, (length, 0), value=DEAD)
    cache.update_conv_state(encoded, layer_idx, state_idx=0, conv_kernel_size=length)
