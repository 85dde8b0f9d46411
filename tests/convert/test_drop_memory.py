"""Back again: without its memory, a converted model is one of Transformers' own classes."""

import json
import subprocess
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hf_engram import EngramConfig, EngramForCausalLM, EngramModel
from hf_engram.convert import FAMILIES, convert_backbone, drop_memory


SMALL = {"engram_layer_ids": [1, 2], "engram_vocab_size": 50, "engram_n_heads": 2, "engram_head_dim": 8}


def logits_of(model, *args) -> torch.Tensor:
    with torch.no_grad():
        return model(*args).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_round_trip(any_name, dtype, tmp_path, backbone, plain_tokenizer, ids):
    """Class, config, weights, generation config and logits are the backbone's again, also through both folders."""
    theirs = backbone(any_name)
    theirs = theirs.to(dtype)
    theirs.save_pretrained(tmp_path / "backbone")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "backbone")
    model, _ = convert_backbone(theirs, plain_tokenizer, **SMALL)
    model.save_pretrained(tmp_path / "engram")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "engram")
    with torch.no_grad():  # whatever the memory has learned
        model.model.layers[1].engram.wkv.weight.normal_()
    back = model.drop_memory()
    back.save_pretrained(tmp_path / "back")
    for there in (back, AutoModelForCausalLM.from_pretrained(tmp_path / "back")):
        assert type(there) is type(theirs) and not there.training
        expected = theirs.state_dict()
        assert there.state_dict().keys() == expected.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in there.state_dict().items())
        assert torch.equal(logits_of(there, ids(2, 11)), logits_of(theirs, ids(2, 11)))
        assert there.generation_config.to_diff_dict() == theirs.generation_config.to_diff_dict()
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("backbone", "back")]
    # Families without the field get the width that they compute.
    configs[0].setdefault("head_dim", configs[0]["hidden_size"] // configs[0]["num_attention_heads"])
    configs[1].setdefault("head_dim", configs[0]["head_dim"])
    for config in configs:
        for name in FAMILIES[config["model_type"]].ignored:
            config.pop(name, None)
    assert configs[0] == configs[1]
    weights = [path.read_bytes() for path in sorted(tmp_path.glob("back*/model.safetensors"))]
    assert len(weights) == 2 and weights[0] == weights[1]


def test_what_was_trained_beside_the_memory_stays(backbone, plain_tokenizer, ids):
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, **SMALL)
    with torch.no_grad():
        model.model.norm.weight.add_(1.0)
    assert not torch.equal(logits_of(model.drop_memory(), ids(1, 9)), logits_of(backbone(), ids(1, 9)))
    assert torch.equal(logits_of(model.drop_memory(), ids(1, 9)), logits_of(model, ids(1, 9)))


def test_stock_transformers_loads_it(tmp_path, backbone_folder, ids):
    """In a process that cannot import this package; the folder holds no code, and names no Engram class."""
    model = EngramForCausalLM.from_backbone(backbone_folder, **SMALL)
    expected = logits_of(model, ids(2, 9))
    model.drop_memory().save_pretrained(tmp_path / "back")
    assert not list((tmp_path / "back").glob("*.py"))
    assert "engram" not in (tmp_path / "back" / "config.json").read_text().lower()
    code = (
        "import sys; sys.modules['hf_engram'] = None\n"
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "folder, path = sys.argv[1:]\n"
        "ids, expected = torch.load(path)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "assert type(model).__module__ == 'transformers.models.llama.modeling_llama', type(model)\n"
        "assert torch.equal(model(ids).logits, expected)\n"
    )
    torch.save((ids(2, 9), expected), tmp_path / "expected.pt")
    arguments = [str(tmp_path / "back"), str(tmp_path / "expected.pt")]
    run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr


def test_the_plain_tokenizer_is_in_the_folder(tmp_path, backbone, plain_tokenizer):
    """As the README says: Transformers' own class reads it, and gives the same ids."""
    _, tokenizer = convert_backbone(backbone(), plain_tokenizer, **SMALL)
    tokenizer.save_pretrained(tmp_path)
    plain = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert type(plain) is PreTrainedTokenizerFast
    encoding = plain("The word, THE WORD")
    assert encoding["input_ids"] == plain_tokenizer("The word, THE WORD")["input_ids"]
    assert "hash_ids" not in encoding
    assert plain.chat_template == plain_tokenizer.chat_template
    assert plain.special_tokens_map == plain_tokenizer.special_tokens_map


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "llama"),
        ({"attention_bias": True}, "llama"),
        ({"attention_bias": True, "attention_output_bias": False}, "qwen2"),
        ({"use_qk_norm": True}, "qwen3"),
        ({"attention_bias": True, "attention_output_bias": False, "mlp_bias": True}, "seed_oss"),
    ],
)
def test_a_model_that_was_not_converted(tiny_model, random_ids, fields, expected):
    """Becomes the first family that can hold it, and computes what it did before its memory learned anything."""
    model = tiny_model(hc_mult=1, engram_layer_ids=[1], **fields)
    back = drop_memory(model)
    assert back.config.model_type == expected
    assert torch.equal(logits_of(back, random_ids(2, 9)), logits_of(model, random_ids(2, 9)))


def test_several_copies_are_refused(backbone, plain_tokenizer):
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, hc_mult=2, **SMALL)
    with pytest.raises(ValueError, match=r"`hc_mult` is 2: its sublayers read and write 2 copies"):
        model.drop_memory()


def test_what_no_family_can_hold(tiny_model, backbone, plain_tokenizer):
    model = tiny_model(hc_mult=1, use_qk_norm=True, mlp_bias=True)
    with pytest.raises(ValueError, match="A qwen3 model cannot have `mlp_bias` = True"):
        model.drop_memory()
    converted = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, **SMALL)
    converted.config.backbone_model_type = "gpt2"
    with pytest.raises(ValueError, match="`backbone_model_type` is 'gpt2'"):
        converted.drop_memory()


def test_not_a_model_with_memory(tiny_config, backbone, plain_tokenizer):
    for other in (EngramModel(tiny_config(hc_mult=1)), backbone(), EngramConfig()):
        with pytest.raises(TypeError, match="must be an EngramForCausalLM"):
            drop_memory(other)
    model = EngramForCausalLM.from_backbone(backbone(), plain_tokenizer, **SMALL)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2))
    with pytest.raises(TypeError, match="merge_and_unload"):
        drop_memory(adapted)
    drop_memory(adapted.merge_and_unload())
