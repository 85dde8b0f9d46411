"""What the reference has not: padding, packing, chunks, rollback, beams, assistants; each equals single runs."""

import copy

import pytest
import torch
from transformers import DynamicCache, LlamaConfig
from v41_helpers import load_model, stepwise

from hf_engram.modeling_engram.deepseek_v41 import indexer, sparse_attention


# Twice the largest difference between one pass and single steps of the reference, of logits up to 4.2.
EQUAL = 2e-5
SEQUENCES = ((0, 0, 56), (1, 0, 41), (0, 7, 37))


@torch.no_grad()
def alone(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids.unsqueeze(0)).logits[0]


def batch(input_ids, side: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    sequences = [input_ids[row, first:last] for row, first, last in SEQUENCES]
    ids, mask = torch.zeros(3, 56, dtype=torch.long), torch.zeros(3, 56, dtype=torch.long)
    for row, own in enumerate(sequences):
        part = slice(56 - len(own), 56) if side == "left" else slice(0, len(own))
        ids[row, part], mask[row, part] = own, 1
    return sequences, ids, mask


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("ends", [(56,), (1,), (10, 20, 56), (33, 40)])
def test_padded_batches(model, input_ids, side, ends):
    sequences, ids, mask = batch(input_ids, side)
    logits = stepwise(model, ids, *ends, attention_mask=mask)
    for row, own in enumerate(sequences):
        assert (logits[row][mask[row] == 1] - alone(model, own)).abs().max() < EQUAL


@pytest.mark.parametrize("ends", [(56,), (13, 40)])
@torch.no_grad()
def test_chunks_of_queries(model, input_ids, ends, monkeypatch):
    """Few queries at a time choose and read the same; padded rows, too."""
    _, ids, mask = batch(input_ids, "left")
    whole = stepwise(model, ids, *ends, attention_mask=mask)
    # 5 queries of 3 rows and 16 heads with all groups; those of the attention do not divide the length.
    monkeypatch.setattr(indexer, "PRODUCTS_AT_A_TIME", 5 * 3 * 16 * 56)
    monkeypatch.setattr(sparse_attention, "QUERIES_AT_A_TIME", 9)
    logits = stepwise(model, ids, *ends, attention_mask=mask)
    assert (logits - whole)[mask == 1].abs().max() < EQUAL


@torch.no_grad()
def test_rounding_does_not_feel_padding(rounded_model, input_ids):
    """Positions are counted without it, so what is rounded is the same."""
    sequences, ids, mask = batch(input_ids, "left")
    cache = rounded_model(ids, attention_mask=mask, use_cache=True)[1]
    for row, own in enumerate(sequences):
        single = rounded_model(own.unsqueeze(0), use_cache=True)[1]
        assert torch.equal(single.layers[0].keys[0], cache.layers[0].keys[row])


@pytest.mark.parametrize("ends", [(56,), (1,), (30,), (22, 25)])
def test_packed_documents(model, input_ids, ends):
    documents = [input_ids[0, :21], input_ids[1, :13], input_ids[0, 30:52]]
    ids = torch.cat(documents).unsqueeze(0)
    position_ids = torch.cat([torch.arange(len(own)) for own in documents]).unsqueeze(0)
    logits = stepwise(model, ids, *ends, position_ids=position_ids)[0]
    assert (logits - torch.cat([alone(model, own) for own in documents])).abs().max() < EQUAL


@pytest.mark.parametrize("kept, removed", [(20, 9), (21, 1), (5, 3), (34, 12)])
@torch.no_grad()
def test_rollback(model, input_ids, kept, removed):
    """Over more than a window, and into a group that had closed."""
    whole = model(input_ids).logits
    cache = DynamicCache(config=model.config)
    model(input_ids[:, :kept], past_key_values=cache)
    cache.activate_past_recording()
    model(input_ids.flip(0)[:, kept : kept + removed], past_key_values=cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == kept
    logits = model(input_ids[:, kept : kept + 3], past_key_values=cache).logits
    assert (logits - whole[:, kept : kept + 3]).abs().max() < EQUAL


@torch.no_grad()
def test_rollback_needs_a_record(model, input_ids):
    cache = model(input_ids[:, :20], use_cache=True)[1]
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache.crop(-20)
    assert cache.get_seq_length() == 0
    assert (model(input_ids[:, :4], past_key_values=cache).logits - model(input_ids[:, :4]).logits).abs().max() < EQUAL


@pytest.mark.parametrize(
    "change, rows",
    [
        (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
        (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
        (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    ],
)
@torch.no_grad()
def test_rows_of_the_cache(model, input_ids, change, rows):
    cache = copy.deepcopy(model(input_ids[:, :39], use_cache=True)[1])
    change(cache)
    logits = model(input_ids[rows, 39:44], past_key_values=cache).logits
    assert (logits - model(input_ids[rows, :44]).logits[:, 39:]).abs().max() < EQUAL


@torch.no_grad()
def test_size_of_the_cache(model, input_ids):
    """A window of W - 1 keys in every layer; floor(L / m) entries and index keys in a source, and an open group."""
    config, cache = model.config, model(input_ids[:, :41], use_cache=True)[1]
    for index, layer in enumerate(cache.layers):
        assert layer.keys.shape == (2, 1, config.sliding_window - 1, config.head_dim)
        assert layer.values is layer.keys
        if index not in config.kv_source_layer_ids:
            assert layer.entries is None and layer.index_keys is None and layer.open_group is None
            continue
        ratio = config.compress_ratios[index]
        assert layer.entries.shape == (2, 41 // ratio, config.head_dim)
        assert layer.index_keys.shape == (2, 41 // ratio, config.index_head_dim)
        assert (
            (layer.open_group is None) if ratio == 1 else layer.open_group.shape == (2, ratio - 1, 2 * config.head_dim)
        )


@torch.no_grad()
def test_token_mask(model, input_ids):
    """Tokens that are not text: no Engram there, and experts by the other bias."""
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    mask[:, 10:20] = False
    logits = model(input_ids, token_mask=mask).logits
    # Not to the bit: the other tokens change which of them share an expert's matrix product.
    assert (logits[:, :10] - model(input_ids).logits[:, :10]).abs().max() < EQUAL
    assert (stepwise(model, input_ids, 15, token_mask=mask) - logits).abs().max() < EQUAL
    other = load_model(cache_rounding=False)
    for layer in other.model.layers:
        layer.mlp.gate.e_score_correction_bias_vl.fill_(0).index_fill_(0, torch.tensor([1, 4, 6]), 10)
    chosen = []
    gate = other.model.layers[3].mlp.gate
    gate.register_forward_hook(lambda module, args, out: chosen.append(out[2].view(2, -1, 3)))
    other(input_ids, token_mask=mask)
    assert chosen[0][:, 10:20].sort(-1).values.unique(dim=1).tolist() == [[[1, 4, 6]]] * 2


GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def prompt(input_ids) -> dict[str, torch.Tensor]:
    ids = input_ids[:1, 6:26]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
@torch.no_grad()
def greedy(model, prompt) -> torch.Tensor:
    ids = prompt["input_ids"]
    for _ in range(GREEDY["max_new_tokens"]):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids


@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 7}, {"prompt_lookup_num_tokens": 3}])
def test_greedy(model, prompt, greedy, options):
    assert torch.equal(model.generate(**prompt, **GREEDY, **options), greedy)


def test_assistant(model, prompt, greedy):
    assistant = load_model(cache_rounding=False)
    # Another model, so that some of what it proposes is refused.
    assistant.lm_head.weight.data += 0.02 * torch.randn(192, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.generate(**prompt, **GREEDY, assistant_model=assistant), greedy)


def test_left_padded_generation(model, prompt, greedy, input_ids):
    ids = torch.cat([torch.zeros(1, 20, dtype=torch.long), prompt["input_ids"]])
    ids[0, 7:] = input_ids[1, :13]
    mask = (torch.arange(20) >= torch.tensor([[7], [0]])).long()
    out = model.generate(ids, attention_mask=mask, **GREEDY)
    assert torch.equal(out[1:], greedy)
    single = model.generate(ids[:1, 7:], attention_mask=mask[:1, 7:], **GREEDY)
    assert torch.equal(out[:1, 7:], single)


def test_beams(model, prompt):
    options = {**GREEDY, "max_new_tokens": 5, "num_beams": 3}
    assert torch.equal(model.generate(**prompt, **options), model.generate(**prompt, **options, use_cache=False))


def test_turns(model, prompt, greedy):
    cache = DynamicCache(config=model.config)
    first = model.generate(**prompt, **{**GREEDY, "max_new_tokens": 3}, past_key_values=cache)
    options = {**GREEDY, "max_new_tokens": 5}
    out = model.generate(first, attention_mask=torch.ones_like(first), **options, past_key_values=cache)
    assert torch.equal(out, greedy)


def test_refused(model, prompt, input_ids):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(**prompt, **GREEDY, cache_implementation="static")
    with pytest.raises(ValueError, match="attention_mask"):
        model(input_ids, attention_mask=torch.ones(2, 1, 56, 56, dtype=torch.bool))
    with pytest.raises(ValueError, match="DynamicCache"):
        model(input_ids, past_key_values=DynamicCache(config=LlamaConfig(num_hidden_layers=8)))
