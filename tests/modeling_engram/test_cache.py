"""The n-gram history in Transformers' cache: every operation that moves keys and values moves it, too."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, MistralConfig, StaticCache

from hf_engram.tokenization.ngram_hashing import DEAD


@pytest.fixture(scope="module")
def model(lively_model):
    return lively_model()


@pytest.fixture
def filled(model, random_ids):
    """Ids of three sequences, a mask with padding, and the cache of their first eight tokens."""
    ids = random_ids(3, 12)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    mask[2, :7] = 0
    cache = DynamicCache(config=model.config)
    forward(model, ids, mask, 0, 8, cache)
    return ids, mask, cache


def forward(model, ids, mask, start, end, cache=None):
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    with torch.no_grad():
        return model(
            ids[:, start:end],
            attention_mask=mask[:, :end],
            position_ids=positions[:, start:end],
            past_key_values=cache,
            use_cache=cache is not None,
        ).logits


def assert_continues(model, ids, mask, start, cache, end=None):
    """The cache's continuation from `start` has the logits of an uncached run."""
    end = ids.shape[1] if end is None else end
    expected = forward(model, ids, mask, 0, end)[:, start:]
    actual = torch.cat([forward(model, ids, mask, t, t + 1, cache) for t in range(start, end)], 1)
    assert (actual - expected)[mask[:, start:end].bool()].abs().max() < 1e-4


def test_continues(model, filled):
    """The cache as it is."""
    ids, mask, cache = filled
    assert_continues(model, ids, mask, 8, cache)


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 1], [0, 2, 2]], ids=str)
def test_reorder(model, filled, order):
    """`reorder_cache`, as beam search calls it."""
    ids, mask, cache = filled
    order = torch.tensor(order)
    cache.reorder_cache(order)
    assert_continues(model, ids[order], mask[order], 8, cache)


def test_batch_repeat_interleave(model, filled):
    """`batch_repeat_interleave`, as expanding a batch calls it."""
    ids, mask, cache = filled
    cache.batch_repeat_interleave(2)
    assert_continues(model, ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0), 8, cache)


@pytest.mark.parametrize("indices", [[2], [0, 2], [1, 0, 1, 2]], ids=str)
def test_batch_select_indices(model, filled, indices):
    """`batch_select_indices`, as dropping rows calls it."""
    ids, mask, cache = filled
    indices = torch.tensor(indices)
    cache.batch_select_indices(indices)
    assert_continues(model, ids[indices], mask[indices], 8, cache)


def test_deepcopy(model, filled):
    """A copied cache goes its own way."""
    ids, mask, cache = filled
    again = copy.deepcopy(cache)
    other = ids.clone()
    other[:, 8:] = ids[:, 8:].flip(1)
    assert_continues(model, other, mask, 8, again)
    assert_continues(model, ids, mask, 8, cache)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("removed", range(1, 5))
def test_crop_and_redo(model, filled, removed, one_by_one):
    """Tokens that were taken back, as assisted decoding does it, do not linger in the history."""
    ids, mask, cache = filled
    cache.activate_past_recording()
    wrong = ids.clone()
    wrong[:, 8:] = ids[:, 8:].flip(1)
    if one_by_one:
        for t in range(8, 12):
            forward(model, wrong, mask, t, t + 1, cache)
    else:
        forward(model, wrong, mask, 8, 12, cache)
    cache.crop(-removed)
    assert cache.get_seq_length() == 12 - removed
    wrong[:, 12 - removed :] = ids[:, 12 - removed :]
    assert_continues(model, wrong, mask, 12 - removed, cache)


def test_reset(model, filled):
    """A cache that is reset starts afresh."""
    ids, mask, _ = filled
    cache = StaticCache(config=model.config, max_cache_len=16)
    forward(model, ids, torch.ones_like(mask), 0, 8, cache)
    cache.reset()
    ones = torch.ones_like(mask)
    expected = forward(model, ids, ones, 0, 12)
    actual = torch.cat([forward(model, ids, ones, t, t + 1, cache) for t in range(12)], 1)
    assert (actual - expected).abs().max() < 1e-4


def test_static_cache_keeps_its_address(model, random_ids):
    """A static cache's history stays at one address, as captured graphs need."""
    ids = random_ids(2, 10)
    cache = StaticCache(config=model.config, max_cache_len=16)
    ones = torch.ones_like(ids)
    forward(model, ids, ones, 0, 6, cache)

    def address():
        return cache.layers[0].ngram_windows.data_ptr(), cache.layers[0].n_hashed.data_ptr()

    before = address()
    for t in range(6, 10):
        forward(model, ids, ones, t, t + 1, cache)
    assert address() == before


def test_history_is_small_and_shared(model, filled):
    """One history, N - 1 integers a token, serves all Engram layers; nothing stands before the first token."""
    _, _, cache = filled
    (windows,) = [layer.ngram_windows for layer in cache.layers if hasattr(layer, "ngram_windows")]
    assert windows.shape == (3, 3, 1 + 8) and windows.dtype == torch.int64
    assert (windows[..., 0] == DEAD).all()


