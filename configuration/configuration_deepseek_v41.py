"""Configuration of the DeepSeek-V4.1 text model."""

import os
from typing import Any

from transformers import PreTrainedConfig

from .configuration_engram import SMALLEST_EPS, EngramConfig
from .folder_update import FolderUpdate, is_staged
from .remote_code import export_code, is_installed_package


AUTO_MAP = {
    "AutoConfig": "configuration_deepseek_v41.DeepseekV41Config",
    "AutoModel": "modeling_deepseek_v41.DeepseekV41Model",
    "AutoModelForCausalLM": "modeling_deepseek_v41.DeepseekV41ForCausalLM",
}
# Values that share a scale in the rounded caches, see `cache_rounding.py`.
ROUNDED_GROUP = 32
SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "o_groups",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "max_position_embeddings",
    "hc_mult",
    "hc_sinkhorn_iters",
)
# Fields of the release that say how it is computed; other values would be another model, which is not here.
FIXED_FIELDS = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "attention_bias": False,
    "attention_dropout": 0.0,
}
BOOL_FIELDS = ("use_cache", "tie_word_embeddings", "cache_rounding", "activation_rounding")
YARN_FIELDS = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")


def nearest_source(sources: list[int], layer_idx: int) -> int | None:
    """The last of the ascending `sources` that is not after `layer_idx`; None if all are."""
    return max((source for source in sources if source <= layer_idx), default=None)


