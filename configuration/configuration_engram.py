"""Configuration of the Engram language model."""

import difflib
import os
import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from ..tokenization.ngram_hashing import build_layout, check_layout
from .folder_update import FolderUpdate, is_staged
from .remote_code import MODEL_AUTO_MAP, export_code, is_installed_package


PLACEMENTS = ("device", "cpu", "disk")
SMALLEST_EPS = 2.0**-126  # of fp32, where no bit is lost
LARGEST_VOCABULARY = 2**31  # ids are int32 in the token map
SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "hc_mult",
    "hc_sinkhorn_iters",
)
BOOL_FIELDS = (
    "use_cache",
    "tie_word_embeddings",
    "attention_bias",
    "attention_output_bias",
    "use_qk_norm",
    "mlp_bias",
)
TEXT_FIELDS = ("backbone_model_type", "backbone_name", "backbone_license")
OWN_PREFIXES = ("engram_", "hc_")
SHA256 = re.compile("[0-9a-f]{64}")


def placement_of_each(placement: str | list[str], n_layers: int) -> list[str]:
    """The placement of each Engram layer's table, from one for all or a list.

    Raises:
        ValueError: not a placement, or not as many as there are Engram layers.
    """
    is_one = isinstance(placement, str)
    values = [placement] if is_one else placement
    is_list = isinstance(values, (list, tuple)) and all(value in PLACEMENTS for value in values)
    if not is_list or not (is_one or len(values) == n_layers):
        raise ValueError(
            f"`engram_placement` must be one of {PLACEMENTS}, or a list of {n_layers} of them, one for each Engram "
            f"layer, got {placement!r}."
        )
    return values * n_layers if is_one else list(values)


