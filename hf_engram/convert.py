"""From a pretrained decoder to an Engram model that computes the same function, and back.

Which decoders can be represented, and how their configs read as an `EngramConfig`, is data: `FAMILIES`, one table a
family. Weights keep their names, so nothing has to be said about them but what is left over.
"""

import copy
import os
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    logging,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .backbone_origin import backbone_origin
from .configuration.configuration_engram import EngramConfig
from .modeling_engram.modeling_engram import EngramForCausalLM
from .tokenization.token_map import check_tokenizer_size
from .tokenization.tokenization_engram import EngramTokenizer


# Fields that every family and EngramConfig share, by one name.
SHARED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "rope_parameters",
    "attention_dropout",
)


@dataclass(frozen=True)
class Family:
    """How the config of one family of decoders reads as an `EngramConfig`.

    Args:
        own: for each field of `EngramConfig` in which families differ, the name of the backbone's field, or the value
            that its architecture has built in.
        required: fields of the backbone that have one value an Engram model can represent.
        ignored: fields of the backbone that do not change what the model computes.
    """

    own: dict[str, str | bool]
    required: dict[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


NO_BIASES = {"attention_bias": False, "attention_output_bias": False, "mlp_bias": False}
LLAMA = {"attention_bias": "attention_bias", "attention_output_bias": "attention_bias", "mlp_bias": "mlp_bias"}
FULL_ATTENTION = {"use_sliding_window": False, "sliding_window": None}

# By `model_type`. To add one: its layer must be norm, attention, norm, gated MLP with these names and this arithmetic;
# tests/convert compares the logits of every entry bit for bit.
FAMILIES = {
    "llama": Family({**LLAMA, "use_qk_norm": False}, ignored=("pretraining_tp",)),
    "mistral": Family({**NO_BIASES, "use_qk_norm": False}, required={"sliding_window": None}),
    "qwen2": Family(
        {**NO_BIASES, "attention_bias": True, "use_qk_norm": False},
        required=FULL_ATTENTION,
        ignored=("max_window_layers", "layer_types"),
    ),
    "qwen3": Family(
        {**LLAMA, "mlp_bias": False, "use_qk_norm": True},
        required=FULL_ATTENTION,
        ignored=("max_window_layers", "layer_types"),
    ),
    "internlm3": Family({**LLAMA, "use_qk_norm": False}),
    "iquestcoder": Family({**LLAMA, "use_qk_norm": False}),
    "seed_oss": Family(
        {**LLAMA, "attention_output_bias": "attention_out_bias", "use_qk_norm": False},
        required={"residual_dropout": 0.0},
        ignored=("pretraining_tp",),
    ),
}

# What other decoders have and this one has not, by the config field that tells.
OBSTACLES = {
    "sliding_window": "attention within a window",
    "attn_logit_softcapping": "soft-capped attention logits",
    "final_logit_softcapping": "soft-capped logits",
    "num_local_experts": "a mixture of experts",
    "num_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
    "moe_num_experts": "a mixture of experts",
    "use_parallel_residual": "attention and MLP in parallel",
    "parallel_attn": "attention and MLP in parallel",
    "layer_norm_eps": "LayerNorm in place of RMSNorm",
    "layer_norm_epsilon": "LayerNorm in place of RMSNorm",
    "norm_epsilon": "LayerNorm in place of RMSNorm",
    "norm_eps": "LayerNorm in place of RMSNorm",
    "use_post_norm": "norms after the sublayers",
    "clip_qkv": "clipped queries, keys and values",
    "kv_lora_rank": "latent attention",
    "no_rope_layers": "layers without rotary embedding",
    "query_pre_attn_scalar": "another scale of attention logits",
    "attention_multiplier": "another scale of attention logits",
    "embedding_multiplier": "scaled embeddings",
    "residual_multiplier": "scaled sublayer outputs",
    "logits_scaling": "scaled logits",
    "logit_scale": "scaled logits",
    "is_encoder_decoder": "an encoder",
    "text_config": "a model of more than text",
}

# Fields of the new config besides the backbone's: any of EngramConfig with these prefixes.
OWN_PREFIXES = ("engram_", "hc_")
DERIVED_FIELDS = {"engram_layer_ids", "engram_num_embeddings", "engram_token_map_size", "engram_token_map_sha256"}
# The copies' mixing weights add up to 1 - hc_eps. The default of 1e-6, times two sublayers a layer, is more than the
# rounding of fp32: over the 30 layers of SmolLM2-135M it moves logits by 3e-3, this by no more than rounding does.
CONVERTED_HC_EPS = 1e-8
INIT_TABLES = ("random", "zero")
# By which a tokenizer is known. Not the padding's: many set it as they need it.
TOKEN_IDS = ("bos_token_id", "eos_token_id")


def convert_backbone(
    model_or_path: PreTrainedModel | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    engram_layer_ids: list[int] | None = None,
    hc_mult: int = 1,
    init_tables: str = "random",
    model_class: type[PreTrainedModel] = EngramForCausalLM,
    **engram_fields: Any,
) -> tuple[EngramForCausalLM, EngramTokenizer]:
    """Puts Engram layers, and with `hc_mult > 1` a multi-copy residual stream, into a pretrained decoder.

    With `hc_mult=1` the new model's logits are the backbone's bit for bit, because the value half of every `wkv`, or
    every table row, starts at zero. With more copies they agree up to rounding: the copies start equal, and are mixed
    by weights that add up to one.

    What training changes, and when. Engram, with `init_tables="random"`: the first optimizer step moves the value half
    of `wkv` alone, since value and gate are multiplied and the value is zero; from the second step on gradients also
    reach its key half, the gate's weights and the tables. With `"zero"`: the first step moves the table rows of the
    batch alone, the next ones `wkv` and the gate's weights, too. A learning rate that warms up from zero keeps what
    comes second still for one step more. Stream: `scale` is zero and the copies are equal, so the first step moves
    `scale` and `base`; from then on `fn`, which starts random, makes the copies differ.

    Weights are moved, not copied: the new model shares the backbone's storage, so do not train or change the backbone
    afterwards. They keep dtype and device; new weights get the same, except that the stream's parameters are fp32.
    New weights are drawn from PyTorch's generator (`torch.manual_seed`).

    Args:
        model_or_path: a causal language model of one of the `FAMILIES`, or where to load it from.
        tokenizer: the backbone's, plain or as [`EngramTokenizer`]. None loads the one that lies beside the backbone.
        engram_layer_ids: decoder layers that get an Engram layer, ascending. None: the tokenizer's if it is an
            [`EngramTokenizer`], else the second layer and the one after the middle.
        hc_mult: copies of the residual stream; 1 keeps the plain residual, and allows [`drop_memory`].
        init_tables: `"random"` rows, read by values of zero; or rows of `"zero"`, read by random values, which learn
            faster (benchmarks/init_tables.py) and are what a model made without a backbone starts with.
        model_class: the class to make.
        engram_fields: any other field of [`EngramConfig`] that begins with `engram_` or `hc_`. Here, `hc_eps`
            defaults to 1e-8.

    Returns:
        the model, with the tokenizer bound to it, and the tokenizer.

    Raises:
        TypeError: an argument is not of the kind described, or a field is unknown.
        ValueError: the backbone cannot be represented (the message names the field), is quantised, or the tokenizer or
            `engram_layer_ids` are not for it. Raised before any weight is loaded.
    """
    if init_tables not in INIT_TABLES:
        raise ValueError(f"`init_tables` must be one of {', '.join(map(repr, INIT_TABLES))}, got {init_tables!r}.")
    config, tokenizer = prepare_conversion(model_or_path, tokenizer, engram_layer_ids, hc_mult, **engram_fields)
    if isinstance(model_or_path, PreTrainedModel):
        backbone = model_or_path
    else:
        backbone = AutoModelForCausalLM.from_pretrained(model_or_path, dtype="auto")
    _check_weights(backbone)
    # The class may be a Hub folder's, which has a config class of its own.
    if not isinstance(config, model_class.config_class):
        config = model_class.config_class.from_dict(config.to_dict())
    # New tables are made beside the model, and then moved.
    placement, config.engram_placement = config.engram_placement, "device"
    model = _take_over(model_class, config, backbone, backbone.state_dict())
    if config.engram_layer_ids:
        if init_tables == "random":
            _randomise_tables(model)
        model.engram_memory.to_placement(placement)
        model.bind_tokenizer(tokenizer)
    return model, tokenizer


def prepare_conversion(
    model_or_path: PreTrainedModel | str | os.PathLike,
    tokenizer: PreTrainedTokenizerBase | None = None,
    engram_layer_ids: list[int] | None = None,
    hc_mult: int = 1,
    **engram_fields: Any,
) -> tuple[EngramConfig, EngramTokenizer]:
    """The new model's config and tokenizer, as [`convert_backbone`] would make them, without loading any weight.

    Raises:
        TypeError, ValueError: as [`convert_backbone`].
    """
    known = {f.name for f in fields(EngramConfig) if f.name.startswith(OWN_PREFIXES)} - DERIVED_FIELDS - {"hc_mult"}
    engram_fields = {"hc_eps": CONVERTED_HC_EPS, **engram_fields}
    placement = engram_fields.get("engram_placement", "device")
    if "disk" in (placement if isinstance(placement, (list, tuple)) else [placement]):
        raise ValueError(
            f"`engram_placement` is {placement!r}, but a converted model's tables are in no file yet: leave it out, "
            "save the model, and load it with that."
        )
    if unknown := sorted(set(engram_fields) - known):
        raise TypeError(
            f"{unknown} cannot be set: other fields are the backbone's, or follow. Those that can be given are "
            f"{sorted(known)}."
        )
    if isinstance(model_or_path, PreTrainedModel):
        config, source = model_or_path.config, model_or_path.name_or_path
        family = _family(config)
        _check_class(model_or_path)
        generation_config = model_or_path.generation_config
    elif isinstance(model_or_path, (str, os.PathLike)):
        config, source = AutoConfig.from_pretrained(model_or_path), model_or_path
        family = _family(config)
        generation_config = _load_or_none(GenerationConfig, source)
    else:
        raise TypeError(
            "`model_or_path` must be a Transformers causal language model, or where to load one from, got "
            f"{type(model_or_path).__name__}. Of a PEFT model, pass `model.merge_and_unload()`."
        )
    if tokenizer is None:
        if not source:
            raise ValueError(
                "`tokenizer` is None, and the model does not say where it was loaded from: pass the backbone's "
                "tokenizer."
            )
        try:
            tokenizer = own_tokenizer = AutoTokenizer.from_pretrained(source)
        except (OSError, ValueError) as error:
            raise ValueError(f"`tokenizer` is None, and none can be loaded from {source}: pass one.") from error
    else:
        # A model may say that it was loaded from a place that is gone, or was never one.
        own_tokenizer = _load_or_none(AutoTokenizer, source) if source is model_or_path else None
    _check_tokenizer(tokenizer, own_tokenizer, config, generation_config)

    n_layers = config.num_hidden_layers
    if engram_layer_ids is None and not hasattr(tokenizer, "engram_fields"):
        engram_layer_ids = sorted({min(1, n_layers - 1), n_layers // 2})
    backbone_fields = _backbone_fields(config, family)
    # Made once without the tokenizer, whose map takes a while: layers beyond the depth and the like are named here.
    if engram_layer_ids is not None:
        engram_fields = {**engram_fields, "engram_layer_ids": engram_layer_ids}
        EngramConfig(**backbone_fields, hc_mult=hc_mult, **engram_fields)
    tokenizer = _engram_tokenizer(tokenizer, engram_fields)
    new_config = EngramConfig(
        **backbone_fields,
        hc_mult=hc_mult,
        **{**engram_fields, **tokenizer.engram_fields()},
        backbone_model_type=config.model_type,
        **backbone_origin(source),
        dtype=config.dtype,
    )
    return new_config, tokenizer


def drop_memory(model: EngramForCausalLM) -> PreTrainedModel:
    """The decoder without its memory, in the original architecture: Transformers' own class, as it saves and loads it.

    The family is the one that the model was converted from (`config.backbone_model_type`); a model that was made
    otherwise becomes the first of the `FAMILIES` that can hold it, a Llama as a rule. Weights are moved as in
    [`convert_backbone`]: the new model shares them with `model`. What the memory contributed is gone, so the logits
    are the backbone's again only if nothing else was trained since.

    Args:
        model ([`EngramForCausalLM`]): with `hc_mult=1`.

    Raises:
        TypeError: `model` is not an `EngramForCausalLM`.
        ValueError: the model has several copies of the residual stream, or no family can hold its fields.
    """
    config = getattr(model, "config", None)
    if not isinstance(model, PreTrainedModel) or config.model_type != "engram" or not hasattr(model, "lm_head"):
        raise TypeError(
            f"`model` must be an EngramForCausalLM, got {type(model).__name__}. Of a PEFT model, pass "
            "`model.merge_and_unload()`."
        )
    if config.hc_mult > 1:
        raise ValueError(
            f"The model's `hc_mult` is {config.hc_mult}: its sublayers read and write {config.hc_mult} copies of the "
            "residual stream through weights of their own, which no other architecture has a place for. Memory can "
            "be dropped from a model that was converted with `hc_mult=1`."
        )
    recorded = config.backbone_model_type
    refusals = []
    for model_type in FAMILIES if recorded is None else [recorded]:
        try:
            backbone_config = _backbone_config(config, model_type)
            break
        except ValueError as error:
            refusals.append(str(error))
    else:
        raise ValueError("No known architecture can hold the model without its memory. " + " ".join(refusals))
    weights = {name: weight for name, weight in model.state_dict().items() if not _is_memory(name)}
    return _take_over(MODEL_FOR_CAUSAL_LM_MAPPING[type(backbone_config)], backbone_config, model, weights)


def saved_bytes(config: EngramConfig) -> int:
    """Bytes that the weights of a model with this config take on disk, in the config's dtype (fp32 if it has none)."""
    with torch.device("meta"):
        model = EngramForCausalLM(config).to(config.dtype or torch.float32)
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def _family(config: PreTrainedConfig) -> Family:
    """The table of a backbone's config, after every field of it is known to be representable."""
    _refuse_quantised(config)
    model_type = config.model_type
    if model_type == "engram":
        raise ValueError("The backbone is an Engram model already: load it with `EngramForCausalLM.from_pretrained`.")
    in_the_way = []
    for name, reason in OBSTACLES.items():
        value = getattr(config, name, None)
        # A factor of 1.0 changes nothing; one expert is still a mixture.
        if value not in (None, False, 0) and not (isinstance(value, float) and value == 1):
            in_the_way.append(f"`{name}` ({reprlib.repr(value)}: {reason})")
    family = FAMILIES.get(model_type)
    if family is None:
        reason = f" In the way: {', '.join(in_the_way)}." if in_the_way else ""
        raise ValueError(
            f"A backbone with `model_type` {model_type!r} cannot be represented.{reason} Families that can are "
            f"{', '.join(FAMILIES)}."
        )
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if kinds:
        in_the_way.append(f"`layer_types` (has {', '.join(map(repr, kinds))}: only 'full_attention' is known)")
    if getattr(config, "is_heterogeneous", False):
        in_the_way.append("`per_layer_config` (layers that differ from each other)")
    for name, value in family.required.items():
        if name not in OBSTACLES and getattr(config, name, value) != value:
            in_the_way.append(f"`{name}` ({getattr(config, name)!r}: only {value!r} is known)")
    # A field that a later release of Transformers brings may change what the model computes.
    mapped = {
        *SHARED_FIELDS,
        *family.required,
        *family.ignored,
        *(v for v in family.own.values() if isinstance(v, str)),
    }
    common = {f.name for f in fields(PreTrainedConfig)}
    for f in fields(config):
        if f.name not in mapped | common and getattr(config, f.name) != f.default:
            in_the_way.append(f"`{f.name}` ({getattr(config, f.name)!r}: not known to this package)")
    if in_the_way:
        raise ValueError(
            f"This {model_type} model cannot be represented. In the way: {', '.join(in_the_way)}. If it can do "
            "without, load it with the field overridden (`AutoModelForCausalLM.from_pretrained(path, field=value)`) "
            "and pass the model."
        )
    return family


def _refuse_quantised(config: PreTrainedConfig) -> None:
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
    method = getattr(method, "value", method)
    # A GGUF file is dequantised on loading; `_check_weights` sees whether it was.
    if method != "gguf":
        raise ValueError(
            f"The backbone's `quantization_config` says that it is quantised ({method}): use the checkpoint that it "
            "was made from, or dequantise it first (`model.dequantize()`) and save that."
        )


def _check_class(backbone: PreTrainedModel) -> None:
    expected = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(backbone.config), None)
    if type(backbone) is not expected:
        name = getattr(expected, "__name__", "Transformers' causal language model of that config")
        raise TypeError(
            f"`model_or_path` is a {type(backbone).__name__}, which may compute something else than the {name} that "
            "its config stands for: pass one of these."
        )
    _check_weights(backbone)


def _check_weights(backbone: PreTrainedModel) -> None:
    """Refuses weights that cannot be moved as they are: quantised, of several dtypes or devices, or tied otherwise
    than the config says."""
    dtypes = {weight.dtype for weight in backbone.parameters()}
    if not all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in dtypes):
        raise ValueError(f"The backbone's weights are quantised ({sorted(map(str, dtypes))}): dequantise it first.")
    if len(dtypes) > 1:
        raise ValueError(
            f"The backbone's weights have several dtypes ({sorted(map(str, dtypes))}): cast it with `.to(dtype)`."
        )
    devices = {str(weight.device) for weight in backbone.parameters()}
    if len(devices) > 1 or "meta" in devices:
        raise ValueError(
            f"The backbone's weights lie on {sorted(devices)}: load it on one device, without offloading."
        )
    tied = backbone.get_input_embeddings().weight is backbone.get_output_embeddings().weight
    if tied != backbone.config.tie_word_embeddings:
        raise ValueError(
            f"The config's `tie_word_embeddings` is {backbone.config.tie_word_embeddings}, but the backbone's head "
            f"{'shares' if tied else 'does not share'} the embedding's weight: set the field to what is meant."
        )


def _check_tokenizer(
    tokenizer: PreTrainedTokenizerBase,
    own_tokenizer: PreTrainedTokenizerBase | None,
    config: PreTrainedConfig,
    generation_config: GenerationConfig | None,
) -> None:
    """Refuses a tokenizer that contradicts the backbone's config, or the tokenizer that lies beside it."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"`tokenizer` must be a Transformers tokenizer, got {type(tokenizer).__name__}.")
    vocabulary = tokenizer.get_vocab()
    size = 1 + max(vocabulary.values(), default=-1)
    check_tokenizer_size(size, config.vocab_size)
    if size > config.vocab_size:
        raise ValueError(
            f"The tokenizer's ids go up to {size - 1}, but the backbone's `vocab_size` is {config.vocab_size}: it is "
            "another model's, or tokens were added to it. In that case call "
            f"`model.resize_token_embeddings({size})` on the backbone first."
        )
    for name in TOKEN_IDS:
        token_id, known = getattr(tokenizer, name), set()
        for source in (config, generation_config):
            value = getattr(source, name, None)
            known |= set(value) if isinstance(value, (list, tuple)) else {value} - {None}
        if token_id is not None and known and token_id not in known:
            raise ValueError(
                f"The tokenizer's `{name}` is {token_id}, the backbone's is {sorted(known)}: it is another model's "
                "tokenizer. If it is not, make the two agree first, in the backbone's config or the tokenizer."
            )
    if own_tokenizer is not None and tokenizer is not own_tokenizer:
        differing = own_tokenizer.get_vocab().items() - vocabulary.items()
        if differing:
            token, token_id = min(differing, key=lambda item: item[1])
            raise ValueError(
                f"The tokenizer is not the backbone's: for {len(differing)} tokens they disagree, for one, {token!r} "
                f"is {token_id} to the backbone and {vocabulary.get(token)} to `tokenizer`. Leave `tokenizer` out to "
                "take the backbone's own."
            )


def _engram_tokenizer(tokenizer: PreTrainedTokenizerBase, engram_fields: dict[str, Any]) -> EngramTokenizer:
    """The tokenizer with the layout of the new model's tables; one that has a layout must agree with the fields."""
    if hasattr(tokenizer, "engram_fields"):
        layout = tokenizer.engram_fields()
        for name, value in engram_fields.items():
            value = list(value) if name == "engram_layer_ids" else value
            if name in layout and value != layout[name]:
                raise ValueError(
                    f"`{name}` is given as {value}, but the EngramTokenizer has {layout[name]}: leave it out, or pass "
                    "the plain tokenizer."
                )
        return tokenizer
    names = ("layer_ids", "vocab_size", "max_ngram_size", "n_heads", "pad_token_id", "compressed_vocab_size")
    layout = {f"engram_{name}" for name in names} & engram_fields.keys()
    return EngramTokenizer.from_tokenizer(tokenizer, **{name: engram_fields[name] for name in layout})


def _backbone_fields(config: PreTrainedConfig, family: Family) -> dict[str, Any]:
    """The fields of an `EngramConfig` that a backbone's config determines."""
    values = {name: copy.deepcopy(getattr(config, name, None)) for name in SHARED_FIELDS}
    own = {name: getattr(config, value) if isinstance(value, str) else value for name, value in family.own.items()}
    return values | own


def _backbone_config(config: EngramConfig, model_type: str) -> PreTrainedConfig:
    """The config of `model_type` with a model's fields, other than those of the memory.

    Raises:
        ValueError: the family has no place for one of them.
    """
    if model_type not in FAMILIES or model_type not in CONFIG_MAPPING:
        known = [name for name in FAMILIES if name in CONFIG_MAPPING]
        raise ValueError(
            f"`backbone_model_type` is {model_type!r}; this package and the installed Transformers both know "
            f"{', '.join(known)}."
        )
    family = FAMILIES[model_type]
    values = {name: copy.deepcopy(getattr(config, name)) for name in SHARED_FIELDS} | family.required
    for name, theirs in family.own.items():
        value = getattr(config, name)
        built_in = values.setdefault(theirs, value) if isinstance(theirs, str) else theirs
        if value != built_in:
            raise ValueError(f"A {model_type} model cannot have `{name}` = {value!r}.")
    return CONFIG_MAPPING[model_type](**values, dtype=config.dtype)


def _is_memory(name: str) -> bool:
    """Whether a weight of an Engram model is one that no backbone has."""
    parts = name.split(".")
    return any(part in ("engram", "engram_memory", "engram_hasher", "attn_hc", "mlp_hc") for part in parts)


def _take_over(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, source: PreTrainedModel, weights: dict
) -> PreTrainedModel:
    """A model of `model_class` that shares `source`'s weights; those of the memory are made, if it has any."""
    device = source.device
    with _quiet():
        model, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=source.dtype,
            attn_implementation=source.config._attn_implementation,
            device_map=None if device.type == "cpu" else {"": device},
            output_loading_info=True,
        )
    missing = sorted(name for name in info["missing_keys"] if not _is_memory(name))
    if missing or info["unexpected_keys"]:
        raise ValueError(
            f"The weights are not those of a plain {config.model_type} model: {missing} are missing, and there is no "
            f"place for {sorted(info['unexpected_keys'])}. Merge or unload adapters first."
        )
    # Not part of a checkpoint, but of what the model computes: `.to(bfloat16)` rounds the frequencies, loading does
    # not, and dynamic ones have followed the longest sequence so far.
    rotary, source_rotary = model.model.rotary_emb, source.model.rotary_emb
    for name, buffer in source_rotary.named_buffers():
        setattr(rotary, name, buffer.clone())
    rotary.max_seq_len_cached = source_rotary.max_seq_len_cached
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.train(source.training)


@torch.no_grad()
def _randomise_tables(model: EngramForCausalLM) -> None:
    """Random rows in place of rows of zeros, and values of zero in place of random ones."""
    for table in model.base_model.engram_memory.tables:
        if table.weight is not None:
            table.weight.normal_(std=model.config.initializer_range)
    for layer_id in model.config.engram_layer_ids:
        layer = model.base_model.layers[layer_id].engram
        layer.wkv.weight[layer.hc_mult * layer.hidden_size :].zero_()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the report that a checkpoint lacks weights: here it is meant to."""
    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _load_or_none(loader: type, source: str | os.PathLike) -> Any:
    """What lies beside the backbone, or None if nothing does."""
    try:
        return loader.from_pretrained(source)
    except (OSError, ValueError):
        return None