class DeepseekV41TextConfig(PreTrainedConfig):
    r"""
    Configuration of [`DeepseekV41Model`]: DeepSeek-V4.1's language model. Fields have the names of the released
    `text_config`; sizes default to those of a small model, not of the release.

    Args:
        vocab_size (`int`, defaults to 32000): number of token ids.
        hidden_size (`int`, defaults to 512): width D of one copy of the residual stream.
        moe_intermediate_size (`int`, defaults to 256): width of one expert.
        num_hidden_layers (`int`, defaults to 8): number of decoder layers.
        num_attention_heads (`int`, defaults to 8): number of query heads n.
        num_key_value_heads (`int`, defaults to 1): all heads share one key, which is also the value.
        head_dim (`int`, defaults to 64): width d of a head.
        qk_rope_head_dim (`int`, defaults to 32): last columns of a head that are rotated.
        q_lora_rank (`int`, defaults to 128): width of the query latent.
        o_lora_rank (`int`, defaults to 64): width of the output latent, per group.
        o_groups (`int`, defaults to 4): groups of heads in the output projection.
        hidden_act (`str`, defaults to `"silu"`): activation of the experts' gate.
        swiglu_limit (`float`, defaults to 10.0): the gate is clamped above, the other factor on both sides.
        rms_norm_eps (`float`, defaults to 1e-20): added to mean squares.
        attention_bias, attention_dropout: False and 0, as released.
        initializer_range (`float`, defaults to 0.02): standard deviation of the initial weights.
        use_cache (`bool`, defaults to `True`): whether forward returns a cache.
        pad_token_id, bos_token_id, eos_token_id (`int`, *optional*): special token ids.
        tie_word_embeddings (`bool`, defaults to `False`): whether the head shares the token embedding's weight.
        max_position_embeddings (`int`, defaults to 4096): longest sequence meant to be used.
        rope_theta (`float`, defaults to 10000): of layers without compressed entries.
        compress_rope_theta (`float`, defaults to 160000): of layers with compressed entries.
        rope_scaling (`dict`, *optional*): YaRN of layers with compressed entries: `factor`, `beta_fast`,
            `beta_slow`, `original_max_position_embeddings`; none if not given.
        n_routed_experts (`int`, defaults to 16): number of experts E.
        n_shared_experts (`int`, defaults to 1): experts that every token meets.
        num_experts_per_tok (`int`, defaults to 2): experts chosen for a token.
        scoring_func, topk_method, norm_topk_prob: `"sqrtsoftplus"`, `"noaux_tc"` and True, as released.
        routed_scaling_factor (`float`, defaults to 1.5): multiplies the chosen experts' weights.
        sliding_window (`int`, defaults to 128): tokens W that every layer sees directly, the token itself included.
        compress_ratios (`list[int]`, *optional*): for each layer the tokens m of a group whose compressed entries it
            reads, 0 for none; all 0 if not given. Further entries, of the draft's layers, must be 0.
        kv_source_layer_ids (`list[int]`, defaults to `[]`): layers that compress; later layers read the nearest.
        index_source_layer_ids (`list[int]`, defaults to `[]`): layers that choose groups; later layers reuse the
            nearest one's choice. Every layer that compresses is one.
        index_n_heads, index_head_dim (`int`, defaults to 8 and 32): heads of the indexer and their width.
        index_topk (`int`, defaults to 64): groups that a token attends to.
        candidate_source_layer_id (`int`, *optional*): the layer whose indexer also keeps blocks of groups, to which
            later index sources are restricted; None for no restriction.
        candidate_topk_blocks, candidate_block_size (`int`, defaults to 64 and 8): blocks kept, and groups in a block.
        hc_mult, hc_sinkhorn_iters, hc_eps, engram_*: as in [`EngramConfig`].
        cache_rounding (`bool`, defaults to `True`): whether keys, compressed entries, index keys and index queries
            are rounded to fp8 and fp4, at any length and in training too, as in the release.
        activation_rounding (`bool`, defaults to `False`): whether linears whose released weights are fp8 or fp4 round
            their input to fp8, as the release's kernels do. With it a bf16 model computes what the release does.

    Raises:
        ValueError: a field is out of its range or contradicts another; the message names both and the remedy.
    """

    model_type = "deepseek_v41_text"
    base_config_key = "text_config"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]

    vocab_size: int = 32000
    hidden_size: int = 512
    moe_intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 1
    head_dim: int = 64
    qk_rope_head_dim: int = 32
    q_lora_rank: int = 128
    o_lora_rank: int = 64
    o_groups: int = 4
    hidden_act: str = "silu"
    swiglu_limit: float | int = 10.0
    rms_norm_eps: float = 1e-20
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    rope_theta: float | int = 10000.0
    compress_rope_theta: float | int = 160000.0
    rope_scaling: dict | None = None
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    scoring_func: str = "sqrtsoftplus"
    topk_method: str = "noaux_tc"
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 1.5
    sliding_window: int = 128
    compress_ratios: list[int] | tuple[int, ...] | None = None
    kv_source_layer_ids: list[int] | tuple[int, ...] = ()
    index_source_layer_ids: list[int] | tuple[int, ...] = ()
    index_n_heads: int = 8
    index_head_dim: int = 32
    index_topk: int = 64
    candidate_source_layer_id: int | None = None
    candidate_topk_blocks: int = 64
    candidate_block_size: int = 8
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: list[int] | tuple[int, ...] = ()
    engram_max_ngram_size: int = 4
    engram_vocab_size: int = 20000
    engram_n_heads: int = 4
    engram_head_dim: int = 32
    engram_pad_token_id: int | None = None
    engram_compressed_vocab_size: int | None = None
    engram_num_embeddings: list[int] | tuple[int, ...] | None = None
    engram_token_map_size: int | None = None
    engram_token_map_sha256: str | None = None
    engram_placement: str | list[str] | tuple[str, ...] = "device"
    engram_scale_block_size: int = 32
    cache_rounding: bool = True
    activation_rounding: bool = False
    # What a model card says of where the weights came from.
    backbone_model_type: str | None = None
    backbone_name: str | None = None
    backbone_license: str | None = None

    # The same fields mean the same: their layout and their checks are EngramConfig's.
    layout = EngramConfig.layout
    _check_int = EngramConfig._check_int
    _check_engram_fields = EngramConfig._check_engram_fields

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_int("num_hidden_layers", minimum=1)
        self._check_int("vocab_size", minimum=1)
        if self.compress_ratios is None:
            self.compress_ratios = [0] * self.num_hidden_layers
        for name in ("compress_ratios", "kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids"):
            value = getattr(self, name)
            if not isinstance(value, (list, tuple)) or any(type(item) is not int for item in value):
                raise ValueError(f"`{name}` must be a list of integers, got {value!r}: use [] for none.")
            setattr(self, name, list(value))
        if self.engram_pad_token_id is None:
            self.engram_pad_token_id = self.pad_token_id if self.pad_token_id is not None else 0
        if self.engram_compressed_vocab_size is None:
            self.engram_compressed_vocab_size = self.vocab_size
        layer_types = kwargs.pop("layer_types", None)
        super().__post_init__(**kwargs)
        self._check_engram_fields()
        if self.engram_num_embeddings is None:
            self.engram_num_embeddings = list(self.layout().num_embeddings)
        self.engram_num_embeddings = list(self.engram_num_embeddings)
        self.validate()
        if layer_types is not None:
            self.layer_types = layer_types

    @property
    def layer_types(self) -> list[str]:
        """Kinds of cache layer, which are all one."""
        return ["deepseek_v41"] * self.num_hidden_layers

    @layer_types.setter
    def layer_types(self, layer_types: list[str]) -> None:
        if not isinstance(layer_types, (list, tuple)) or list(layer_types) != self.layer_types:
            raise ValueError(
                f"`layer_types` follows from `num_hidden_layers` and is {self.layer_types}, got {layer_types!r}: "
                "leave it out."
            )

    def kv_source(self, layer_idx: int) -> int | None:
        """The layer whose compressed entries `layer_idx` reads; None for a layer that reads none."""
        return nearest_source(self.kv_source_layer_ids, layer_idx) if self.compress_ratios[layer_idx] else None

    def index_source(self, layer_idx: int) -> int | None:
        """The layer whose choice of groups `layer_idx` uses; None for a layer that reads none."""
        return nearest_source(self.index_source_layer_ids, layer_idx) if self.compress_ratios[layer_idx] else None

    def validate(self) -> None:
        """Checks every field; called on construction, when a model is built, and when the config is saved.

        Raises:
            ValueError: names the field, its value and the remedy.
        """
        for name in SIZE_FIELDS:
            self._check_int(name, minimum=1)
        for name in BOOL_FIELDS:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"`{name}` must be true or false, got {getattr(self, name)!r}.")
        for name, value in FIXED_FIELDS.items():
            if getattr(self, name) != value:
                raise ValueError(f"`{name}` must be {value!r} as in DeepSeek-V4.1, got {getattr(self, name)!r}.")
        for name in ("rms_norm_eps", "hc_eps", "initializer_range"):
            self._check_number(name, 0, 1)
        for name in ("swiglu_limit", "routed_scaling_factor", "rope_theta", "compress_rope_theta"):
            self._check_number(name, SMALLEST_EPS, float("inf"))
        if self.rms_norm_eps < SMALLEST_EPS:
            raise ValueError(
                f"`rms_norm_eps` ({self.rms_norm_eps!r}) is zero in fp32: use a small one, such as 1e-20."
            )
        if self.hc_mult > 1 and self.hc_eps >= 1 / self.hc_mult:
            raise ValueError(f"`hc_eps` ({self.hc_eps}) must be below 1 / `hc_mult` ({self.hc_mult}).")
        for name in ("pad_token_id", "bos_token_id"):
            value = getattr(self, name)
            if isinstance(value, int) and not 0 <= value < self.vocab_size:
                raise ValueError(f"`{name}` ({value}) must be a token id in [0, {self.vocab_size}), or None.")
        self._check_heads()
        self._check_rope_scaling()
        self._check_sources()
        self._check_engram_fields()
        expected = list(self.layout().num_embeddings)
        if self.engram_num_embeddings != expected:
            raise ValueError(
                f"`engram_num_embeddings` is {self.engram_num_embeddings!r}, but the other `engram_*` fields lay out "
                f"{expected}: leave it out, or restore the fields that the tables were made with."
            )
        # Not `super().validate()`, which knows no kinds of cache layer but Transformers' own.
        self.validate_output_attentions()
        self.validate_token_ids()

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ValueError(f"`{name}` must be a number from {low} to {high}, got {value!r}.")

    def _check_heads(self) -> None:
        if self.num_attention_heads % self.o_groups:
            raise ValueError(
                f"`o_groups` ({self.o_groups}) must divide `num_attention_heads` ({self.num_attention_heads})."
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(
                f"`num_experts_per_tok` ({self.num_experts_per_tok}) exceeds `n_routed_experts` "
                f"({self.n_routed_experts})."
            )
        for name in ("head_dim", "index_head_dim"):
            size = getattr(self, name)
            if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > size:
                raise ValueError(
                    f"`qk_rope_head_dim` ({self.qk_rope_head_dim}) must be even and at most `{name}` ({size})."
                )
            if self.cache_rounding and size % ROUNDED_GROUP:
                raise ValueError(
                    f"`{name}` ({size}) must be a multiple of {ROUNDED_GROUP}, of which values share a scale: change "
                    "it, or set `cache_rounding` to False."
                )

    def _check_rope_scaling(self) -> None:
        scaling = self.rope_scaling
        if scaling is None:
            return
        kind = scaling.get("rope_type", scaling.get("type")) if isinstance(scaling, dict) else None
        if kind != "yarn" or any(not isinstance(scaling.get(name), (int, float)) for name in YARN_FIELDS):
            raise ValueError(
                f"`rope_scaling` must be None or {{'rope_type': 'yarn'}} with numbers for {YARN_FIELDS}, "
                f"got {scaling!r}."
            )

    def _check_sources(self) -> None:
        """The lists of layers agree with each other. A reader of entries of another ratio would read wrong positions;
        an index source with keys of a later source would be filtered by blocks of other groups; and with fewer
        candidates than choices, groups that were not kept would be chosen."""
        layers, ratios = self.num_hidden_layers, self.compress_ratios
        if len(ratios) < layers or any(ratios[layers:]) or any(ratio < 0 for ratio in ratios):
            raise ValueError(
                f"`compress_ratios` must have an entry >= 0 for each of the {layers} layers, and only 0 after them, "
                f"got {ratios}."
            )
        for name in ("kv_source_layer_ids", "index_source_layer_ids"):
            ids = getattr(self, name)
            if ids != sorted(set(ids)) or any(not 0 <= i < layers or ratios[i] == 0 for i in ids):
                raise ValueError(
                    f"`{name}` must be ascending indices of layers with a `compress_ratios` above 0, got {ids} with "
                    f"ratios {ratios}."
                )
        missing = sorted(set(self.kv_source_layer_ids) - set(self.index_source_layer_ids))
        if missing:
            raise ValueError(
                f"`index_source_layer_ids` ({self.index_source_layer_ids}) lacks {missing} of `kv_source_layer_ids`: "
                "a layer that compresses also chooses."
            )
        for layer_idx in range(layers):
            source = self.kv_source(layer_idx)
            if ratios[layer_idx] and (source is None or ratios[source] != ratios[layer_idx]):
                raise ValueError(
                    f"Layer {layer_idx} reads groups of {ratios[layer_idx]} tokens (`compress_ratios`), but the "
                    f"nearest of `kv_source_layer_ids` ({self.kv_source_layer_ids}) is "
                    + ("missing." if source is None else f"layer {source}, which makes groups of {ratios[source]}.")
                )
        candidate = self.candidate_source_layer_id
        if candidate is None:
            return
        if candidate not in self.kv_source_layer_ids or any(i > candidate for i in self.kv_source_layer_ids):
            raise ValueError(
                f"`candidate_source_layer_id` ({candidate}) must be the last of `kv_source_layer_ids` "
                f"({self.kv_source_layer_ids}): it restricts all index sources after it, which must score its keys."
            )
        for name in ("candidate_topk_blocks", "candidate_block_size"):
            self._check_int(name, minimum=1)
        fewest = (self.candidate_topk_blocks - 1) * self.candidate_block_size + 1
        if fewest < self.index_topk:
            raise ValueError(
                f"`candidate_topk_blocks` ({self.candidate_topk_blocks}) blocks of `candidate_block_size` "
                f"({self.candidate_block_size}) groups may hold only {fewest} visible groups, fewer than `index_topk` "
                f"({self.index_topk}): raise the one or lower the other."
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
        if self._auto_class is None and is_installed_package():
            self.auto_map = dict(AUTO_MAP)
            export_code(save_directory)
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)


class DeepseekV41Config(DeepseekV41TextConfig):
    r"""
    [`DeepseekV41TextConfig`], and reads a released config.json, in which those fields are nested.

    Args:
        text_config (`dict` or [`DeepseekV41TextConfig`], *optional*): the released nesting. Its fields become this
            config's own; fields given beside it go before.
        vision_config (`dict`, *optional*): left aside, as are other fields of the release's vision part.
        quantization_config (`dict`, *optional*): how the release stores weights. They are dequantised when they are
            loaded, so it is left aside, too; another quantiser's is kept.
    """

    model_type = "deepseek_v41"
    base_config_key = ""

    def __init__(
        self,
        text_config: dict | PreTrainedConfig | None = None,
        vision_config: dict | None = None,
        quantization_config: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(text_config, PreTrainedConfig):
            text_config = text_config.to_dict()
        if not isinstance(text_config, (dict, type(None))):
            raise ValueError(f"`text_config` must be a dict or a config, got {text_config!r}.")
        fields = {**(text_config or {}), **kwargs}
        fields.pop("model_type", None)
        if quantization_config is not None and not is_release_quantization(quantization_config):
            fields["quantization_config"] = quantization_config
        super().__init__(**fields)
        if getattr(self, "auto_map", None) is None:
            self.auto_map = dict(AUTO_MAP)

    @property
    def text_config(self) -> "DeepseekV41Config":
        """This config, whose fields are those of the release's `text_config`."""
        return self


def is_release_quantization(quantization_config: Any) -> bool:
    """Whether weights are stored as in the release: e4m3 with a power of two for 32 x 32, packed fp4 experts."""
    fields = quantization_config if isinstance(quantization_config, dict) else {}
    return fields.get("quant_method") == "fp8" and fields.get("weight_block_size") == [32, 32]


__all__ = ["DeepseekV41Config", "DeepseekV41TextConfig"]
