"""The cache of DeepSeek-V4.1: as Transformers' Cache, with layers of our own.

Per sequence and layer, with W the window, m the ratio, d and di the widths:

    every layer      the last W - 1 keys, which are the values, too          [W - 1, d]
    a KV source      the compressed entries of all closed groups             [T, d], T = floor(tokens / m)
                     their index keys                                        [T, di]
                     what the open group consists of so far (m > 1)          [m - 1, 2 d] in fp32

Later layers read the entries and keys of their source. All rows hold live tokens only, the newest at the right end,
see `token_rows.py`; so padding takes no room. The n-gram history makes its own place.

A window forgets, so a cache can be rolled back (`crop`) over tokens that it has recorded: from
`activate_past_recording` on, which assisted decoding calls, until the next `crop`, nothing is forgotten,
the open group's parts included.
"""

import torch
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer

from .token_rows import Groups, TokenRows


def shifted(rows: torch.Tensor, ends: torch.Tensor | int, keep: int) -> torch.Tensor:
    """Of `rows` `[B, K, D]` the `keep` rows before `ends`, int64 `[B]` or one for all; what lies before the first row
    is of no meaning."""
    if isinstance(ends, int):
        return rows[:, ends - keep : ends]
    columns = (ends.unsqueeze(1) - keep + torch.arange(keep, device=rows.device)).clamp_min(0)
    return rows.gather(1, columns.unsqueeze(-1).expand(-1, -1, rows.shape[-1]))


