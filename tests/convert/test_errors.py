"""What cannot be converted is refused by name, before any weight is loaded."""

import copy
import json
import sys
from dataclasses import fields
from itertools import product

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import LlamaModel, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_engram import EngramForCausalLM, EngramTokenizer
from hf_engram.convert import FAMILIES, SHARED_FIELDS, convert_backbone


TINY = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}

# model_type, fields, and the field that the message names.
OTHERS = [
    ("mistral", {"sliding_window": 16}, "`sliding_window` \\(16"),
    ("mistral", {}, "`sliding_window` \\(4096"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "`sliding_window`"),
    ("qwen2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "`layer_types`"),
    ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, "`use_sliding_window` \\(True"),
    ("seed_oss", {"residual_dropout": 0.1}, "`residual_dropout` \\(0.1"),
    ("llama", {"attn_logit_softcapping": 50.0}, "`attn_logit_softcapping` \\(50.0"),
    ("llama", {"num_local_experts": 1}, "`num_local_experts` \\(1"),
    ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "`quantization_config`.*gptq"),
    ("mixtral", {}, "`num_local_experts`.*a mixture of experts"),
    ("qwen3_moe", {}, "`num_experts`.*a mixture of experts"),
    ("gemma2", {}, "`final_logit_softcapping` \\(30.0"),
    ("gemma", {}, "`model_type` 'gemma'"),
    ("cohere", {}, "`logit_scale`"),
    ("gpt_neox", {}, "`use_parallel_residual`"),
    ("falcon", {}, "`parallel_attn`"),
    ("stablelm", {}, "`layer_norm_eps`"),
    ("deepseek_v3", {}, "`kv_lora_rank`"),
    ("smollm3", {}, "`no_rope_layers`"),
    ("granite", {"residual_multiplier": 0.22}, "`residual_multiplier` \\(0.22"),
    ("phi3", {}, "Families that can are llama"),
]


@pytest.mark.parametrize(("model_type", "given", "message"), OTHERS)
def test_backbones_that_cannot_be_represented(tmp_path, model_type, given, message, plain_tokenizer):
    """From config.json alone: the folder holds no weights."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers does not know {model_type}")
    config = CONFIG_MAPPING[model_type](**(TINY if model_type in ("llama", "mistral", "qwen2", "qwen3") else {}))
    config = config.to_dict() | given
    if "use_sliding_window" in given:
        config |= {"sliding_window": 4096, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        EngramForCausalLM.from_backbone(tmp_path, plain_tokenizer)


def test_layers_that_differ(backbone, plain_tokenizer):
    theirs = backbone()
    if not hasattr(theirs.config, "is_heterogeneous"):
        pytest.skip("this Transformers has no layers that differ")
    theirs.config.per_layer_config = {1: {"intermediate_size": 24}}
    with pytest.raises(ValueError, match="`per_layer_config`"):
        EngramForCausalLM.from_backbone(theirs, plain_tokenizer)


def test_a_field_that_is_not_known_yet(backbone, plain_tokenizer, monkeypatch):
    """One that a later Transformers may bring, once it is not at its default."""
    theirs = backbone()
    known = type(theirs.config).__dataclass_fields__
    field = copy.copy(known["mlp_bias"])
    field.name = "attention_sinks"
    monkeypatch.setitem(known, "attention_sinks", field)
    theirs.config.attention_sinks = False
    EngramForCausalLM.from_backbone(theirs, plain_tokenizer)
    theirs.config.attention_sinks = True
    with pytest.raises(ValueError, match="`attention_sinks` \\(True: not known"):
        EngramForCausalLM.from_backbone(theirs, plain_tokenizer)


def test_every_field_of_every_family_is_known(any_name, backbone, plain_tokenizer):
    """A new release's field shows here first: it must be mapped, required or ignored in the family's table."""
    config = backbone(any_name).config
    family = FAMILIES[config.model_type]
    known = {
        *SHARED_FIELDS,
        *family.required,
        *family.ignored,
        *(v for v in family.own.values() if isinstance(v, str)),
    }
    assert {f.name for f in fields(config)} - {f.name for f in fields(PreTrainedConfig)} <= known


@pytest.mark.parametrize(("layers", "wrapped"), [([4], False), ([1, 99], False), ([-1], False), ([1, 4], True)])
def test_layers_beyond_the_depth(backbone_folder, plain_tokenizer, layers, wrapped):
    (backbone_folder / "model.safetensors").unlink()
    tokenizer = plain_tokenizer
    if wrapped:
        tokenizer, layers = EngramTokenizer.from_tokenizer(plain_tokenizer, engram_layer_ids=layers), None
    with pytest.raises(ValueError, match=r"`engram_layer_ids` must be layer indices in \[0, 4\)"):
        EngramForCausalLM.from_backbone(backbone_folder, tokenizer, engram_layer_ids=layers)


def test_too_many_tokens(backbone, plain_tokenizer):
    theirs = backbone(vocab_size=299)
    with pytest.raises(ValueError, match=r"ids go up to 299, but the backbone's `vocab_size` is 299.*\(300\)"):
        EngramForCausalLM.from_backbone(theirs, plain_tokenizer)
    theirs.resize_token_embeddings(300)
    EngramForCausalLM.from_backbone(theirs, plain_tokenizer)


@pytest.mark.parametrize("name", ["bos_token", "eos_token"])
def test_other_special_ids(backbone, plain_tokenizer, name):
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | {name: "<|eot|>"}
    other = PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer.backend_tokenizer, **tokens)
    theirs = backbone()
    with pytest.raises(ValueError, match=f"`{name}_id` is 3, the backbone's is"):
        EngramForCausalLM.from_backbone(theirs, other)
    # An id that the generation config names is the backbone's, too.
    setattr(theirs.generation_config, f"{name}_id", 3)
    EngramForCausalLM.from_backbone(theirs, other)


def test_another_padding(backbone, plain_tokenizer):
    """Many pad with the token that ends a sequence: no sign of another model's tokenizer."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
    other = PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer.backend_tokenizer, **tokens)
    EngramForCausalLM.from_backbone(backbone(), other)


