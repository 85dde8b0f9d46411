"""The n-gram history: what stands before every token of every sequence, kept in Transformers' cache.

One cache layer, that of the first Engram layer, keeps it beside its keys and values, whatever kind of cache that is:
the history makes its own place, so a config needs no layer types for it. Of every token it keeps the window that the
next token looks back on, not the token alone: so it is right also where tokens branch, and can be cut off anywhere.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, StaticLayer, StaticSlidingWindowLayer

from ..tokenization.ngram_hashing import DEAD


def make_history_class(layer_class: type[CacheLayerMixin]) -> type[CacheLayerMixin]:
    """The cache layer class that keeps the n-gram history beside the keys and values of `layer_class`: it is reordered
    for beams, rolled back, repeated and reset with them. It is not offloaded with them, since it is read before the
    layer is fetched again; where keys and values keep their addresses, it does, too."""
    is_static = issubclass(layer_class, StaticLayer)

    class HistoryLayer(layer_class):
        # int64 [B, N - 1, 1 + tokens]: column t is the window that stands before token t, oldest first, as
        # `encode_stream` gives it; so `DEAD` in column 0. Static layers have columns for all that they have room for.
        ngram_windows: torch.Tensor | None = None
        # The tokens that it was given, where its columns do not say.
        n_hashed_static: torch.Tensor | None = None
        # int64 []: the tokens before the first branch of a tree; None for no tree.
        trunk: torch.Tensor | None = None
        is_torn = False

        @property
        def n_hashed(self) -> int | torch.Tensor:
            """Tokens in the history."""
            if self.ngram_windows is None:
                return 0
            return self.n_hashed_static if is_static else self.ngram_windows.shape[-1] - 1

        def last_window(self) -> torch.Tensor:
            """int64 `[B, N - 1]`, which stands before the next token."""
            if is_static:
                return self.ngram_windows.index_select(-1, self.n_hashed_static).squeeze(-1)
            return self.ngram_windows[..., -1]

        def append_windows(self, windows: torch.Tensor) -> None:
            """Adds those that end at new tokens, int64 `[B, N - 1, L]`."""
            if not is_static:
                before = empty_window(windows) if self.ngram_windows is None else self.ngram_windows
                self.ngram_windows = torch.cat((before, windows), -1)
                return
            if self.ngram_windows is None:
                self.ngram_windows = windows.new_full((*windows.shape[:2], self.max_cache_len + 1), DEAD)
                self.n_hashed_static = windows.new_zeros(1)
                if not torch.compiler.is_compiling():
                    torch._dynamo.mark_static_address(self.ngram_windows)
                    torch._dynamo.mark_static_address(self.n_hashed_static)
            length = windows.shape[-1]
            columns = torch.arange(1, length + 1, device=windows.device) + self.n_hashed_static
            self.ngram_windows.index_copy_(-1, columns, windows)
            self.n_hashed_static.add_(length)

        def mark_branches(self, trunk: torch.Tensor) -> None:
            """Notes how many tokens, int64 `[]`, stand before the first branch of those that follow."""
            self.trunk = trunk if self.trunk is None else torch.minimum(self.trunk, trunk)

        def reset(self) -> None:
            layer_class.reset(self)
            self.trunk, self.is_torn = None, False
            if is_static and self.ngram_windows is not None:
                self.n_hashed_static.zero_()
            else:
                self.ngram_windows = None

        def crop(self, tokens_to_remove: int) -> None:
            length = self.get_seq_length()
            length = length.clone() if isinstance(length, torch.Tensor) else length
            layer_class.crop(self, tokens_to_remove)
            left = self.get_seq_length()
            if self.ngram_windows is None:
                return
            if is_static:
                self.n_hashed_static.sub_(length - left)
            else:
                self.ngram_windows = self.ngram_windows[..., : self.n_hashed + 1 - (length - left)]
            if self.trunk is not None and length != left:
                # Which branch the keys and values are of that are left, only the caller knows.
                self.is_torn = bool(self.trunk < left)
                self.trunk = self.trunk if self.is_torn else None

        def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
            layer_class.reorder_cache(self, beam_idx)
            if self.ngram_windows is not None:
                self.ngram_windows = self.ngram_windows.index_select(0, beam_idx.to(self.ngram_windows.device))

        def batch_repeat_interleave(self, repeats: int) -> None:
            layer_class.batch_repeat_interleave(self, repeats)
            if self.ngram_windows is not None:
                self.ngram_windows = self.ngram_windows.repeat_interleave(repeats, dim=0)

        def batch_select_indices(self, indices: torch.Tensor) -> None:
            layer_class.batch_select_indices(self, indices)
            if self.ngram_windows is not None:
                self.ngram_windows = self.ngram_windows[indices]

        def __reduce__(self):
            # The class is no module's attribute, by which pickle would find it.
            return _restore, (layer_class, vars(self))

    HistoryLayer.__name__ = f"{layer_class.__name__}WithHistory"
    return HistoryLayer


# Those of the usual caches are made here, since a compiler cannot make a class.
_classes = {layer_class: make_history_class(layer_class) for layer_class in (DynamicLayer, StaticLayer)}


def _restore(layer_class: type[CacheLayerMixin], state: dict[str, Any]) -> CacheLayerMixin:
    if layer_class not in _classes:
        _classes[layer_class] = make_history_class(layer_class)
    layer = object.__new__(_classes[layer_class])
    for name, value in state.items():
        setattr(layer, name, value)
    return layer


def history_layer(cache: Cache, layer_idx: int) -> CacheLayerMixin:
    """The cache's layer `layer_idx` (the first Engram layer's), as one that keeps the history (made so while empty).

    Raises:
        ValueError: it has no place for the history, or holds other tokens than the history.
    """
    while cache.layer_class_to_replicate is not None and len(cache.layers) <= layer_idx:
        cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[layer_idx] if layer_idx < len(cache.layers) else None
    known = isinstance(layer, (DynamicLayer, StaticLayer)) and not isinstance(layer, StaticSlidingWindowLayer)
    if not known:
        raise ValueError(
            f"The {type(cache).__name__} passed to the model has no place for the n-gram history (its layer "
            f"{layer_idx} is {type(layer).__name__}): make it with the model's config, e.g. "
            "`DynamicCache(config=model.config)` or `StaticCache(config=model.config, max_cache_len=...)`."
        )
    if not hasattr(layer, "ngram_windows"):
        # Not by assigning the class, which a compiler cannot.
        layer = cache.layers[layer_idx] = _restore(type(layer), vars(layer))
    return layer


def empty_window(like: torch.Tensor) -> torch.Tensor:
    """The window that stands before a sequence: int64 `[B, N - 1, 1]`, for `like` int64 `[B, N - 1, ...]`."""
    return like.new_full((*like.shape[:2], 1), DEAD)


def chain_windows(before: torch.Tensor, encoded: torch.Tensor) -> torch.Tensor:
    """The windows that end at each token of a chain.

    Args:
        before: int64 `[B, N - 1]`, the window that stands before the first.
        encoded: int64 `[B, L]`, tokens from `encode_stream`.

    Returns:
        int64 `[B, N - 1, L]`.
    """
    length = before.shape[1]
    return torch.cat((before, encoded), 1).unfold(1, length, 1)[:, 1:].transpose(1, 2)


def tree_windows(
    past: torch.Tensor, encoded: torch.Tensor, parents: torch.Tensor, past_length: int | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The windows along the branches of a tree: `window(t) = (window(parent(t)) without its oldest, t)`.

    Args:
        past: int64 `[B, N - 1, >= 1 + past_length]`, the windows before and after each cached token.
        encoded: int64 `[B, L]`, tokens from `encode_stream`.
        parents: int64 `[B, L]`, each below `past_length` + its own place; -1 for none.
        past_length: number of tokens in the cache.

    Returns:
        int64 `[B, N - 1, L]` twice: the windows that stand before each token, and those that end at it.
    """
    length = past.shape[1]
    # Of cached tokens the column after theirs; the new tokens' columns follow all of them.
    columns = torch.where(parents < past_length, parents + 1, parents - past_length + past.shape[-1])
    columns = columns.unsqueeze(1).expand(-1, length, -1)
    ending = F.pad(encoded.unsqueeze(1), (0, 0, length - 1, 0), value=DEAD)
    for _ in range(length):
        # Each time, one more entry of each is right.
        before = torch.cat((past, ending), -1).gather(-1, columns)
        ending = torch.cat((before[:, 1:], encoded.unsqueeze(1)), 1)
    return before, ending


def trunk_length(parents: torch.Tensor, past_length: int | torch.Tensor) -> torch.Tensor:
    """int64 `[]`: how many tokens stand before the first branch, where a token does not follow the one before it.

    Args:
        parents: int64 `[B, L]`, as `tree_windows` takes them.
        past_length: number of tokens in the cache.
    """
    places = torch.arange(parents.shape[1], device=parents.device) + past_length
    # Padding before a sequence is no branch.
    is_inside = F.pad(parents[:, :-1] >= 0, (1, 0)).cumsum(1) + past_length > 0
    branches = (parents != places - 1) & is_inside
    return torch.where(branches, parents + 1, torch.iinfo(torch.int64).max).amin()
