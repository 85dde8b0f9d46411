"""Masks of four dimensions: n-grams follow what a token may see, in trees, documents and windows, cached or not."""

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache, StaticCache


# A tree of drafts: each token's parent, -1 for none.
TREE = [-1, 0, 1, 1, 2, 3, 3, 1, 6]


@pytest.fixture(scope="module")
def model(lively_model):
    return lively_model()


@torch.no_grad()
def logits(model, *args, **kwargs) -> torch.Tensor:
    return model(*args, **kwargs).logits


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return (actual - expected).abs().max() < 1e-4


def ancestors(parents: list[int], place: int) -> list[int]:
    """The branch that ends at a token, its root first."""
    branch = []
    while place >= 0:
        branch.insert(0, place)
        place = parents[place]
    return branch


def mask_of(parents: list[int]) -> torch.Tensor:
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for place in range(len(parents)):
        mask[place, ancestors(parents, place)] = True
    return mask[None, None]


def depths(parents: list[int]) -> torch.Tensor:
    return torch.tensor([[len(ancestors(parents, place)) - 1 for place in range(len(parents))]])


def branch_logits(model, row: torch.Tensor, parents: list[int]) -> torch.Tensor:
    """What each token of a tree gives at the end of its own branch, run alone. `[1, L, V]`, for `row` `[1, L]`."""
    alone = [logits(model, row[:, ancestors(parents, place)])[:, -1] for place in range(len(parents))]
    return torch.stack(alone, 1)


def additive(mask: torch.Tensor, dtype: torch.dtype, hidden: float | None = None) -> torch.Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(
        ~mask, torch.finfo(dtype).min if hidden is None else hidden
    )


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "form", ["bool", torch.float32, torch.float64, torch.float16, torch.bfloat16, -1e4, float("-inf")], ids=str
)
def test_tree(lively_model, random_ids, form, attention, copies):
    """Each branch of a tree, in every form of mask, computes what it does alone."""
    model = lively_model(attn_implementation=attention, hc_mult=copies)
    row, mask = random_ids(1, len(TREE)), mask_of(TREE)
    if isinstance(form, torch.dtype):
        mask = additive(mask, form)
    elif isinstance(form, float):
        mask = additive(mask, torch.float32, form)
    heads = mask.expand(-1, model.config.num_attention_heads, -1, -1)
    for given in (mask, heads):
        actual = logits(model, row, attention_mask=given, position_ids=depths(TREE))
        assert close(actual, branch_logits(model, row, TREE))


def test_rows_with_trees_of_their_own(model, random_ids):
    """A batch with another tree in each row; and a model that is compiled whole."""
    trees = [TREE, [-1, 0, 0, 0, 1, 2, 3, 4, 5], list(range(-1, 8))]
    ids = random_ids(3, len(TREE))
    arguments = {
        "attention_mask": torch.cat([mask_of(tree) for tree in trees]),
        "position_ids": torch.cat([depths(tree) for tree in trees]),
    }
    expected = torch.cat([branch_logits(model, ids[i : i + 1], tree) for i, tree in enumerate(trees)])
    assert close(logits(model, ids, **arguments), expected)
    compiled = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    logits(compiled, ids[:2])  # after another number of rows, theirs may be any, and the mask's is still a constant
    assert close(logits(compiled, ids, **arguments), expected)


def whole_tree(past: int) -> list[int]:
    """`TREE` behind a chain of `past` tokens."""
    return [*range(-1, past - 1), *(past - 1 if parent < 0 else parent + past for parent in TREE)]


def cache_of(model, kind: str):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=32)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("past", [1, 2, 3, 6])
@pytest.mark.parametrize("split", [1, 4, 9])
def test_tree_behind_a_cached_prefix(model, random_ids, past, split, kind):
    """A tree of drafts on the cache of a text, at once or in parts; and a token after one of its branches."""
    parents = whole_tree(past)
    parents.append(past + 5)
    total = len(parents)
    row, mask, positions = random_ids(1, total), mask_of(parents), depths(parents)
    expected = branch_logits(model, row, parents)
    cache = cache_of(model, kind)
    parts = [logits(model, row[:, :past], past_key_values=cache)]
    for start, end in ((past, past + split), (past + split, total - 1), (total - 1, total)):
        if start == end:
            continue
        width = 32 if kind == "static" else end
        part = torch.zeros(1, 1, end - start, width, dtype=torch.bool)
        part[..., :end] = mask[..., start:end, :end]
        parts.append(
            logits(
                model,
                row[:, start:end],
                attention_mask=part,
                position_ids=positions[:, start:end],
                past_key_values=cache,
            )
        )
    assert close(torch.cat(parts, 1), expected)


def verify(model, row, past, cache) -> None:
    """Runs `TREE` behind the `past` tokens in the cache."""
    parents = whole_tree(past)
    mask, positions = mask_of(parents)[..., past:, :], depths(parents)[:, past:]
    logits(model, row[:, past:], attention_mask=mask, position_ids=positions, past_key_values=cache)


def test_cropped_to_the_trunk(model, random_ids):
    """A cache from which the drafts are cropped, up to the first branch, goes on as if they had never been."""
    row, more = random_ids(1, 5 + len(TREE)), random_ids(1, 3, seed=4)
    for kept in (7, 5, 4):
        cache = DynamicCache(config=model.config)
        logits(model, row[:, :5], past_key_values=cache)
        verify(model, row, 5, cache)
        cache.crop(-(14 - kept))
        actual = logits(model, more, past_key_values=cache)
        assert close(actual, logits(model, torch.cat([row[:, :kept], more], 1))[:, kept:])