class EngramConfig(PreTrainedConfig):
    r"""
    Configuration of [`EngramModel`]: a Llama-style decoder whose residual stream is `hc_mult` parallel copies, with
    Engram layers that write hashed n-gram memory into it. The names of the stream's and the memory's fields are those
    of DeepSeek-V4.1's `text_config`; the backbone's are Llama's.

    Args:
        vocab_size (`int`, defaults to 32000): number of token ids, rows of the token embedding.
        hidden_size (`int`, defaults to 512): width D of one copy of the residual stream.
        intermediate_size (`int`, defaults to 1536): width of the gated MLP.
        num_hidden_layers (`int`, defaults to 8): number of decoder layers.
        num_attention_heads (`int`, defaults to 8): number of query heads.
        num_key_value_heads (`int`, *optional*): number of key/value heads; `num_attention_heads` if not given.
        head_dim (`int`, *optional*): width of one attention head; `hidden_size // num_attention_heads` if not given.
        hidden_act (`str`, defaults to `"silu"`): activation of the MLP's gate.
        max_position_embeddings (`int`, defaults to 2048): longest sequence meant to be used, in tokens.
        initializer_range (`float`, defaults to 0.02): standard deviation of the initial weights. Table rows start
            at zero.
        rms_norm_eps (`float`, defaults to 1e-6): added to mean squares in every norm, the Engram gate's included.
        use_cache (`bool`, defaults to `True`): whether forward returns a cache.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): special token ids.
        tie_word_embeddings (`bool`, defaults to `False`): whether the head shares the token embedding's weight.
        rope_parameters (`dict`, *optional*): rotary embedding, any type Transformers knows; theta 10000 if not given.
        attention_bias (`bool`, defaults to `False`): whether query, key and value projections have a bias.
        attention_output_bias (`bool`, *optional*): whether the attention's output projection has a bias; as
            `attention_bias` if not given (Llama; Qwen2 has biases on query, key and value only).
        use_qk_norm (`bool`, defaults to `False`): whether queries and keys are RMS-normalised per head (Qwen3).
        attention_dropout (`float`, defaults to 0.0): dropout probability of attention weights.
        mlp_bias (`bool`, defaults to `False`): whether the MLP's projections have a bias.
        hc_mult (`int`, defaults to 4): number H of parallel copies of the residual stream; 1 is a plain residual.
        hc_sinkhorn_iters (`int`, defaults to 20): normalisation rounds that make the copies' mixing matrix doubly
            stochastic.
        hc_eps (`float`, defaults to 1e-6): added to sigmoid outputs and to the mixing matrix's sums.
        engram_layer_ids (`list[int]`, defaults to `[1]`): decoder layers that hold an Engram layer, ascending; `[]`
            for none.
        engram_max_ngram_size (`int`, defaults to 3): longest n-gram N, in tokens; sizes 2..N are hashed.
        engram_vocab_size (`int`, defaults to 20000): least number of rows per n-gram size and head.
        engram_n_heads (`int`, defaults to 4): hashes K per n-gram size.
        engram_head_dim (`int`, defaults to 32): width d of one table row.
        engram_pad_token_id (`int`, *optional*): token id whose compressed id stands where a window has no token;
            `pad_token_id`, else 0, if not given.
        engram_compressed_vocab_size (`int`, *optional*): number of compressed ids; `vocab_size` (no compression) if
            not given. It sets the hash's multipliers, so it is fixed for the life of the tables.
        engram_num_embeddings (`list[int]`, *optional*): rows of each layer's table. Follows from the fields above; a
            given value must agree.
        engram_token_map_size (`int`, *optional*): number of token ids in the tokenizer's map to compressed ids.
        engram_token_map_sha256 (`str`, *optional*): sha256 of that map as little-endian int32, by which another
            tokenizer is refused.
        engram_placement (`str` or `list[str]`, defaults to `"device"`): where the tables live, for all Engram layers
            or one by one: `"device"` beside the model, `"cpu"` in host memory, or `"disk"` in the file that they are
            loaded from.
        engram_scale_block_size (`int`, defaults to 32): columns of a row of an fp8 table that share one scale.
        backbone_model_type (`str`, *optional*): `model_type` of the decoder that the model was converted from.
        backbone_name (`str`, *optional*): Hub id of that decoder, for the model card; None if it came from a folder.
        backbone_license (`str`, *optional*): its licence, as its own model card states it.

    Raises:
        ValueError: a field is out of its range, or disagrees with another; the message names both and the remedy.
    """

    model_type = "engram"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int = 1536
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_output_bias: bool | None = None
    use_qk_norm: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: list[int] | tuple[int, ...] = (1,)
    engram_max_ngram_size: int = 3
    engram_vocab_size: int = 20000
    engram_n_heads: int = 4
    engram_head_dim: int = 32
    engram_pad_token_id: int | None = None
    engram_compressed_vocab_size: int | None = None
    engram_num_embeddings: list[int] | None = None
    engram_token_map_size: int | None = None
    engram_token_map_sha256: str | None = None
    engram_placement: str | list[str] | tuple[str, ...] = "device"
    engram_scale_block_size: int = 32
    backbone_model_type: str | None = None
    backbone_name: str | None = None
    backbone_license: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        self._check_types()
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers"):
            self._check_int(name, minimum=1)
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            raise ValueError(f"`hidden_act` must be one of {sorted(ACT2FN)}, got {self.hidden_act!r}.")
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"`pad_token_id` ({self.pad_token_id}) must be a token id in [0, {self.vocab_size}), or None: raise "
                "`vocab_size`, or name another token."
            )
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"`hidden_size` ({self.hidden_size}) is not a multiple of `num_attention_heads` "
                    f"({self.num_attention_heads}): choose sizes that divide, or pass `head_dim`."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.attention_output_bias is None:
            self.attention_output_bias = self.attention_bias
        if not isinstance(self.engram_layer_ids, (list, tuple)):
            raise ValueError(
                f"`engram_layer_ids` must be a list of layer indices, got {self.engram_layer_ids!r}: use [] for none."
            )
        self.engram_layer_ids = list(self.engram_layer_ids)
        if self.engram_pad_token_id is None:
            self.engram_pad_token_id = self.pad_token_id if self.pad_token_id is not None else 0
        if self.engram_compressed_vocab_size is None:
            self.engram_compressed_vocab_size = self.vocab_size
        layer_types = kwargs.pop("layer_types", None)
        super().__post_init__(**kwargs)
        self._check_engram_fields()
        if self.engram_num_embeddings is None:
            self.engram_num_embeddings = list(self.layout().num_embeddings)
        elif isinstance(self.engram_num_embeddings, tuple):
            self.engram_num_embeddings = list(self.engram_num_embeddings)
        self.validate()
        if layer_types is not None:
            self.layer_types = layer_types
        if getattr(self, "auto_map", None) is None:
            self.auto_map = dict(MODEL_AUTO_MAP)

    @property
    def layer_types(self) -> list[str]:
        """Kinds of decoder layer, which are all one. (The n-gram history makes its own place in a cache.)"""
        return ["full_attention"] * self.num_hidden_layers

    @layer_types.setter
    def layer_types(self, layer_types: list[str]) -> None:
        # Tools that set fewer layers set this list, too; it has followed by then.
        if not isinstance(layer_types, (list, tuple)) or list(layer_types) != self.layer_types:
            raise ValueError(
                f"`layer_types` follows from `num_hidden_layers` and is {self.layer_types}, got {layer_types!r}: "
                "leave it out, or set `num_hidden_layers` first. Other kinds of layer (sliding windows, ...) are not "
                "supported."
            )

    def layout(self):
        """The [`NgramLayout`] of the Engram layers' tables (cached)."""
        return build_layout(
            len(self.engram_layer_ids), self.engram_vocab_size, self.engram_max_ngram_size, self.engram_n_heads
        )

    def validate(self) -> None:
        """Checks every field; called on construction, when a model is built, and when the config is saved.

        Raises:
            ValueError: names the field, its value and the remedy.
        """
        self._check_types()
        for name in SIZE_FIELDS:
            self._check_int(name, minimum=1)
        if self.vocab_size >= LARGEST_VOCABULARY:
            raise ValueError(f"`vocab_size` must be below 2**31, as token ids are int32, got {self.vocab_size}.")
        for name in ("rms_norm_eps", "hc_eps", "initializer_range", "attention_dropout"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"`{name}` must be a number in [0, 1], got {value!r}.")
        if self.engram_layer_ids and self.rms_norm_eps < SMALLEST_EPS:
            raise ValueError(
                f"`rms_norm_eps` ({self.rms_norm_eps!r}) is zero in fp32, with which the gate of a row of zeros, as "
                "all are at first, is not a number: use a small one, such as 1e-20."
            )
        if self.attention_dropout == 1:
            raise ValueError(f"`attention_dropout` must be below 1, got {self.attention_dropout!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) is not a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads}): every key/value head serves the same number of query heads."
            )
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even for rotary embeddings, got {self.head_dim}.")
        if self.hc_mult > 1 and self.hc_eps >= 1 / self.hc_mult:
            raise ValueError(f"`hc_eps` ({self.hc_eps}) must be below 1 / `hc_mult` ({self.hc_mult}).")
        self._check_engram_fields()
        expected = list(self.layout().num_embeddings)
        if self.engram_num_embeddings != expected:
            raise ValueError(
                f"`engram_num_embeddings` is {self.engram_num_embeddings!r}, but `engram_layer_ids`, "
                f"`engram_vocab_size`, `engram_max_ngram_size` and `engram_n_heads` lay out {expected}: leave "
                "`engram_num_embeddings` out, or restore the fields that the tables were made with."
            )
        super().validate()

    @staticmethod
    def _refuse_unknown(names: Iterable[str]) -> None:
        known = [f.name for f in fields(EngramConfig) if f.name.startswith(OWN_PREFIXES)]
        for name in names:
            if name.startswith(OWN_PREFIXES):
                nearest = ", ".join(f"`{other}`" for other in difflib.get_close_matches(name, known, 3, cutoff=0.0))
                raise ValueError(
                    f"EngramConfig has no field `{name}`; the nearest are {nearest}. If it is of a later release of "
                    "hf-engram, use that, or load the model with `trust_remote_code=True`."
                )

    def _check_types(self) -> None:
        """Of the fields whose range does not say what they are. Transformers takes them as they come: the string
        "false" would be true."""
        for name in BOOL_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name == "attention_output_bias"):
                raise ValueError(f"`{name}` must be true or false, got {value!r}.")
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            is_list = isinstance(value, (list, tuple)) and name == "eos_token_id"
            for token_id in value if is_list else [value]:
                is_id = isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0
                if not is_id and (is_list or token_id is not None):
                    kinds = "a token id, a list of them," if name == "eos_token_id" else "a token id"
                    raise ValueError(f"`{name}` must be {kinds} or None, got {value!r}: ids are integers from 0 on.")
        for name in TEXT_FIELDS:
            if not isinstance(getattr(self, name), (str, type(None))):
                raise ValueError(f"`{name}` must be a string or None, got {getattr(self, name)!r}.")
        if not isinstance(self.rope_parameters, (dict, type(None))):
            raise ValueError(
                "`rope_parameters` must be a dictionary such as {'rope_type': 'default', 'rope_theta': 10000.0}, or "
                f"None, got {self.rope_parameters!r}."
            )

    def _check_int(self, name: str, minimum: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"`{name}` must be an integer >= {minimum}, got {value!r}.")

    def _check_engram_fields(self) -> None:
        ids = self.engram_layer_ids
        if any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < self.num_hidden_layers for i in ids):
            raise ValueError(
                f"`engram_layer_ids` must be layer indices in [0, {self.num_hidden_layers}), got {ids}: change them "
                "or `num_hidden_layers`."
            )
        if list(ids) != sorted(set(ids)):
            raise ValueError(
                f"`engram_layer_ids` must be ascending without repetition, got {ids}: use {sorted(set(ids))}."
            )
        self._check_int("engram_max_ngram_size", minimum=2)
        for name in ("engram_vocab_size", "engram_n_heads", "engram_head_dim", "engram_compressed_vocab_size"):
            self._check_int(name, minimum=1)
        self._check_int("engram_scale_block_size", minimum=1)
        check_layout(
            len(ids), self.engram_vocab_size, self.engram_max_ngram_size, self.engram_n_heads, self.engram_head_dim
        )
        placement_of_each(self.engram_placement, len(ids))
        if self.engram_compressed_vocab_size > self.vocab_size:
            raise ValueError(
                f"`engram_compressed_vocab_size` ({self.engram_compressed_vocab_size}) exceeds `vocab_size` "
                f"({self.vocab_size}): compression never adds ids. Raise `vocab_size` to at least that."
            )
        self._check_int("engram_pad_token_id", minimum=0)
        if self.engram_pad_token_id >= self.vocab_size:
            raise ValueError(
                f"`engram_pad_token_id` ({self.engram_pad_token_id}) is not below `vocab_size` ({self.vocab_size})."
            )
        if self.engram_token_map_size is not None:
            self._check_int("engram_token_map_size", minimum=1)
            if self.engram_token_map_size > self.vocab_size:
                raise ValueError(
                    f"`engram_token_map_size` ({self.engram_token_map_size}, the tokenizer's length) exceeds "
                    f"`vocab_size` ({self.vocab_size}): set `vocab_size` to at least len(tokenizer)."
                )
        if (self.engram_token_map_size is None) != (self.engram_token_map_sha256 is None):
            raise ValueError(
                f"`engram_token_map_size` ({self.engram_token_map_size}) and `engram_token_map_sha256` "
                f"({self.engram_token_map_sha256!r}) belong together: pass `**tokenizer.engram_fields()`."
            )
        sha256 = self.engram_token_map_sha256
        if sha256 is not None and not (isinstance(sha256, str) and SHA256.fullmatch(sha256)):
            raise ValueError(
                f"`engram_token_map_sha256` must be 64 hexadecimal digits, got {sha256!r}: pass "
                "`**tokenizer.engram_fields()`."
            )

    def save_pretrained(self, save_directory: str | os.PathLike, push_to_hub: bool = False, **kwargs: Any) -> None:
        """Saves config.json, and beside it, flat, the code that loads the folder without this package installed."""
        if os.path.isfile(save_directory):
            raise ValueError(f"`save_directory` ({save_directory}) is a file: pass a folder.")
        if not is_staged(save_directory):
            if push_to_hub:
                kwargs.setdefault("repo_id", os.path.basename(os.path.abspath(save_directory)))
            with FolderUpdate(save_directory) as update:
                self.save_pretrained(update.folder, push_to_hub, **kwargs)
            return
        self.validate()
        # A config loaded from a Hub folder has `_auto_class` set, and Transformers copies its code by itself.
        if self._auto_class is None and is_installed_package():
            self.auto_map = dict(MODEL_AUTO_MAP)
            export_code(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


__all__ = ["EngramConfig"]
