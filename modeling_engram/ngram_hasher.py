"""The model's own hasher: token ids to table rows, with constants that are saved with the model."""

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache, CacheLayerMixin

from ..tokenization.ngram_hashing import DEAD, build_multipliers, encode_stream
from ..tokenization.token_map import token_map_sha256
from .live_tokens import assert_holds
from .ngram_history import chain_windows, history_layer, tree_windows, trunk_length
from .ops.ngram_hash import ngram_hash


# In the token map, an id whose compressed id is not known yet.
UNBOUND = -1


class NgramHasher(nn.Module):
    """Token ids to the row ids of every Engram layer.

    Its constants are persistent buffers, so that a saved model hashes without a tokenizer:

    - `token_map` int32 `[vocab_size]`: compressed id of every token id;
    - `pad_token_id` int64 `[]`: the token id that stands where a window has no token;
    - `multipliers` int64 `[n_layers, N]`, `primes` and `offsets` int64 `[n_layers, N - 1, K]`.

    Args:
        config ([`EngramConfig`]): layout, compressed vocabulary size, and digest of the token map.
    """

    def __init__(self, config) -> None:
        super().__init__()
        self.config = config
        # Set by `check`: whether the buffers were compared with the config, and the compressed pad id.
        self.is_checked = False
        self.pad_id = UNBOUND
        for name, value in self.constants().items():
            self.register_buffer(name, value)

    def constants(self, device: torch.device | str | None = None) -> dict[str, torch.Tensor]:
        """What the buffers hold before a tokenizer is bound: the layout's numbers, and as token map the identity if
        the config asks for no other, else `UNBOUND` everywhere."""
        config = self.config
        layout = config.layout()
        multipliers = build_multipliers(
            tuple(config.engram_layer_ids), config.engram_compressed_vocab_size, config.engram_max_ngram_size
        )
        if self._is_identity:
            token_map = torch.arange(config.vocab_size, dtype=torch.int32, device=device)
        else:
            token_map = torch.full((config.vocab_size,), UNBOUND, dtype=torch.int32, device=device)
        return {
            "token_map": token_map,
            "pad_token_id": torch.tensor(config.engram_pad_token_id, dtype=torch.int64, device=device),
            "multipliers": torch.tensor(multipliers.tolist(), dtype=torch.int64, device=device),
            "primes": torch.tensor(layout.primes.tolist(), dtype=torch.int64, device=device),
            "offsets": torch.tensor(layout.offsets.tolist(), dtype=torch.int64, device=device),
        }

    @property
    def is_bound(self) -> bool:
        """Whether a token map is installed: a tokenizer's, or the identity of a config that asks for no other."""
        return not self.token_map.is_meta and bool((self.token_map != UNBOUND).any())

    def bind_token_map(self, token_map: np.ndarray) -> None:
        """Installs a tokenizer's map, and its size and digest in the config; ids from `len(token_map)` on, which the
        tokenizer never gives, hash as the pad token.

        Args:
            token_map: int `[len(tokenizer)]`, compressed ids.

        Raises:
            ValueError: not the map that the config names, longer than the vocabulary, or an id beyond the compressed
                vocabulary. Nothing is changed.
        """
        config = self.config
        token_map = np.asarray(token_map)
        if token_map.ndim != 1 or token_map.size == 0 or not np.issubdtype(token_map.dtype, np.integer):
            raise ValueError(
                f"`token_map` must hold one integer for every token id, got {token_map.dtype} of the shape "
                f"{list(token_map.shape)}: pass `tokenizer.token_map`."
            )
        sha256, known = token_map_sha256(token_map), token_map[: config.engram_token_map_size]
        if config.engram_token_map_sha256 is not None and (
            len(known) < config.engram_token_map_size or token_map_sha256(known) != config.engram_token_map_sha256
        ):
            raise ValueError(
                f"The tokenizer's token map ({len(token_map)} ids, sha256 {sha256}) is not the model's "
                f"({config.engram_token_map_size} ids, sha256 {config.engram_token_map_sha256}): it is another "
                "tokenizer, and every hash would be wrong. Bind the one that the model was made with."
            )
        if len(token_map) > config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(token_map)} tokens, more than the model's `vocab_size` "
                f"({config.vocab_size}): it is another model's, or tokens were added to it. In that case call "
                "`model.resize_token_embeddings(len(tokenizer))` first."
            )
        if config.engram_pad_token_id >= len(token_map):
            raise ValueError(
                f"The model's `engram_pad_token_id` is {config.engram_pad_token_id}, but the tokenizer's ids end at "
                f"{len(token_map) - 1}: build the config with `**tokenizer.engram_fields()`."
            )
        lowest, highest = int(token_map.min()), int(token_map.max())
        if lowest < 0 or highest >= config.engram_compressed_vocab_size:
            raise ValueError(
                f"The tokenizer's map holds compressed ids from {lowest} to {highest}, outside [0, "
                f"{config.engram_compressed_vocab_size}), the config's `engram_compressed_vocab_size`: build the "
                "config with `**tokenizer.engram_fields()`."
            )
        self._check_constants()
        full = np.full(config.vocab_size, token_map[config.engram_pad_token_id], dtype=np.int32)
        full[: len(token_map)] = token_map
        self.token_map = torch.from_numpy(full).to(self.token_map.device)
        config.engram_token_map_size, config.engram_token_map_sha256 = len(token_map), sha256
        self.check()

    def resized_token_map(self, n_tokens: int, vocab_size: int) -> torch.Tensor:
        """The token map for another vocabulary size: shorter, or with a new compressed id for every new token. What is
        new from `n_tokens` on is padding, which no tokenizer gives, and hashes as the pad token.

        Raises:
            ValueError: no compressed ids are left. Their number sets the hash's multipliers, so with one more, every
                row of the tables would be another n-gram's.
        """
        token_map, config = self.token_map, self.config
        if not self.is_bound and vocab_size < (config.engram_token_map_size or 0):
            raise ValueError(
                f"`new_num_tokens` ({vocab_size}) drops tokens of the tokenizer that the config was made from (it has "
                f"{config.engram_token_map_size}), and the model has no token map yet: call "
                "`model.bind_tokenizer(tokenizer)` first."
            )
        if vocab_size <= len(token_map):
            return token_map[:vocab_size].clone()
        full = torch.full((vocab_size,), UNBOUND, dtype=torch.int32, device=token_map.device)
        full[: len(token_map)] = token_map
        if not self.is_bound:
            return full
        n_new = max(n_tokens - len(token_map), 0)
        first = int(token_map.max()) + 1
        limit = config.engram_compressed_vocab_size
        if first + n_new > limit:
            raise ValueError(
                f"{n_new} new tokens need new compressed ids, but `engram_compressed_vocab_size` ({limit}) leaves "
                f"{limit - first}: it fixes the hash that the tables are addressed by. Add the tokens before the "
                "model is made, or make tokenizer and config with a larger `engram_compressed_vocab_size` (and "
                "`vocab_size`) to leave room. Rows that are no tokens need none: `pad_to_multiple_of`."
            )
        full[len(token_map) : len(token_map) + n_new] = torch.arange(first, first + n_new)
        full[len(token_map) + n_new :] = token_map[config.engram_pad_token_id]
        return full

    def resize_token_map(self, token_map: torch.Tensor) -> None:
        """Installs what [`resized_token_map`] has given, once the config has its `vocab_size`. Of it, the config knows
        by size and digest what it knew before, or the part of it that is left."""
        config, is_bound = self.config, self.is_bound
        size = min(config.engram_token_map_size or len(self.token_map), len(token_map))
        self.token_map, self.is_checked = token_map, False
        if is_bound and not self._is_identity:
            config.engram_token_map_size = size
            config.engram_token_map_sha256 = token_map_sha256(token_map[:size].cpu().numpy())

    def check(self, may_be_unbound: bool = False) -> None:
        """Compares the buffers with the config: once, after they were set or loaded.

        Args:
            may_be_unbound: whether there may be no token map: a model may be saved before a tokenizer is bound to it.

        Raises:
            ValueError: no token map is bound, or a buffer does not belong to the config; hashes would be wrong.
        """
        self._check_constants()
        token_map = self.token_map.cpu().numpy()
        if not may_be_unbound or (token_map != UNBOUND).any() or self._is_identity:
            self._check_token_map(token_map)
            self.pad_id = int(token_map[self.config.engram_pad_token_id])
            self.is_checked = True

    @property
    def _is_identity(self) -> bool:
        """Whether the config asks for no tokenizer's map, but for a compressed id of its own for every token id."""
        config = self.config
        return config.engram_token_map_sha256 is None and config.engram_compressed_vocab_size == config.vocab_size

    def _check_constants(self) -> None:
        for name, expected in self.constants(device="cpu").items():
            buffer = getattr(self, name)
            if buffer.shape != expected.shape or buffer.dtype != expected.dtype:
                raise ValueError(
                    f"The hash constant `{name}` of this checkpoint is {buffer.dtype} of the shape "
                    f"{tuple(buffer.shape)}, its config asks for {expected.dtype} of {tuple(expected.shape)}: restore "
                    "the config.json that it was saved with."
                )
            if name != "token_map" and not torch.equal(buffer.cpu(), expected):
                raise ValueError(
                    f"The hash constant `{name}` of this checkpoint is not that of its config: an `engram_*` field "
                    "was changed after the tables were made. Restore the config.json that it was saved with."
                )

    def _check_token_map(self, token_map: np.ndarray) -> None:
        """Raises unless every entry of the map, int32 `[vocab_size]`, is what the config says or follows from it."""
        config = self.config
        remedy = "the weights file is damaged, or config.json is another model's. Restore both as they were saved."
        if (token_map == UNBOUND).all() and not self._is_identity:
            raise ValueError(
                "The model has no token map yet, so it cannot hash token ids: call `model.bind_tokenizer(tokenizer)` "
                "with the EngramTokenizer that its config was made from."
            )
        outside = (token_map < 0) | (token_map >= config.engram_compressed_vocab_size)
        if outside.any():
            token_id = int(outside.argmax())
            raise ValueError(
                f"The token map gives token {token_id} the compressed id {token_map[token_id]}, outside [0, "
                f"{config.engram_compressed_vocab_size}): {remedy}"
            )
        if config.engram_token_map_sha256 is None:
            if not (self._is_identity and np.array_equal(token_map, np.arange(config.vocab_size))):
                raise ValueError(
                    "The weights hold a token map, but the config has no `engram_token_map_sha256` to know it by: "
                    f"{remedy}"
                )
            return
        size = config.engram_token_map_size
        digest = token_map_sha256(token_map[:size])
        if digest != config.engram_token_map_sha256:
            raise ValueError(
                f"The token map's sha256 is {digest}, but the config's `engram_token_map_sha256` is "
                f"{config.engram_token_map_sha256}: {remedy}"
            )
        # Beyond the tokenizer's ids there are padding, and tokens that `resize_token_embeddings` has made.
        rest, first = token_map[size:], int(token_map[:size].max()) + 1
        new = rest[rest != token_map[config.engram_pad_token_id]]
        if not np.array_equal(new, np.arange(first, first + len(new))):
            raise ValueError(
                f"The token map's entries from {size} on, where the tokenizer has no tokens, are neither the pad "
                f"token's compressed id nor new ones in ascending order: {remedy}"
            )

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.is_checked = False
        super()._load_from_state_dict(*args, **kwargs)

    def forward(
        self,
        input_ids: torch.Tensor,
        dead: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        parents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hashes the window that ends at each token, and moves the cache's n-gram history on.

        Args:
            input_ids: integer `[B, L]`, checked by the caller.
            dead: bool `[B, L]` or None, True where a token is padding, masked, or not text.
            position_ids: integer `[B or 1, L]` or None; where they restart, a packed document begins.
            cache: holds the history of the tokens before, and gets these; None for a whole sequence.
            parents: int64 `[B, L]` or None: the place (cached tokens counted) of the token that each one follows, -1
                for none, see `parents_by_visibility`; then `position_ids` begin no documents. None for the token
                before.

        Returns:
            int64 `[B, L, n_layers, C]`, row ids inside each layer's table.

        Raises:
            ValueError: tokens from the middle of a sequence, without the history of those before (a RuntimeError
                where it is asserted on the device).
        """
        if not self.is_checked:
            self.check()
        length = self.config.engram_max_ngram_size - 1
        layer = None if cache is None else self._history(cache)
        seen = 0 if layer is None else layer.get_seq_length()
        if position_ids is not None:
            self._check_positions(input_ids, dead, position_ids, seen, parents is not None)
        constants = self.token_map, self.pad_id, self.multipliers, self.primes, self.offsets
        if parents is None:
            history = None if layer is None or layer.ngram_windows is None else layer.last_window()
            hash_ids, encoded = ngram_hash(input_ids, *constants, dead, position_ids, history)
            if layer is not None:
                history = encoded.new_full((len(encoded), length), DEAD) if history is None else history
                layer.append_windows(chain_windows(history, encoded))
            return hash_ids
        encoded = encode_stream(self.token_map[input_ids].long(), dead)
        past = None if layer is None else layer.ngram_windows
        past = encoded.new_full((len(encoded), length, 1), DEAD) if past is None else past
        before, ending = tree_windows(past, encoded, parents, seen)
        # Each token with its history, as if it were a sequence of its own.
        hash_ids, _ = ngram_hash(
            input_ids.reshape(-1, 1),
            *constants,
            None if dead is None else dead.reshape(-1, 1),
            history=before.transpose(1, 2).reshape(-1, length),
        )
        if layer is not None:
            layer.append_windows(ending)
            layer.mark_branches(trunk_length(parents, seen))
        return hash_ids.view(*input_ids.shape, *hash_ids.shape[2:])

    def has_history(self, cache: Cache) -> bool:
        """Whether the cache holds the history of earlier tokens."""
        return bool(history_layer(cache, self.config.engram_layer_ids[0]).n_hashed)

    def _history(self, cache: Cache) -> CacheLayerMixin:
        """The cache layer that keeps the history, which is that of the tokens in the cache."""
        layer = history_layer(cache, self.config.engram_layer_ids[0])
        if layer.is_torn:
            raise ValueError(
                f"The cache was cropped to {int(layer.get_seq_length())} tokens, but from token {int(layer.trunk)} on "
                "it held branches, as a 4-D `attention_mask` had them, and which of them its keys and values are of "
                f"now is unknown: crop it to {int(layer.trunk)} tokens or fewer, and give the tokens that were kept "
                "once more."
            )
        seen, n_hashed = layer.get_seq_length(), layer.n_hashed
        message = (
            "The cache holds {} tokens, but the n-gram history of {}: tokens were given as `inputs_embeds` without "
            "`input_ids`, or keys and values were put in or taken out by other means than `crop`, `reorder_cache` or "
            "`reset`. Give `input_ids` from the start of the sequence, on a new cache or with `use_cache=False`."
        )
        if isinstance(seen, torch.Tensor) or isinstance(n_hashed, torch.Tensor):
            assert_holds(torch.as_tensor(seen == n_hashed), message.format("other", "other tokens"))
        elif seen != n_hashed:
            raise ValueError(message.format(seen, n_hashed))
        return layer

    def _check_positions(
        self,
        input_ids: torch.Tensor,
        dead: torch.Tensor | None,
        position_ids: torch.Tensor,
        seen: int | torch.Tensor,
        is_tree: bool,
    ) -> None:
        """Checks that no token's place in its sequence tells of tokens before it that are not known here.

        A token at place p has at most p tokens before it, so its position is at most p: beyond that, somebody keeps
        the sequence elsewhere. And a token after a live one follows it, or begins a document at position 0. (Neither
        is asked of padding, nor is the second where the mask says what follows what.)
        """
        batch, length = input_ids.shape
        if tuple(position_ids.shape) not in ((batch, length), (1, length)):
            raise ValueError(
                f"`position_ids` must be [batch, length], here ({batch} or 1, {length}), got "
                f"{tuple(position_ids.shape)}: Engram models have one position a token."
            )
        places = torch.arange(length, device=position_ids.device) + seen
        holds = position_ids <= places
        if not is_tree and length > 1:
            before, here = position_ids[:, :-1], position_ids[:, 1:]
            follows = (here == before + 1) | (here == 0)
            if dead is not None:
                follows = follows | dead[:, :-1]
            holds = torch.cat((holds[:, :1].expand(len(follows), -1), holds[:, 1:] & follows), 1)
        assert_holds(
            holds if dead is None else holds | dead,
            "`position_ids` are of tokens in the middle of a sequence, whose n-grams need the tokens before: pass the "
            "`cache` that holds them, as `generate` does. (A sequence, and each document of a packed one, begins at "
            "position 0.) An engine that keeps keys and values itself, such as vLLM, cannot run this model.",
        )

    def check_hash_ids(
        self, hash_ids: torch.Tensor, batch: int, length: int, live: torch.Tensor | None = None
    ) -> None:
        """Checks hash ids that were computed elsewhere (the tokenizer): shape, dtype, and every column's bucket range,
        where `live` (bool `[B, L]`; None for everywhere). Elsewhere a collator may have padded with anything.

        Raises:
            ValueError: names what is wrong; TypeError: not int64.
        """
        columns = self.primes.shape[1] * self.primes.shape[2]
        expected = (batch, length, self.primes.shape[0], columns)
        if tuple(hash_ids.shape) != expected:
            raise ValueError(
                f"`hash_ids` must have shape {expected} (batch, length, Engram layers, hash columns), got "
                f"{tuple(hash_ids.shape)}: tokenise with the EngramTokenizer that the model was built for."
            )
        if hash_ids.dtype != torch.int64:
            raise TypeError(f"`hash_ids` must be int64, got {hash_ids.dtype}.")
        offsets, primes = self.offsets.flatten(1), self.primes.flatten(1)
        inside = (hash_ids >= offsets) & (hash_ids < offsets + primes)
        message = (
            "`hash_ids` lie outside their columns' bucket ranges: they were made with another layout. Tokenise with "
            "the EngramTokenizer that the model was built for, or leave `hash_ids` out."
        )
        assert_holds(inside if live is None else inside | ~live[..., None, None], message)

    def check_agreement(self, hash_ids: torch.Tensor, computed: torch.Tensor, live: torch.Tensor | None) -> None:
        """Checks that the tokenizer hashes as the model does, where `live` (bool `[B, L]`; None for everywhere).

        Raises:
            ValueError: it does not (a RuntimeError where it is asserted on the device).
        """
        message = (
            "`hash_ids` are not the rows that the model computes for `input_ids`: the ids were changed after they "
            "were hashed, tokens were added to the tokenizer since `model.bind_tokenizer(tokenizer)` (call it again), "
            "or the mask and `position_ids` are not those that the tokenizer used. Leaving `hash_ids` out is always "
            "right."
        )
        agree = hash_ids == computed
        assert_holds(agree if live is None else agree | ~live[..., None, None], message)