def test_another_vocabulary(backbone_folder, backbone, plain_tokenizer):
    """Of the same size and special ids; compared with the tokenizer beside the weights."""
    state = json.loads(plain_tokenizer.backend_tokenizer.to_str())
    vocabulary = state["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    other = PreTrainedTokenizerFast(
        tokenizer_object=type(plain_tokenizer.backend_tokenizer).from_str(json.dumps(state)),
        **plain_tokenizer.special_tokens_map,
    )
    with pytest.raises(ValueError, match=r"not the backbone's: for 2 tokens they disagree, for one, 'a'"):
        EngramForCausalLM.from_backbone(backbone_folder, other)
    # With tokens added, for which the embeddings have room, it still is the backbone's.
    larger = copy.deepcopy(plain_tokenizer)
    larger.add_tokens(["<new>"])
    EngramForCausalLM.from_backbone(backbone_folder, larger)


def test_no_tokenizer(tmp_path, backbone):
    theirs = backbone()
    with pytest.raises(ValueError, match="does not say where it was loaded from"):
        EngramForCausalLM.from_backbone(theirs)
    theirs.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="`tokenizer` is None, and none can be loaded from"):
        EngramForCausalLM.from_backbone(tmp_path)


MADE_UP = ["llama", "qwen2", "qwen3", "mistral", "seed_oss"]


@pytest.mark.parametrize("name", MADE_UP)
def test_folder_without_tokenizer_files(tmp_path, backbone, name):
    """For some families Transformers makes up a tokenizer of one token where there is none; for others it finds none.
    Either way nothing is converted, and no weight is loaded: the folder has none."""
    backbone(name).config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"`tokenizer` is None, and none can be loaded|1 token ids.*`vocab_size` 320"):
        convert_backbone(tmp_path)


def tokenizer_of(*texts: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token=texts[0]))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("wrapped", [False, True])
def test_far_too_few_tokens(backbone, wrapped):
    """With less than half of the backbone's rows it is another model's; from half on it may be this one's."""
    for size in (159, 160):
        tokenizer = tokenizer_of(*(f"word{i}" for i in range(size)))
        if wrapped:
            tokenizer = EngramTokenizer.from_tokenizer(tokenizer, engram_vocab_size=50, engram_pad_token_id=0)
        fields = {} if wrapped else {"engram_vocab_size": 50, "engram_pad_token_id": 0}
        if size == 159:
            with pytest.raises(ValueError, match=r"159 token ids.*`vocab_size` 320"):
                convert_backbone(backbone(), tokenizer, **fields)
        else:
            assert convert_backbone(backbone(), tokenizer, **fields)[0].model.engram_hasher.is_bound


