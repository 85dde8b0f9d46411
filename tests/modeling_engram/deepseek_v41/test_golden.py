"""What DeepSeek's own code computes, with the small model of v41_helpers.py."""

import pytest
import torch
from v41_helpers import CHECKPOINT, load_model, recorded, stepwise

from hf_engram.modeling_engram.deepseek_v41.cache_rounding import round_fp4, round_fp4_fine, round_fp8
from hf_engram.modeling_engram.deepseek_v41.released_checkpoint import RawTensor, ReleasedTensor
from hf_engram.modeling_engram.deepseek_v41.v41_layers import inverse_frequencies
from hf_engram.modeling_engram.engram_table import dequantise_rows
from hf_engram.modeling_engram.hyper_connection import collapse
from hf_engram.modeling_engram.table_storage import find_tensors


LOGITS, STREAMS = 1e-4, 3e-4


@torch.no_grad()
def test_one_pass_in_fp32(model, golden, input_ids):
    with recorded(model) as seen:
        logits = model(input_ids).logits
    assert (logits - golden["fp32.logits"]).abs().max() < LOGITS
    for index in range(8):
        stream = seen[f"layers.{index}.stream_out"][0][0]
        assert (stream - golden[f"fp32.layers.{index}.stream_out"]).abs().max() < STREAMS
        experts, expected = seen[f"layers.{index}.router_indices"][0], golden[f"fp32.layers.{index}.router_indices"]
        assert torch.equal(experts.sort(-1).values, expected.flatten(0, 1).long().sort(-1).values)
    for index in (2, 4, 5, 7):
        choice = seen[f"layers.{index}.compress_idxs"][0][0]
        assert torch.equal(choice, golden[f"fp32.layers.{index}.compress_idxs"].long())
    blocks = seen["layers.5.candidates"][0][0]
    groups = blocks.repeat_interleave(model.config.candidate_block_size, -1)[:, : input_ids.shape[1]]
    # The golden names only groups that a token may see.
    visible = torch.ones_like(groups).tril()
    assert torch.equal(groups & visible, golden["fp32.layers.5.candidates"] & visible)


def test_hash_ids(model, golden, input_ids):
    hash_ids = model.compute_hash_ids(input_ids)
    for number, index in enumerate(model.config.engram_layer_ids):
        assert torch.equal(hash_ids[0, :, number], golden[f"fp32.layers.{index}.engram_hash_ids"].long())


@pytest.mark.parametrize("prefill", [1, 2, 3, 7, 8, 9, 47, 48])
def test_steps_after_any_prefill_in_fp32(model, golden, input_ids, prefill):
    with recorded(model) as seen:
        logits = stepwise(model, input_ids, prefill)
    assert (logits - golden["fp32.logits"]).abs().max() < LOGITS
    for index in range(8):
        experts = torch.cat([part.view(2, -1, part.shape[-1]) for part in seen[f"layers.{index}.router_indices"]], 1)
        expected = golden[f"fp32.layers.{index}.router_indices"].long()
        assert torch.equal(experts.sort(-1).values, expected.sort(-1).values)
    if prefill == 48:
        # Each source publishes its own keys at every step.
        for index in (2, 4, 5, 7):
            steps = torch.cat(seen[f"layers.{index}.compress_idxs"][1:], 1)
            assert torch.equal(steps, golden[f"fp32.decode.own_keys.layers.{index}.compress_idxs"].long())


@pytest.fixture
def same_angles(rounded_model, golden):
    """The model with the frequencies of the golden: fp32 powers differ in their last bit from one processor to
    another, which rounding turns into a whole step."""
    rotary = (rounded_model.model.window_rotary_emb, rounded_model.model.compressed_rotary_emb)
    before = [module.inv_freq.clone() for module in rotary]
    for module, name in zip(rotary, ("window", "compressed"), strict=True):
        module.inv_freq.copy_(golden[f"formats.inv_freq.{name}"])
    yield rounded_model
    for module, values in zip(rotary, before, strict=True):
        module.inv_freq.copy_(values)


