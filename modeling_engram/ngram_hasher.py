"""The model's own hasher: token ids to table rows, with constants that are saved with the model."""

import numpy as np
import torch
from torch import nn
from transformers.cache_utils import Cache

from ..tokenization.ngram_hashing import build_multipliers
from ..tokenization.token_map import token_map_sha256
from .ngram_history import append_history, read_history
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
        if config.engram_token_map_sha256 is None and config.engram_compressed_vocab_size == config.vocab_size:
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
        """Whether a token map is installed."""
        return not self.token_map.is_meta and bool((self.token_map != UNBOUND).all())

    def bind_token_map(self, token_map: np.ndarray) -> None:
        """Installs a tokenizer's map; ids from `len(token_map)` on, which it never gives, hash as the pad token.

        Args:
            token_map: int `[len(tokenizer)]`, compressed ids.

        Raises:
            ValueError: longer than the vocabulary, or an id beyond the compressed vocabulary.
        """
        config = self.config
        if len(token_map) > config.vocab_size:
            raise ValueError(
                f"The tokenizer has {len(token_map)} tokens, more than the model's `vocab_size` "
                f"({config.vocab_size}): call `model.resize_token_embeddings(len(tokenizer))` first."
            )
        lowest, highest = int(token_map.min()), int(token_map.max())
        if lowest < 0 or highest >= config.engram_compressed_vocab_size:
            raise ValueError(
                f"The tokenizer's map holds compressed ids from {lowest} to {highest}, outside [0, "
                f"{config.engram_compressed_vocab_size}), the config's `engram_compressed_vocab_size`: build the "
                "config with `**tokenizer.engram_fields()`."
            )
        full = np.full(config.vocab_size, token_map[config.engram_pad_token_id], dtype=np.int32)
        full[: len(token_map)] = token_map
        self.token_map = torch.from_numpy(full).to(self.token_map.device)
        self.check()

    def resize_token_map(self, vocab_size: int) -> torch.Tensor:
        """The token map for another vocabulary size: shorter, or with a new compressed id for every new token.

        Raises:
            ValueError: no compressed ids are left. Their number sets the hash's multipliers, so with one more, every
                row of the tables would be another n-gram's.
        """
        token_map = self.token_map
        n_new = vocab_size - len(token_map)
        if n_new <= 0:
            return token_map[:vocab_size].clone()
        first = int(token_map.max()) + 1
        limit = self.config.engram_compressed_vocab_size
        if first + n_new > limit:
            raise ValueError(
                f"{n_new} new tokens need new compressed ids, but `engram_compressed_vocab_size` ({limit}) leaves "
                f"{limit - first}: it fixes the hash that the tables are addressed by. Add the tokens before the "
                "model is made, or make tokenizer and config with a larger `engram_compressed_vocab_size` (and "
                "`vocab_size`) to leave room."
            )
        return torch.cat([token_map, torch.arange(first, first + n_new, dtype=torch.int32, device=token_map.device)])

    def check(self) -> None:
        """Compares the buffers with the config: once, after they were set or loaded.

        Raises:
            ValueError: no token map is bound, or a buffer does not belong to the config; hashes would be wrong.
        """
        config = self.config
        for name, expected in self.constants(device="cpu").items():
            buffer = getattr(self, name)
            if buffer.shape != expected.shape:
                raise ValueError(
                    f"The hash constant `{name}` of this checkpoint has shape {tuple(buffer.shape)}, its config asks "
                    f"for {tuple(expected.shape)}: restore the config.json that it was saved with."
                )
            if name != "token_map" and not torch.equal(buffer.cpu(), expected):
                raise ValueError(
                    f"The hash constant `{name}` of this checkpoint is not that of its config: an `engram_*` field "
                    "was changed after the tables were made. Restore the config.json that it was saved with."
                )
        if not self.is_bound:
            raise ValueError(
                "The model has no token map yet, so it cannot hash token ids: call `model.bind_tokenizer(tokenizer)` "
                "with the EngramTokenizer that its config was made from."
            )
        token_map = self.token_map.cpu().numpy()
        if token_map.min() < 0 or token_map.max() >= config.engram_compressed_vocab_size:
            raise ValueError(
                f"The token map holds compressed ids outside [0, {config.engram_compressed_vocab_size}): the weights "
                "file is damaged, or config.json is another model's."
            )
        if config.engram_token_map_sha256 is not None:
            digest = token_map_sha256(token_map[: config.engram_token_map_size])
            if digest != config.engram_token_map_sha256:
                raise ValueError(
                    f"The token map's sha256 is {digest}, but the config's `engram_token_map_sha256` is "
                    f"{config.engram_token_map_sha256}: the weights and config.json are not of the same model."
                )
        self.pad_id = int(token_map[config.engram_pad_token_id])
        self.is_checked = True

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.is_checked = False
        super()._load_from_state_dict(*args, **kwargs)

    def forward(
        self,
        input_ids: torch.Tensor,
        dead: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
    ) -> torch.Tensor:
        """Hashes the window that ends at each token, and moves the cache's n-gram history on.

        Args:
            input_ids: integer `[B, L]`, checked by the caller.
            dead: bool `[B, L]` or None, True where a token is padding, masked, or not text.
            position_ids: integer `[B or 1, L]` or None; where they restart, a packed document begins.
            cache: holds the history of the tokens before, and gets these; None for a whole sequence.

        Returns:
            int64 `[B, L, n_layers, C]`, row ids inside each layer's table.
        """
        if not self.is_checked:
            self.check()
        layer_idx, length = self.config.engram_layer_ids[0], self.config.engram_max_ngram_size - 1
        hash_ids, encoded = ngram_hash(
            input_ids,
            self.token_map,
            self.pad_id,
            self.multipliers,
            self.primes,
            self.offsets,
            dead,
            position_ids,
            history=None if cache is None else read_history(cache, layer_idx, length),
        )
        if cache is not None:
            append_history(encoded, cache, layer_idx, length)
        return hash_ids

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
        self._assert(inside if live is None else inside | ~live[..., None, None], message)

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
        self._assert(agree if live is None else agree | ~live[..., None, None], message)

    @staticmethod
    def _assert(holds: torch.Tensor, message: str) -> None:
        if holds.is_meta:
            return
        if holds.device.type != "cpu" or torch.compiler.is_compiling():
            torch._assert_async(holds.all(), message)
        elif not holds.all():
            raise ValueError(message)