def with_entries(old: torch.Tensor | None, new: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The entries `[B, T, d]` of a source, old ones and new ones `[B, N, d]` in their slots."""
    batch, _, width = new.shape
    old = new.new_zeros(batch, 0, width) if old is None else old[:, : groups.capacity]
    room = new.new_zeros(batch, groups.capacity + 1 - old.shape[1], width)
    slots = groups.slots.unsqueeze(-1).expand_as(new)
    return torch.cat([old, room], 1).scatter(1, slots, new)[:, : groups.capacity]


class CompressedCacheLayer(DynamicLayer):
    """One decoder layer's part of the cache.

    Attributes:
        keys, values: one tensor `[B, 1, K, d]`, the window; K is W - 1, or more while the layer records.
        entries, index_keys: `[B, T, d]` and `[B, T, di]` of a KV source; else None.
        open_group: fp32 `[B, K', 2 d]` of a KV source with m > 1; K' is m - 1, or more while it records.
        counts: int64 `[B, R, 2 + ratios]`, see `token_rows.py`, after the last R columns; R is 1 unless it records.
    """

    is_sliding = True
    is_compileable = False
    is_croppable = True
    _TENSORS = ("keys", "values", "entries", "index_keys", "open_group", "counts")

    def __init__(self, **kwargs) -> None:
        super().__init__()
        self.records = False
        self._clear()

    def _clear(self) -> None:
        self.keys = self.values = self.entries = self.index_keys = self.open_group = self.counts = None
        self.window = self.ratio = self.ratio_place = 0
        self.length = 0
        self.is_initialized = False

    def activate_past_recording(self) -> None:
        """Forgets nothing from now on, until the next `crop`."""
        self.records = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def _append(self, old: torch.Tensor, new: torch.Tensor, size: int, rows: TokenRows) -> tuple[torch.Tensor, ...]:
        """All rows `[B, K + L, D]`, and those of them to be kept for a window of `size`."""
        full = torch.cat([old, new], 1)
        keep = full.shape[1] if self.records else size
        ends = full.shape[1] if rows.lengths is None else old.shape[1] + rows.lengths
        return full, shifted(full, ends, keep)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, rows: TokenRows | None = None, window: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes the keys of new tokens.

        Args:
            key_states, value_states: the same `[B, 1, L, d]`, live tokens first.
            rows: where they stand.
            window: W.

        Returns:
            twice the keys `[B, 1, K + L, d]`, those of the window before, at their right end, and the new ones.
        """
        if rows is None:
            raise ValueError(
                "This cache was made for DeepSeek-V4.1 (its config's `layer_types` say so): pass it to that model."
            )
        batch, _, length, width = key_states.shape
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.window = window
            self.keys = key_states.new_zeros(batch, 1, window - 1, width)
        full, kept = self._append(self.keys.squeeze(1), key_states.squeeze(1), window - 1, rows)
        self.keys = self.values = kept.unsqueeze(1)
        self.counts = torch.cat([self.counts, rows.counts], 1) if self.records and self.length else rows.counts
        if not self.records:
            self.counts = self.counts[:, -1:]
        self.length += length
        return full.unsqueeze(1), full.unsqueeze(1)

    def open_parts(self, parts: torch.Tensor, ratio: int, rows: TokenRows) -> torch.Tensor:
        """Takes the parts of new tokens' groups, fp32 `[B, L, 2 d]`; gives all that are here `[B, K' + L, 2 d]`."""
        if self.open_group is None:
            self.open_group = parts.new_zeros(parts.shape[0], ratio - 1, parts.shape[-1])
        full, self.open_group = self._append(self.open_group, parts, ratio - 1, rows)
        return full

    def add_entries(
        self, entries: torch.Tensor, index_keys: torch.Tensor, ratio: int, rows: TokenRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes new groups' entries `[B, N, d]` and keys `[B, N, di]`; gives all `[B, T, d]` and `[B, T, di]`."""
        groups = rows.groups[ratio]
        self.ratio, self.ratio_place = ratio, list(rows.groups).index(ratio)
        # Rows that have fewer may be all that is left, after a choice of rows or a rollback.
        self.entries = with_entries(self.entries, entries, groups)
        self.index_keys = with_entries(self.index_keys, index_keys, groups)
        return self.entries, self.index_keys

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last `-tokens_to_remove` columns, and what was recorded before them beyond the windows.

        Raises:
            ValueError: a positive number. RuntimeError: they were not recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"`crop` takes minus the number of tokens to remove, got {tokens_to_remove}.")
        removed = -tokens_to_remove
        if not self.is_initialized:
            return
        if removed >= self.length:
            self._clear()
            return
        if removed >= self.counts.shape[1]:
            raise RuntimeError(
                f"The cache cannot forget {removed} tokens: it recorded the last {self.counts.shape[1] - 1} only, and "
                "its windows have dropped what came before. Call `cache.activate_past_recording()` before the "
                "forwards that may be rolled back."
            )
        last = self.counts.shape[1] - 1 - removed
        gone = self.counts[:, -1, 0] - self.counts[:, last, 0]
        self.counts = self.counts[:, last : last + 1]
        self.length -= removed
        keys = self.keys.squeeze(1)
        self.keys = self.values = shifted(keys, keys.shape[1] - gone, self.window - 1).unsqueeze(1)
        if self.open_group is not None:
            self.open_group = shifted(self.open_group, self.open_group.shape[1] - gone, self.ratio - 1)
        if self.entries is not None:
            document, low = self.counts[:, 0, 1], self.counts[:, 0, 2 + self.ratio_place]
            capacity = int((low + document // self.ratio).amax())
            self.entries, self.index_keys = self.entries[:, :capacity], self.index_keys[:, :capacity]

    def _change_rows(self, change) -> None:
        for name in self._TENSORS:
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, change(tensor))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._change_rows(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._change_rows(lambda tensor: tensor[indices])

    def reset(self) -> None:
        self._clear()

    def offload(self) -> None:
        """Nothing: windows are small, and entries are read by other layers before this one is fetched again."""

    prefetch = offload


# By name, not by the class's `_layer_type`, which the class with an n-gram history would inherit.
DYNAMIC_LAYER_TYPE_MAPPING["deepseek_v41"] = CompressedCacheLayer


def prepare_cache(cache: Cache, num_layers: int) -> None:
    """Gives an empty cache without layers the model's; raises ValueError for a cache of another kind."""
    if not cache.layers:
        cache.layers.extend(CompressedCacheLayer() for _ in range(num_layers))
        cache.layer_class_to_replicate = None
    # By name: a model that was loaded from a Hub folder has another copy of the class.
    wrong = next((layer for layer in cache.layers if not hasattr(layer, "add_entries")), None)
    if wrong is not None or len(cache.layers) != num_layers:
        kind = type(cache.layers[0] if wrong is None else wrong).__name__
        raise ValueError(
            f"The {type(cache).__name__} passed to the model has {len(cache.layers)} layers of {kind}, which cannot "
            "hold DeepSeek-V4.1's windows and compressed entries: pass `DynamicCache(config=model.config)`, or none."
        )