def test_crosses_no_document(model, random_ids):
    """Packed documents stay apart when the second one arrives on the first one's cache."""
    ids = random_ids(1, 9)
    positions = torch.cat([torch.arange(5), torch.arange(4)])[None]
    whole = model.compute_hash_ids(ids, position_ids=positions)
    seen = []
    handle = model.model.engram_memory.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for part in (slice(0, 5), slice(5, 7), slice(7, 9)):
            model(ids[:, part], position_ids=positions[:, part], past_key_values=cache)
    handle.remove()
    assert torch.equal(torch.cat(seen, 1), whole)


@torch.no_grad()
@pytest.mark.parametrize("engram_layer_ids", [None, []])
def test_cache_without_the_config(model, lively_model, random_ids, engram_layer_ids):
    """`DynamicCache()`, and one made for a model without Engram, get a place for the history when first used."""
    config = None if engram_layer_ids is None else lively_model(engram_layer_ids=engram_layer_ids).config
    ids = random_ids(1, 8)
    cache = DynamicCache(config=config)
    parts = [model(part, past_key_values=cache).logits for part in ids.split(3, dim=1)]
    assert torch.allclose(torch.cat(parts, 1), model(ids, use_cache=False).logits, atol=1e-4)


@torch.no_grad()
def test_static_cache_of_another_model(model, lively_model, random_ids):
    """The history makes its own place in a static cache of another model's, too; one that forgets keys is refused."""
    plain, ids = lively_model(engram_layer_ids=[]), random_ids(1, 4)
    cache = StaticCache(config=plain.config, max_cache_len=8)
    parts = [model(part, past_key_values=cache).logits for part in ids.split(3, dim=1)]
    assert torch.allclose(torch.cat(parts, 1), model(ids, use_cache=False).logits, atol=1e-4)
    sliding = MistralConfig(num_hidden_layers=3, sliding_window=4)
    with pytest.raises(ValueError, match=r"config=model\.config"):
        model(ids, past_key_values=StaticCache(config=sliding, max_cache_len=8))
    plain(ids, past_key_values=DynamicCache())


@torch.no_grad()
def test_cache_is_pickled(model, random_ids):
    """A prefix cache can be kept on disk: pickled and loaded, it continues as it would have."""
    ids = random_ids(1, 9)
    cache = DynamicCache(config=model.config)
    model(ids[:, :6], past_key_values=cache)
    loaded = pickle.loads(pickle.dumps(cache))
    logits = [model(ids[:, 6:], past_key_values=kept).logits for kept in (cache, loaded)]
    assert torch.equal(*logits)


def test_both_names(model, random_ids):
    """The cache may be called `cache` or `past_key_values`; both at once is refused, by every forward."""
    ids = random_ids(1, 6)
    with torch.no_grad():
        expected = model(ids).logits[:, 4:]
        for name in ("cache", "past_key_values"):
            for part in (model, model.model):
                cache = DynamicCache(config=model.config)
                part(ids[:, :4], **{name: cache})
                assert cache.get_seq_length() == 4
                output = part(ids[:, 4:], **{name: cache})
                assert output.get("cache", output.get("past_key_values")) is cache
                if part is model:
                    assert (output.logits - expected).abs().max() < 1e-4
    for part in (model, model.model):
        with pytest.raises(ValueError, match="past_key_values"):
            cache = DynamicCache(config=model.config)
            part(ids, cache=cache, past_key_values=cache)


def test_embeddings_cannot_continue_a_cache(model, random_ids):
    """Embeddings on a cache with a history would leave a gap in it, and are refused."""
    ids = random_ids(1, 6)
    cache = DynamicCache(config=model.config)
    embeds, hash_ids = model.get_input_embeddings()(ids), model.compute_hash_ids(ids)
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=embeds[:, 4:], hash_ids=hash_ids[:, 4:], past_key_values=cache)


def test_ids_cannot_follow_embeddings(model, random_ids):
    """Token ids on a cache that embeddings began miss their n-grams, and are refused."""
    ids = random_ids(1, 6)
    cache = DynamicCache(config=model.config)
    embeds, hash_ids = model.get_input_embeddings()(ids), model.compute_hash_ids(ids)
    with torch.no_grad():
        model(inputs_embeds=embeds[:, :4], hash_ids=hash_ids[:, :4], past_key_values=cache)
    with pytest.raises(ValueError, match="n-gram history"):
        model(ids[:, 4:], past_key_values=cache)


def test_failed_forward_leaves_the_cache(model, random_ids):
    """A forward that is refused (a bad id) does not move the history on."""
    ids = random_ids(1, 8)
    ones = torch.ones_like(ids)
    cache = DynamicCache(config=model.config)
    forward(model, ids, ones, 0, 5, cache)
    with pytest.raises((ValueError, IndexError)):
        model(torch.tensor([[3, 96]]), past_key_values=cache)
    assert_continues(model, ids, ones, 5, cache)
    with pytest.raises((ValueError, TypeError)):
        model(ids[:, 5:6], hash_ids=torch.zeros(1, 1, 2, 5, dtype=torch.long), past_key_values=cache)


def test_training_forward_with_cache_has_no_history_gradient(model, random_ids):
    """The history is integers: it carries no graph from step to step."""
    output = model(random_ids(1, 5))
    cache = output.get("cache", output.get("past_key_values"))
    assert not cache.layers[0].ngram_windows.requires_grad
