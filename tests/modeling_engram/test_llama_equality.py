"""A plain model (no Engram layers, one copy of the stream) with another architecture's weights computes its logits."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hf_engram import EngramConfig, EngramForCausalLM


SHARED = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}

# Class, its config's, fields for both, fields for ours alone.
LLAMAS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}, {}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}, {}),
    "llama_tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}, {}),
    "llama_all_heads": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}, {}),
    "llama_one_kv_head": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 1}, {}),
    "llama_head_dim": (LlamaForCausalLM, LlamaConfig, {"head_dim": 12}, {}),
    "llama_gelu": (LlamaForCausalLM, LlamaConfig, {"hidden_act": "gelu_pytorch_tanh"}, {}),
    "llama_theta": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}, {"attention_bias": True, "attention_output_bias": False}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 12}, {"use_qk_norm": True}),
    "qwen3_biases": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "attention_bias": True},
        {"use_qk_norm": True},
    ),
    "mistral": (MistralForCausalLM, MistralConfig, {}, {}),
}
MISTRAL_ONLY = {"sliding_window": None}

ROPE = {
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
    },
}


def pair(cls, config_cls, fields, ours, dtype=torch.float32, attention="sdpa"):
    """A random model of `cls`, and ours with its weights."""
    extra = MISTRAL_ONLY if config_cls is MistralConfig else {}
    torch.manual_seed(0)
    theirs = cls(config_cls(**{**SHARED, **fields, **extra}, attn_implementation=attention)).eval()
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias") or "norm" in name:
            parameter.data.add_(0.3 * torch.randn_like(parameter))
    config = EngramConfig(
        **{**SHARED, **fields, **ours}, engram_layer_ids=[], hc_mult=1, attn_implementation=attention
    )
    model = EngramForCausalLM(config).eval()
    missing, unexpected = model.load_state_dict(theirs.state_dict(), strict=True)
    assert not missing and not unexpected
    model.tie_weights()
    return theirs.to(dtype), model.to(dtype)


@torch.no_grad()
def assert_same_logits(theirs, ours, ids, **kwargs):
    expected, actual = theirs(ids, **kwargs).logits, ours(ids, **kwargs).logits
    assert expected.abs().max() > 0.1
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LLAMAS)
def test_same_logits(random_ids, name, dtype, attention):
    """Bit for bit, with and without padding."""
    theirs, ours = pair(*LLAMAS[name], dtype=dtype, attention=attention)
    ids = random_ids(2, 11)
    assert_same_logits(theirs, ours, ids)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    assert_same_logits(theirs, ours, ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0))


@pytest.mark.parametrize("rope", ROPE)
def test_same_logits_with_every_rope(random_ids, rope):
    """Bit for bit for each type of rotary embedding, beyond the original context, too."""
    theirs, ours = pair(LlamaForCausalLM, LlamaConfig, {"rope_parameters": ROPE[rope]}, {})
    assert_same_logits(theirs, ours, random_ids(2, 11))
    assert_same_logits(theirs, ours, random_ids(1, 80))
    assert_same_logits(theirs, ours, random_ids(2, 7, seed=3))


def test_same_loss_and_gradients(random_ids):
    """The loss bit for bit; gradients to 1e-6, since two branches are added up in another order."""
    theirs, ours = pair(*LLAMAS["llama"])
    ids = random_ids(2, 11)
    losses = [model(ids, labels=ids).loss for model in (theirs, ours)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        expected = gradients[name].grad
        assert (parameter.grad - expected).abs().max() <= 1e-6 * expected.abs().max(), name


def test_same_generation(random_ids):
    """Greedy tokens, with a cache."""
    theirs, ours = pair(*LLAMAS["llama"])
    ids = random_ids(2, 5)
    arguments = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    assert torch.equal(theirs.generate(ids, **arguments), ours.generate(ids, **arguments))


@pytest.mark.parametrize("position_ids", [None, torch.tensor([[0, 1, 2, 0, 1, 2, 3, 0, 1]])], ids=["plain", "packed"])
def test_same_hidden_states_and_attentions(random_ids, position_ids):
    """All hidden states and attention weights, also of packed documents."""
    theirs, ours = pair(*LLAMAS["llama"], attention="eager")
    kwargs = {"output_hidden_states": True, "output_attentions": True, "use_cache": False}
    with torch.no_grad():
        expected, actual = (m(random_ids(1, 9), position_ids=position_ids, **kwargs) for m in (theirs, ours))
    assert len(actual.hidden_states) == len(expected.hidden_states) == 4
    assert len(actual.attentions) == len(expected.attentions) == 3
    for name in ("hidden_states", "attentions"):
        assert all(torch.equal(a, e) for a, e in zip(actual[name], expected[name], strict=True)), name