@pytest.mark.parametrize("way", ["crop", "select", "copy"])
def test_a_kept_branch_is_given_again(model, random_ids, way):
    """Somebody who keeps one branch's keys and values in the cache leaves the history unknown: that is refused."""
    row, cache = random_ids(1, 5 + len(TREE)), DynamicCache(config=model.config)
    logits(model, row[:, :5], past_key_values=cache)
    verify(model, row, 5, cache)
    kept = torch.tensor([*range(5), *(5 + place for place in ancestors(TREE, 8))])
    for layer in cache.layers:
        if way == "select":
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        elif way == "copy":
            for states in (layer.keys, layer.values):
                states[:, :, : len(kept)] = states[:, :, kept]
    if way != "select":
        cache.crop(-(14 - len(kept)))
    more = random_ids(1, 2, seed=4)
    for broken in (cache, copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        with pytest.raises(ValueError, match="crop it to 7 tokens" if way != "select" else "by other means"):
            model(more, past_key_values=broken)
    if way != "select":
        # Up to the first branch, nothing was lost.
        cache.crop(-(len(kept) - 7))
        given = torch.cat([row[:, kept[7:]], more], 1)
        expected = logits(model, torch.cat([row[:, kept], more], 1))[:, 7:]
        assert close(logits(model, given, past_key_values=cache), expected)


def test_a_chain_is_cropped_anywhere(model, random_ids):
    """A causal mask of four dimensions has no branches, nor has one with padding before the text."""
    ids, causal = random_ids(2, 9), torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 1, 9, 9).clone()
    causal[1, :, :, :2] = False
    causal[1, :, [0, 1], [0, 1]] = True
    cache = DynamicCache(config=model.config)
    logits(model, ids, attention_mask=causal, past_key_values=cache)
    cache.crop(-3)
    actual = logits(model, ids[:, 6:], attention_mask=causal[:, :, 6:], past_key_values=cache)
    assert close(actual, logits(model, ids, attention_mask=causal)[:, 6:])


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_documents(model, random_ids, restart, cached):
    """Documents that a block-diagonal mask keeps apart, whatever `position_ids` say, at once or on a cache."""
    row = random_ids(1, 9)
    mask = torch.block_diag(torch.ones(4, 4).tril(), torch.ones(5, 5).tril()).bool()[None, None]
    positions = torch.tensor([[0, 1, 2, 3, *(range(5) if restart else range(4, 9))]])
    cache = DynamicCache(config=model.config) if cached else None
    parts = []
    for start, end in ((0, 2), (2, 6), (6, 9)) if cached else ((0, 9),):
        parts.append(
            logits(
                model,
                row[:, start:end],
                attention_mask=mask[..., start:end, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
            )
        )
    expected = torch.cat([logits(model, row[:, :4]), logits(model, row[:, 4:])], 1)
    assert close(torch.cat(parts, 1), expected)


def hashes_of(model, row, mask, **kwargs) -> torch.Tensor:
    """The hash ids that a forward uses."""
    seen = []
    handle = model.model.engram_memory.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    logits(model, row, attention_mask=mask, **kwargs)
    handle.remove()
    return seen[0]


def test_windows_and_both_directions(model, random_ids):
    """The token before is followed wherever it is seen: in sliding windows, in masks that look ahead, and by tokens
    that do not see themselves."""
    row = random_ids(1, 8)
    causal = torch.ones(8, 8, dtype=torch.bool).tril()
    expected = model.compute_hash_ids(row)
    for mask in (causal.triu(-1), torch.ones(8, 8, dtype=torch.bool), causal.tril(-1)):
        assert torch.equal(hashes_of(model, row, mask[None, None]), expected)


def test_padding_inside_is_passed_over(model, random_ids):
    """What nobody sees is no part of an n-gram, wherever it stands; `token_mask` is where n-grams stop."""
    row = random_ids(1, 8)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    mask[:, 3:5] = False
    mask[[3, 4], [3, 4]] = True
    keep = torch.tensor([0, 1, 2, 5, 6, 7])
    actual = hashes_of(model, row, mask[None, None])
    assert torch.equal(actual[:, keep], model.compute_hash_ids(row[:, keep]))
    token_mask = torch.ones(1, 8, dtype=torch.bool)
    token_mask[:, 2] = False
    actual = hashes_of(model, row, mask[None, None], token_mask=token_mask)
    assert torch.equal(actual[:, keep], model.compute_hash_ids(row[:, keep], token_mask=token_mask[:, keep]))


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "words"),
    [
        ((1, 1, 5, 4), torch.bool, ValueError, r"`attention_mask` has shape \(1, 1, 5, 4\)"),
        ((3, 1, 5, 5), torch.bool, ValueError, r"`attention_mask` has shape \(3, 1, 5, 5\)"),
        ((1, 5, 5), torch.bool, ValueError, r"`attention_mask` has shape \(1, 5, 5\)"),
        ((5,), torch.bool, ValueError, r"`attention_mask` has shape \(5,\)"),
        ((1, 1, 5, 5), torch.int64, TypeError, r"int64: convert it with `.bool\(\)`"),
    ],
    ids=str,
)
def test_masks_that_are_refused(model, random_ids, shape, dtype, error, words):
    with pytest.raises(error, match=words):
        model(random_ids(2, 5), attention_mask=torch.ones(shape, dtype=dtype))