@torch.no_grad()
def test_rounded_caches_in_fp32(same_angles, golden, input_ids):
    with recorded(same_angles) as seen:
        out = same_angles(input_ids[:1], use_cache=True)
    assert (out.logits[0] - golden["fp32_cache.logits"]).abs().max() < LOGITS
    for index in (2, 4, 5, 7):
        expected = golden[f"fp32_cache.layers.{index}.compress_idxs"].long()
        assert torch.equal(seen[f"layers.{index}.compress_idxs"][0][0], expected)
    for index in (2, 4, 5):
        layer = out[1].layers[index]
        assert torch.equal(layer.entries[0], golden[f"fp32_cache.layers.{index}.compressed_kv"])
        assert torch.equal(layer.index_keys[0], golden[f"fp32_cache.layers.{index}.index_k"])
    for index in range(8):
        window = same_angles.config.sliding_window - 1
        assert torch.equal(out[1].layers[index].keys[0, 0], golden[f"fp32_cache.layers.{index}.window_kv"][-window:])
    assert (stepwise(same_angles, input_ids[:1], 48)[0] - golden["fp32_cache.logits"]).abs().max() < LOGITS


@pytest.mark.parametrize(
    "name, rounding", [("act_fp8", round_fp8), ("fp4_e8m0", round_fp4), ("fp4_e4m3", round_fp4_fine)]
)
def test_roundings_bit_for_bit(golden, name, rounding):
    x, expected = golden["formats.x"], golden[f"formats.{name}.y"]
    assert torch.equal(rounding(x).view(torch.int16), expected.view(torch.int16))
    # In fp32 the same: all of it is exact in bf16.
    assert torch.equal(rounding(x.float()).to(torch.bfloat16).view(torch.int16), expected.view(torch.int16))


def test_gradients_pass_roundings(golden):
    x = golden["formats.x"].float().requires_grad_()
    weight = torch.arange(x.numel(), dtype=torch.float32).view_as(x)
    (round_fp8(x) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_frequencies(golden):
    """To the last bit but one of each number, since fp32 powers depend on the processor."""
    scaling = {"factor": 4, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 256}
    for name, own in {
        "window": inverse_frequencies(16, 100),
        "compressed": inverse_frequencies(16, 400, scaling),
        "release.window": inverse_frequencies(64, 10000),
    }.items():
        torch.testing.assert_close(own, golden[f"formats.inv_freq.{name}"], rtol=2**-22, atol=0)


@pytest.mark.parametrize("name", ["layers.0.attn.wq_a", "layers.0.ffn.experts.0.w1"])
def test_released_weights_bit_for_bit(golden, name):
    entries = find_tensors(CHECKPOINT)
    tensor = ReleasedTensor(entries[f"{name}.weight"], entries[f"{name}.scale"])
    expected = golden[f"formats.dequant.{name}"]
    assert tensor.shape == tuple(expected.shape)
    assert torch.equal(tensor[...].float(), expected)


def test_released_table_bit_for_bit(golden):
    entries = find_tensors(CHECKPOINT)
    rows, scales = (RawTensor(entries[f"layers.1.engram.embed.{part}"])[...] for part in ("weight", "scale"))
    expected = golden["formats.dequant.layers.1.engram.embed.first_8_rows"]
    assert torch.equal(dequantise_rows(rows[:8], scales[:8]), expected)


@torch.no_grad()
def test_release_in_bf16(golden, input_ids):
    """Each layer on the golden's stream, up to position 37, after which the golden meets a tie of index scores. Sums
    in another order move a value near the edge between two bf16 numbers, and with it its token, so a few tokens may
    differ; a rounding in another place moves most of the values."""
    model = load_model(torch.bfloat16, activation_rounding=True)
    for module, name in ((model.model.window_rotary_emb, "window"), (model.model.compressed_rotary_emb, "compressed")):
        module.inv_freq.copy_(golden[f"formats.inv_freq.{name}"])
    equal = {}

    def put_golden_in(index):
        def hook(layer, args, out):
            _, stream, pre, shared = out
            expected = golden[f"release.layers.{index}.stream_out"]
            equal[index] = (stream[0] == expected).float().mean().item()
            return collapse(expected.unsqueeze(0), pre), expected.unsqueeze(0), pre, shared

        return hook

    for index, layer in enumerate(model.model.layers):
        layer.register_forward_hook(put_golden_in(index))
    logits = model(input_ids[:1, :38]).logits[0]
    assert min(equal.values()) > 0.9, equal
    assert logits.dtype == torch.float32
    assert ((logits - golden["release.logits"]).abs().amax(-1) < 1e-3).float().mean() > 0.9
