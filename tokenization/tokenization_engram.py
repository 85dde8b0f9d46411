"""Tokenizer of the Engram language model: any fast tokenizer, which also says where in the tables each token looks."""

import inspect
import operator
import os
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.utils import PaddingStrategy, TensorType

from ..configuration.folder_update import TOKEN_MAP_FILE, FolderUpdate, is_staged
from ..configuration.remote_code import TOKENIZER_AUTO_MAP, export_code, is_installed_package
from .ngram_hashing import (
    DEAD,
    build_layout,
    build_multipliers,
    check_layout,
    check_token_ids,
    document_starts,
    encode_stream,
    hash_stream,
)
from .token_map import (
    build_token_map,
    check_vocabulary,
    load_token_map,
    save_token_map,
    token_map_sha256,
    token_map_size,
)


ArrayLike = np.ndarray | torch.Tensor | Sequence

# What `from_tokenizer` takes over besides the backend and the special tokens; not all are known to every version.
_CARRIED_SETTINGS = (
    "model_max_length",
    "padding_side",
    "truncation_side",
    "model_input_names",
    "clean_up_tokenization_spaces",
    "split_special_tokens",
    "extra_special_tokens",
    "chat_template",
    "chat_control_tokens",
    "response_template",
)


class EngramTokenizer(PreTrainedTokenizerFast):
    r"""
    A fast tokenizer whose encodings also hold `hash_ids`: for every token, the table rows that its Engram layers read,
    int64 `[B, L, n_engram_layers, (engram_max_ngram_size - 1) * engram_n_heads]`. Everything else is as with the
    tokenizer it is made from, by [`~EngramTokenizer.from_pretrained`] or [`~EngramTokenizer.from_tokenizer`].

    Padding is hashed as absent: what counts is the attention mask, never an id. Rows of a batch, and the parts of a
    text that overflows, are sequences of their own. [`~EngramTokenizer.pad`] hashes anew, which serves collators that
    pad with it. One that *changes* ids afterwards (masked-language modelling) must be given a tokenizer with
    `return_hash_ids=False`; the model then computes the hash itself.

    The tokenizer's map to compressed ids is built when first needed, saved with the tokenizer, and loaded with it. If
    made from a plain tokenizer, it follows tokens that are added. Once loaded from a saved folder, the compressed
    vocabulary's size stays as it is, because the hash (and so every trained table row) depends on it: an added token
    then shares the compressed id of a token that normalises alike, takes a free one if there is room, or is refused.

    Args:
        engram_layer_ids (`list[int]`, defaults to `(1,)`): indices of the decoder layers that hold an Engram layer,
            ascending. None at all (`[]`): no `hash_ids`.
        engram_vocab_size (`int`, defaults to 20000): lower bound of each bucket count, in table rows.
        engram_max_ngram_size (`int`, defaults to 3): longest n-gram, in tokens; sizes 2 and up are hashed.
        engram_n_heads (`int`, defaults to 4): hashes per n-gram size.
        engram_pad_token_id (`int`, *optional*): token id that stands where a window has no token. By default the pad
            token's, else the end-of-sequence token's, as they are when first needed.
        engram_compressed_vocab_size (`int`, *optional*): number of compressed ids. By default as many as there are; a
            larger number leaves room for tokens that are added after training.
        return_hash_ids (`bool`, defaults to `True`): whether encodings hold `hash_ids` unless a call says otherwise.
        engram_token_map_sha256, engram_token_map_file (*optional*): digest and path of the saved map; given by
            `from_pretrained`.

    Raises:
        ValueError: a field is out of its range, or the folder's token map is damaged or of another tokenizer.
    """

    vocab_files_names = {**PreTrainedTokenizerFast.vocab_files_names, "engram_token_map_file": TOKEN_MAP_FILE}
    model_input_names = ["input_ids", "attention_mask", "hash_ids"]
    _auto_map = TOKENIZER_AUTO_MAP

    def __init__(
        self,
        *args,
        engram_layer_ids: Sequence[int] = (1,),
        engram_vocab_size: int = 20000,
        engram_max_ngram_size: int = 3,
        engram_n_heads: int = 4,
        engram_pad_token_id: int | None = None,
        engram_compressed_vocab_size: int | None = None,
        engram_token_map_sha256: str | None = None,
        engram_token_map_file: str | None = None,
        return_hash_ids: bool = True,
        **kwargs,
    ):
        fields = {
            "engram_layer_ids": _check_layer_ids(engram_layer_ids),
            "engram_vocab_size": _check_int("engram_vocab_size", engram_vocab_size, least=1),
            "engram_max_ngram_size": _check_int("engram_max_ngram_size", engram_max_ngram_size, least=2),
            "engram_n_heads": _check_int("engram_n_heads", engram_n_heads, least=1),
            "engram_pad_token_id": _check_int("engram_pad_token_id", engram_pad_token_id, least=0, optional=True),
        }
        self._compressed_vocab_size = _check_int(
            "engram_compressed_vocab_size", engram_compressed_vocab_size, least=1, optional=True
        )
        layout = (fields[f"engram_{name}"] for name in ("vocab_size", "max_ngram_size", "n_heads"))
        check_layout(len(fields["engram_layer_ids"]), *layout)
        if not isinstance(return_hash_ids, bool):
            raise ValueError(f"`return_hash_ids` must be True or False, got {return_hash_ids!r}.")
        if engram_token_map_sha256 is not None:
            kwargs.pop("engram_token_map_size", None)  # said by the digest, too
        if unknown := [name for name in kwargs if name.startswith("engram_")]:
            raise ValueError(
                f"EngramTokenizer has no arguments {unknown}; those that begin like them are "
                f"{', '.join([*fields, 'engram_compressed_vocab_size'])}."
            )
        # What a killed save has left in the config: there is one tokenizer.json when this one is saved.
        kwargs.pop("fast_tokenizer_files", None)
        # Whatever is handed up is kept in `init_kwargs` and saved, with the value of the attribute of that name.
        super().__init__(*args, **fields, return_hash_ids=return_hash_ids, **kwargs)
        for name, value in fields.items():
            setattr(self, name, value)
        if self.backend_tokenizer.get_vocab_size(with_added_tokens=True) < 2:
            raise ValueError(
                f"The tokenizer has {len(self)} tokens, of which no two n-grams can be made: its folder holds no "
                "tokenizer files, for which Transformers makes one up, or it is not trained yet. Fetch tokenizer.json."
            )
        names = [name for name in self.model_input_names if name != "hash_ids"]
        self.model_input_names = [*names, "hash_ids"] if return_hash_ids and self.engram_layer_ids else names

        self._token_map: np.ndarray | None = None
        self._token_map_is_for = 0  # number of tokens when the map was last brought up to date
        if engram_token_map_sha256 is not None:
            self._load_token_map(engram_token_map_file, engram_token_map_sha256)
            engram_compressed_vocab_size = None
        # Saved from the properties of these names. Here they hold what a tokenizer trained from this one starts with.
        self.init_kwargs["engram_compressed_vocab_size"] = engram_compressed_vocab_size
        self.init_kwargs["engram_token_map_sha256"] = None

    @classmethod
    def convert_to_native_format(cls, **kwargs) -> dict[str, Any]:
        # For a subclass with an `__init__`, Transformers would rebuild the backend from vocabulary and merges alone.
        # tokenizer.json is the whole truth about it, as it is for the parent.
        return PreTrainedTokenizerFast.convert_to_native_format(**kwargs)

    @classmethod
    def from_tokenizer(cls, tokenizer: PreTrainedTokenizerBase, **kwargs) -> "EngramTokenizer":
        """Makes an Engram tokenizer from a loaded fast tokenizer, with its special tokens, chat template and settings.

        Args:
            tokenizer ([`PreTrainedTokenizerFast`]): it is copied, and stays as it is.
            kwargs: the arguments of the class, and any setting that shall differ.

        Raises:
            TypeError: `tokenizer` is not backed by the tokenizers library.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise TypeError(
                f"`tokenizer` must be a fast tokenizer, got {type(tokenizer).__name__}. Convert it to one (a folder "
                "with tokenizer.json), because the token map is built with the tokenizers library."
            )
        settings = {name: getattr(tokenizer, name) for name in _CARRIED_SETTINGS if hasattr(tokenizer, name)}
        special_tokens = tokenizer.special_tokens_map
        named = {name: special_tokens.pop(name) for name in cls.SPECIAL_TOKENS_ATTRIBUTES if name in special_tokens}
        settings |= named | {"model_specific_special_tokens": special_tokens} | kwargs
        engram_tokenizer = cls(tokenizer_object=backend, **settings)
        # Set afterwards: given to `__init__`, it makes Transformers look up whether that repository needs a fix.
        engram_tokenizer.name_or_path = tokenizer.name_or_path
        return engram_tokenizer

    @property
    def return_hash_ids(self) -> bool:
        """Whether encodings hold `hash_ids` unless a call says otherwise: whether `model_input_names` has them."""
        return "hash_ids" in self.model_input_names

    @property
    def token_map(self) -> np.ndarray:
        """int32 `[len(self)]`, read-only: the compressed id of every token id.

        Raises:
            ValueError: there are more classes of tokens than `engram_compressed_vocab_size`.
        """
        if self._token_map is None or self._token_map_is_for != len(self):
            self._update_token_map()
        return self._token_map

    @property
    def engram_compressed_vocab_size(self) -> int:
        """Number of compressed ids that the hash is made for; at least as many as the token map has."""
        token_map = self.token_map
        return int(token_map.max()) + 1 if self._compressed_vocab_size is None else self._compressed_vocab_size

    @property
    def engram_token_map_sha256(self) -> str:
        """Digest of the token map, by which a model recognises its tokenizer."""
        return token_map_sha256(self.token_map)

    def engram_fields(self) -> dict[str, Any]:
        """The fields that a model's `EngramConfig` shares with this tokenizer: `EngramConfig(..., **fields)`."""
        return {
            "engram_layer_ids": list(self.engram_layer_ids),
            "engram_vocab_size": self.engram_vocab_size,
            "engram_max_ngram_size": self.engram_max_ngram_size,
            "engram_n_heads": self.engram_n_heads,
            "engram_pad_token_id": self._resolve_pad_token_id(),
            "engram_compressed_vocab_size": self.engram_compressed_vocab_size,
            "engram_token_map_size": len(self.token_map),
            "engram_token_map_sha256": self.engram_token_map_sha256,
        }

    def compute_hash_ids(
        self,
        input_ids: ArrayLike,
        attention_mask: ArrayLike | None = None,
        position_ids: ArrayLike | None = None,
    ) -> np.ndarray:
        """Computes the table rows of every token, in numpy, whatever the inputs are.

        Args:
            input_ids: integers `[B, L]` or `[L]`: NumPy, PyTorch or lists.
            attention_mask: same shape, 0 where a token is padding or must not be seen; all are seen by default.
            position_ids: same shape or `[1, L]`. Where they do not count up by one, a packed document begins.

        Returns:
            `np.ndarray`: int64 `[B, L, n_engram_layers, (engram_max_ngram_size - 1) * engram_n_heads]`, without B for
            one-dimensional ids; columns ordered by n-gram size, then head.

        Raises:
            TypeError: ids or positions are not integers.
            ValueError: an id is not one of the tokenizer's, or shapes do not fit.
        """
        ids = _to_numpy(input_ids)
        if ids.ndim not in (1, 2):
            raise ValueError(f"`input_ids` must have the shape [B, L] or [L], got {list(ids.shape)}.")
        token_map = self.token_map
        check_token_ids(ids, len(token_map))
        pad_id = int(token_map[self._resolve_pad_token_id()])
        layer_ids = tuple(self.engram_layer_ids)
        layout = build_layout(len(layer_ids), self.engram_vocab_size, self.engram_max_ngram_size, self.engram_n_heads)
        multipliers = build_multipliers(layer_ids, self.engram_compressed_vocab_size, self.engram_max_ngram_size)

        rows = np.atleast_2d(ids)
        dead = None
        if attention_mask is not None:
            dead = _broadcast("attention_mask", attention_mask, rows.shape) == 0
        starts = None
        if position_ids is not None:
            positions = _broadcast("position_ids", position_ids, rows.shape)
            if not np.issubdtype(positions.dtype, np.integer):
                raise TypeError(f"`position_ids` must hold integers, got dtype {positions.dtype}.")
            starts = document_starts(positions.astype(np.int64))
        stream = encode_stream(token_map[rows].astype(np.int64), dead, starts)
        before = np.full((len(rows), self.engram_max_ngram_size - 1), DEAD, dtype=np.int64)
        stream = np.concatenate((before, stream), axis=1)
        hash_ids = hash_stream(stream, pad_id, multipliers, layout.primes, layout.offsets)
        return hash_ids[0] if ids.ndim == 1 else hash_ids

    def _encode_plus(
        self, *args, return_attention_mask: bool | None = None, return_hash_ids: bool | None = None, **kwargs
    ) -> BatchEncoding:
        # Called by `__call__`, `encode`, `tokenize` and `apply_chat_template`.
        wants_hash_ids = self._wants_hash_ids(return_hash_ids)
        if return_attention_mask is None:
            return_attention_mask = "attention_mask" in self.model_input_names
        # The mask says what is padding, so it is needed here even where it is not returned.
        encoding = super()._encode_plus(*args, return_attention_mask=return_attention_mask or wants_hash_ids, **kwargs)
        encoding.pop("hash_ids", None)  # there already where Transformers pads in here, with a sanitised chat
        if wants_hash_ids:
            encoding["hash_ids"] = self._hash_alike(encoding["input_ids"], encoding["attention_mask"])
            if not return_attention_mask:
                encoding.pop("attention_mask")
        return encoding

    def pad(
        self,
        encoded_inputs: Mapping | Sequence[Mapping],
        padding: bool | str | PaddingStrategy = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_attention_mask: bool | None = None,
        return_tensors: str | TensorType | None = None,
        verbose: bool = True,
        return_hash_ids: bool | None = None,
    ) -> BatchEncoding:
        """Pads as [`PreTrainedTokenizerFast.pad`] does, and hashes the padded ids; given `hash_ids` are not used.

        There are no `hash_ids` where only the model can tell what a token may look back to: with `position_ids`, or a
        mask of more than two dimensions.

        Args:
            return_hash_ids (`bool`, *optional*): whether to return `hash_ids`; as the tokenizer was made by default.
        """
        wants_hash_ids = self._wants_hash_ids(return_hash_ids)
        if isinstance(encoded_inputs, Mapping):
            encoded_inputs = _without_hash_ids(encoded_inputs)
            names = encoded_inputs.keys()
        else:
            encoded_inputs = [_without_hash_ids(example) for example in encoded_inputs]
            names = encoded_inputs[0].keys() if encoded_inputs else ()
        if return_attention_mask is None:
            return_attention_mask = "attention_mask" in self.model_input_names
        keeps_mask = return_attention_mask or "attention_mask" in names
        padded = super().pad(
            encoded_inputs,
            padding=padding,
            max_length=max_length,
            pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side,
            return_attention_mask=return_attention_mask or wants_hash_ids,
            return_tensors=return_tensors,
            verbose=verbose,
        )
        if wants_hash_ids:
            if "position_ids" not in names and getattr(padded["attention_mask"], "ndim", 2) <= 2:
                padded["hash_ids"] = self._hash_alike(padded["input_ids"], padded["attention_mask"])
            if not keeps_mask:
                padded.pop("attention_mask")
        return padded

    def apply_chat_template(
        self, *args, return_hash_ids: bool | None = None, tokenizer_kwargs: dict[str, Any] | None = None, **kwargs
    ):
        # Other arguments go to the template.
        if return_hash_ids is not None:
            tokenizer_kwargs = {**(tokenizer_kwargs or {}), "return_hash_ids": return_hash_ids}
        return super().apply_chat_template(*args, tokenizer_kwargs=tokenizer_kwargs, **kwargs)

    def encode(self, *args, **kwargs) -> list[int]:
        # Returns ids alone: no need to hash.
        return super().encode(*args, **{"return_hash_ids": False, **kwargs})

    def tokenize(self, *args, **kwargs) -> list[str]:
        return super().tokenize(*args, **{"return_hash_ids": False, **kwargs})

    def save_pretrained(self, save_directory: str | os.PathLike, *args, **kwargs) -> tuple[str, ...]:
        """Saves as [`PreTrainedTokenizerFast.save_pretrained`] does, with the token map and the code to load it. All
        is written beside what is there, and moved in place as one, see [`FolderUpdate`]."""
        self.engram_fields()  # whatever can be wrong with them is raised before a file is written
        bound = inspect.signature(super().save_pretrained).bind_partial(save_directory, *args, **kwargs).arguments
        options = bound | bound.pop("kwargs", {})
        # Of a file, Transformers says that it is no folder.
        if is_staged(save_directory) or os.path.isfile(save_directory):
            return super().save_pretrained(**options)
        if options.get("push_to_hub"):
            options.setdefault("repo_id", os.path.basename(os.path.abspath(save_directory)))
        with FolderUpdate(save_directory) as update:
            files = super().save_pretrained(**{**options, "save_directory": update.folder})
        return tuple(os.path.join(save_directory, os.path.relpath(file, update.folder)) for file in files)

    def _save_pretrained(
        self,
        save_directory: str | os.PathLike,
        file_names: tuple[str, ...],
        legacy_format: bool | None = None,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        file_names = super()._save_pretrained(save_directory, file_names, legacy_format, filename_prefix)
        map_file = os.path.join(save_directory, (f"{filename_prefix}-" if filename_prefix else "") + TOKEN_MAP_FILE)
        save_token_map(map_file, self.token_map, self.engram_compressed_vocab_size, self.backend_tokenizer)
        file_names += (map_file,)
        # Code that was itself loaded from a Hub folder is copied by Transformers.
        if self._auto_class is None and is_installed_package():
            file_names += tuple(str(path) for path in export_code(save_directory))
        return file_names

    def __getstate__(self) -> dict[str, Any]:
        # Worker processes get the map with the tokenizer, instead of building one each. And what is settled when first
        # needed is settled now, so that `datasets` sees the same tokenizer before and after.
        if self.return_hash_ids:
            self.engram_fields()
        return self.__dict__.copy()

    def _wants_hash_ids(self, return_hash_ids: bool | None) -> bool:
        return bool(self.engram_layer_ids) and (self.return_hash_ids if return_hash_ids is None else return_hash_ids)

    def _hash_alike(self, input_ids: ArrayLike, attention_mask: ArrayLike) -> ArrayLike:
        """Hashes the rows of an encoding into the kind of container that `input_ids` are in, ragged or not."""
        if isinstance(input_ids, torch.Tensor):
            return torch.from_numpy(self.compute_hash_ids(input_ids, attention_mask))
        if isinstance(input_ids, np.ndarray) and input_ids.dtype != object:
            return self.compute_hash_ids(input_ids, attention_mask)
        if len(input_ids) == 0 or not isinstance(input_ids[0], (list, tuple, np.ndarray)):
            return self.compute_hash_ids(input_ids, attention_mask).tolist()

        # Rows of different lengths: hashed all at once, like documents packed into one row.
        lengths = np.array([len(row) for row in input_ids])
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        flat_ids = np.fromiter(chain.from_iterable(input_ids), dtype=np.int64, count=total)
        flat_mask = np.fromiter(chain.from_iterable(attention_mask), dtype=np.int64, count=total)
        position_ids = np.arange(total) - np.repeat(ends - lengths, lengths)
        rows = np.split(self.compute_hash_ids(flat_ids, flat_mask, position_ids), ends[:-1])
        if isinstance(input_ids, np.ndarray):
            ragged = np.empty(len(rows), dtype=object)
            for i, row in enumerate(rows):
                ragged[i] = row
            return ragged
        return [row.tolist() for row in rows]

    def _resolve_pad_token_id(self) -> int:
        if self.engram_pad_token_id is None:
            self.engram_pad_token_id = self.eos_token_id if self.pad_token_id is None else self.pad_token_id
        if self.engram_pad_token_id is None:
            raise ValueError(
                "`engram_pad_token_id` is not given, and the tokenizer has neither a pad nor an end-of-sequence token "
                "to take instead. Pass the id of a token that may stand for an empty place in a window."
            )
        if self.engram_pad_token_id >= len(self.token_map):
            raise ValueError(
                f"`engram_pad_token_id` is {self.engram_pad_token_id}, but the tokenizer's ids end at "
                f"{len(self.token_map) - 1}. Pass one of its ids."
            )
        return self.engram_pad_token_id

    def _update_token_map(self) -> None:
        """Builds the token map, or extends it by the tokens added since; entries that are there stay."""
        token_map = build_token_map(self.backend_tokenizer, token_map_size(self.backend_tokenizer), self._token_map)
        if token_map.max() == 0:
            raise ValueError(
                f"All {len(token_map)} tokens normalise alike, to one compressed id, so all would read the same table "
                "rows: it is not a tokenizer of text. Make the Engram tokenizer from one that is trained."
            )
        limit = self._compressed_vocab_size
        if limit is not None and int(token_map.max()) >= limit:
            token_id = int(np.argmax(token_map >= limit))
            raise ValueError(
                f"Token {self.convert_ids_to_tokens(token_id)!r} (id {token_id}) needs the compressed id "
                f"{token_map[token_id]}, but `engram_compressed_vocab_size` is {limit}. The hash depends on that "
                "number, so it cannot grow once tables are trained: make tokenizer and model with a larger "
                "`engram_compressed_vocab_size` to leave room, or add only tokens that normalise like existing ones."
            )
        self._token_map, self._token_map_is_for = token_map, len(self)

    def _load_token_map(self, path: str | None, sha256: str) -> None:
        """Takes the map of a saved folder, and with it the size of the compressed vocabulary."""
        size = token_map_size(self.backend_tokenizer)
        if path is None:
            token_map = build_token_map(self.backend_tokenizer, size)
            compressed_vocab_size = self._compressed_vocab_size or int(token_map.max()) + 1
            if token_map_sha256(token_map) != sha256:
                raise ValueError(
                    f"{TOKEN_MAP_FILE} is missing, and a token map built from tokenizer.json has the sha256 "
                    f"{token_map_sha256(token_map)} instead of {sha256}. Fetch or save the folder again."
                )
        else:
            token_map, compressed_vocab_size = load_token_map(path, sha256)
        if self._compressed_vocab_size not in (None, compressed_vocab_size):
            raise ValueError(
                f"`engram_compressed_vocab_size` is {self._compressed_vocab_size}, but the saved token map is used "
                f"with {compressed_vocab_size}, and so are the tables. Leave the argument out, or make a tokenizer of "
                "its own with `EngramTokenizer.from_tokenizer`."
            )
        if len(token_map) > size:
            raise ValueError(
                f"{path} maps {len(token_map)} ids, but tokenizer.json has {size}: they are not of one tokenizer. "
                "Fetch or save the folder again."
            )
        if path is not None:
            check_vocabulary(path, self.backend_tokenizer, len(token_map))
        self._compressed_vocab_size = compressed_vocab_size
        self._token_map = token_map
        self._token_map_is_for = len(self) if len(token_map) == size else 0


def _check_int(name: str, value: int | None, least: int, optional: bool = False) -> int | None:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise ValueError(f"`{name}` must be an integer of at least {least}, got {value!r}.")
    return operator.index(value)


def _check_layer_ids(layer_ids: Sequence[int]) -> list[int]:
    if isinstance(layer_ids, str) or not hasattr(layer_ids, "__iter__"):
        raise ValueError(f"`engram_layer_ids` must be a list of layer indices, got {layer_ids!r}.")
    checked = [_check_int("engram_layer_ids", layer_id, least=0) for layer_id in layer_ids]
    if any(first >= second for first, second in pairwise(checked)):
        raise ValueError(f"`engram_layer_ids` must ascend, each index once, got {checked}. Sort them.")
    return checked


def _to_numpy(values: ArrayLike) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        array = (values.float() if values.dtype == torch.bfloat16 else values).numpy()  # which numpy lacks
    else:
        array = np.asarray(values)
    return array.astype(np.int64) if array.size == 0 else array  # an empty list has no type of its own


def _broadcast(name: str, values: ArrayLike, shape: tuple[int, int]) -> np.ndarray:
    array = _to_numpy(values)
    rows = np.atleast_2d(array)
    if rows.shape != shape and rows.shape != (1, shape[1]):
        raise ValueError(f"`{name}` must have the shape of `input_ids`, {list(shape)}, got {list(array.shape)}.")
    return np.broadcast_to(rows, shape)


def _without_hash_ids(encoding: Mapping) -> dict[str, Any]:
    return {name: encoding[name] for name in encoding.keys() if name != "hash_ids"}
