"""DeepseekV41Config: the released nesting, and lists of layers that contradict each other."""

import json
from pathlib import Path

import pytest

from hf_engram import DeepseekV41Config, DeepseekV41TextConfig


CHECKPOINT = Path(__file__).parents[1] / "data" / "deepseek_v41"
TEXT = json.loads((CHECKPOINT / "config.json").read_text())["text_config"]


def test_nested_and_plain():
    nested = DeepseekV41Config.from_pretrained(CHECKPOINT)
    assert nested.hidden_size == 64 and nested.text_config is nested and nested.get_text_config() is nested
    assert nested.bos_token_id == 0 and nested.pad_token_id == 2
    plain = DeepseekV41Config(**{**TEXT, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2})
    assert {name: nested.to_dict()[name] for name in TEXT if name != "model_type"} == {
        name: plain.to_dict()[name] for name in TEXT if name != "model_type"
    }
    assert type(DeepseekV41TextConfig.from_pretrained(CHECKPOINT)) is DeepseekV41TextConfig
    assert DeepseekV41Config(text_config=DeepseekV41TextConfig(**TEXT)).compress_ratios == TEXT["compress_ratios"]
    assert DeepseekV41Config(text_config=TEXT, cache_rounding=False).cache_rounding is False


def test_vision_and_storage_are_left_aside(tmp_path):
    release = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    config = DeepseekV41Config(text_config=TEXT, vision_config={"depth": 3}, quantization_config=release)
    assert not hasattr(config, "vision_config") and not hasattr(config, "quantization_config")
    other = DeepseekV41Config(text_config=TEXT, quantization_config={"quant_method": "bitsandbytes"})
    assert other.quantization_config == {"quant_method": "bitsandbytes"}
    config.save_pretrained(tmp_path)
    again = DeepseekV41Config.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"compress_ratios": [0, 0, 2, 1, 2, 1, 1, 1]}, "Layer 3 reads groups of 1"),
        ({"compress_ratios": [0, 2, 2, 2, 2, 1, 1, 1]}, "Layer 1 reads groups of 2"),
        ({"compress_ratios": [0, 0, 2]}, "`compress_ratios`"),
        ({"compress_ratios": [0, 0, 2, 2, 2, 1, 1, 1, 2]}, "`compress_ratios`"),
        ({"kv_source_layer_ids": [2, 5, 4]}, "`kv_source_layer_ids`"),
        ({"kv_source_layer_ids": [0, 2, 4, 5]}, "`kv_source_layer_ids`"),
        ({"index_source_layer_ids": [2, 5, 7]}, "lacks \\[4\\]"),
        ({"candidate_source_layer_id": 4}, "`candidate_source_layer_id`"),
        ({"candidate_source_layer_id": 7}, "`candidate_source_layer_id`"),
        ({"candidate_topk_blocks": 2}, "only 5 visible groups"),
        ({"num_key_value_heads": 4}, "`num_key_value_heads`"),
        ({"scoring_func": "sigmoid"}, "`scoring_func`"),
        ({"head_dim": 40}, "`head_dim`"),
        ({"qk_rope_head_dim": 15}, "`qk_rope_head_dim`"),
        ({"o_groups": 3}, "`o_groups`"),
        ({"num_experts_per_tok": 9}, "`num_experts_per_tok`"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "`rope_scaling`"),
        ({"cache_rounding": "false"}, "`cache_rounding`"),
        ({"rms_norm_eps": 0.0}, "`rms_norm_eps`"),
        ({"engram_num_embeddings": [384, 553]}, "`engram_num_embeddings`"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        DeepseekV41Config(**{**TEXT, **fields})