def test_tokens_that_are_all_one(backbone):
    """They would all read the same rows."""
    tokenizer = tokenizer_of(*("".join(letters) for letters in product("aA", repeat=8)))
    with pytest.raises(ValueError, match=r"All 256 tokens normalise alike"):
        convert_backbone(backbone(), tokenizer, engram_vocab_size=50, engram_pad_token_id=0)


@pytest.mark.parametrize("tokenizer", ["a path", 3])
def test_not_a_tokenizer(backbone, tokenizer):
    with pytest.raises(TypeError, match=r"`tokenizer` must be a Transformers tokenizer, got (str|int)"):
        EngramForCausalLM.from_backbone(backbone(), tokenizer)


def test_fields_that_contradict_the_tokenizer(backbone, plain_tokenizer):
    tokenizer = EngramTokenizer.from_tokenizer(plain_tokenizer, engram_layer_ids=[1], engram_n_heads=2)
    for name, value in (("engram_layer_ids", [2]), ("engram_n_heads", 4)):
        with pytest.raises(ValueError, match=f"`{name}` is given as .*, but the EngramTokenizer has"):
            EngramForCausalLM.from_backbone(backbone(), tokenizer, **{name: value})


@pytest.mark.parametrize("field", ["hidden_size", "engram_num_embeddings", "engram_token_map_size", "rows"])
def test_fields_that_cannot_be_given(backbone, plain_tokenizer, field):
    with pytest.raises(TypeError, match=rf"\['{field}'\] cannot be set"):
        EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, **{field: 3})


def test_models_of_another_class(backbone, plain_tokenizer):
    theirs = backbone()
    with pytest.raises(TypeError, match="is a LlamaModel, which"):
        EngramForCausalLM.from_backbone(LlamaModel(theirs.config), plain_tokenizer)
    with pytest.raises(TypeError, match="`model_or_path` must be a Transformers causal language model"):
        EngramForCausalLM.from_backbone(torch.nn.Linear(2, 2), plain_tokenizer)
    ours = EngramForCausalLM.from_backbone(theirs, plain_tokenizer)
    with pytest.raises(ValueError, match="is an Engram model already"):
        EngramForCausalLM.from_backbone(ours, plain_tokenizer)
    adapted = get_peft_model(theirs, LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(TypeError, match=r"merge_and_unload"):
        EngramForCausalLM.from_backbone(adapted, plain_tokenizer)
    # LoRA's modules are in the base model, too.
    with pytest.raises(ValueError, match="not those of a plain"):
        EngramForCausalLM.from_backbone(adapted.get_base_model(), plain_tokenizer)


def test_weights_that_cannot_be_moved(backbone, plain_tokenizer):
    mixed = backbone()
    mixed.model.norm.to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"several dtypes \(\['torch.bfloat16', 'torch.float32'\]\)"):
        EngramForCausalLM.from_backbone(mixed, plain_tokenizer)
    eight_bits = backbone()
    eight_bits.model.norm.weight = torch.nn.Parameter(torch.ones(32, dtype=torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="weights are quantised"):
        EngramForCausalLM.from_backbone(eight_bits, plain_tokenizer)
    with pytest.raises(ValueError, match=r"lie on \['meta'\]"):
        EngramForCausalLM.from_backbone(backbone().to("meta"), plain_tokenizer)
    untied = backbone(tie_word_embeddings=False)
    untied.config.tie_word_embeddings = True
    with pytest.raises(ValueError, match="`tie_word_embeddings` is True, but the backbone's head does not share"):
        EngramForCausalLM.from_backbone(untied, plain_tokenizer)


def test_where_the_package_is_missing(tmp_path, backbone, plain_tokenizer, monkeypatch):
    """A model loaded from a Hub folder has the methods, but not the code behind them."""
    model, tokenizer = convert_backbone(backbone(), plain_tokenizer, engram_vocab_size=50)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "hf_engram.convert", None)
    monkeypatch.setitem(sys.modules, "hf_engram", None)
    with pytest.raises(ImportError, match="install hf-engram"):
        model.drop_memory()
    with pytest.raises(ImportError, match="install hf-engram"):
        EngramForCausalLM.from_backbone(backbone(), plain_tokenizer)


def test_other_errors_of_loading_are_not_hidden(tmp_path, plain_tokenizer):
    with pytest.raises(OSError):
        EngramForCausalLM.from_backbone(tmp_path / "nowhere", plain_tokenizer)
