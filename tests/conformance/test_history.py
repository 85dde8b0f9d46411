"""History: whatever is done to a cache, every token's n-gram is that of its own sequence."""

import copy
import itertools

import pytest
import torch
from transformers import DynamicCache, StaticCache


@pytest.fixture
def feed(model, watch, same_rows, run_cached):
    """`feed(cache, chunk, full, mask=None)`: runs `chunk`, the end of `full`, on the cache; checks rows and logits
    against the plain run of `full`."""

    @torch.no_grad()
    def run(cache, chunk: torch.Tensor, full: torch.Tensor, mask: torch.Tensor | None = None) -> None:
        assert torch.equal(full[:, -chunk.shape[1] :], chunk)
        with watch(model) as seen:
            logits = run_cached(model, chunk, cache, attention_mask=mask)
        expected = model(full, attention_mask=mask, use_cache=False).logits[:, -chunk.shape[1] :]
        live = torch.ones_like(chunk) if mask is None else mask[:, -chunk.shape[1] :]
        rows = model.compute_hash_ids(full, attention_mask=mask)[:, -chunk.shape[1] :]
        same_rows(seen.used[0], rows, live)
        torch.testing.assert_close(logits[live != 0], expected[live != 0], atol=1e-4, rtol=1e-4)

    return run


def new_cache(model, static: bool = False, length: int = 48):
    return StaticCache(config=model.config, max_cache_len=length) if static else DynamicCache(config=model.config)


def test_suite_sees_a_lost_history(model, draw):
    """(The suite itself) A history that is dropped after the prompt changes rows; if it did not, nothing is proven."""
    ids = draw(2, 9)
    rows = model.compute_hash_ids(ids)
    length = model.config.engram_max_ngram_size - 1
    for start in range(1, 9):
        alone = model.compute_hash_ids(ids[:, start:])
        assert (alone[:, :length] != rows[:, start : start + length]).any()


def test_greedy_decoding(model, draw, watch, generate, plain_greedy):
    """Cached decoding said other things than the uncached model, since every new token hashed as a sequence start."""
    ids = draw(3, 7)
    with watch(model) as seen:
        out = generate(model, ids, 10, return_dict_in_generate=True, output_logits=True)
    expected, logits = plain_greedy(model, ids, 10)
    assert torch.equal(out.sequences, expected)
    torch.testing.assert_close(torch.stack(out.logits, 1), logits, atol=1e-4, rtol=1e-4)
    assert [used.shape[1] for used in seen.used] == [7] + [1] * 9
    seen.check_sequences(out.sequences)
    seen.check_steps()


def test_prompt_of_one_token(model, draw, watch, generate, plain_greedy):
    """A prompt shorter than the history left zeros in it, and the zeros were hashed as token 0."""
    ids = draw(2, 1)
    with watch(model) as seen:
        out = generate(model, ids, 8)
    assert torch.equal(out, plain_greedy(model, ids, 8)[0])
    seen.check_sequences(out)


def test_long_prompt_after_a_short_one(model, draw, watch, generate, plain_greedy):
    """A buffer sized by, or filled from, the first prompt spoilt the second."""
    for length, seed in ((2, 1), (31, 2), (3, 3)):
        ids = draw(2, length, seed)
        with watch(model) as seen:
            out = generate(model, ids, 5)
        assert torch.equal(out, plain_greedy(model, ids, 5)[0])
        seen.check_sequences(out)


def test_batch_of_eight_against_singles(model, draw, left_padded, watch, generate, plain_greedy):
    """In a batch, rows took the n-grams of the longest row, or of the padding before their prompt."""
    rows = [draw(1, length, seed) for seed, length in enumerate((1, 2, 3, 4, 5, 8, 13, 17))]
    ids, mask = left_padded(rows)
    with watch(model) as seen:
        out = generate(model, ids, 8, attention_mask=mask)
    seen.check_sequences(out, mask)
    seen.check_steps()
    for row, sequence in zip(rows, out, strict=True):
        assert torch.equal(sequence[-8 - row.shape[1] :], plain_greedy(model, row, 8)[0][0])
        assert torch.equal(generate(model, row, 8)[0], sequence[-8 - row.shape[1] :])


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_prefill_split_anywhere(model, draw, left_padded, feed, static, padded):
    """A prompt cut in two lost the n-grams across the cut, or chunks shorter than the history emptied it."""
    n = model.config.engram_max_ngram_size
    if padded:
        ids, mask = left_padded([draw(1, n + 6, 1), draw(1, n + 1, 2), draw(1, 2, 3)])
    else:
        ids, mask = draw(2, n + 6), None
    for first in range(1, n + 3):
        cache = new_cache(model, static)
        for start, end in ((0, first), (first, first + 1), (first + 1, n + 6)):
            feed(cache, ids[:, start:end], ids[:, :end], None if mask is None else mask[:, :end])


def test_chunked_prefill(model, draw, left_padded, watch, generate, plain_greedy):
    """`prefill_chunk_size` gave another text than the prompt in one piece."""
    ids, mask = left_padded([draw(1, 12, 1), draw(1, 7, 2)])
    expected = plain_greedy(model, ids, 5, mask)[0]
    for chunk in range(1, model.config.engram_max_ngram_size + 3):
        with watch(model) as seen:
            out = generate(model, ids, 5, attention_mask=mask, prefill_chunk_size=chunk)
        assert max(used.shape[1] for used in seen.used) == chunk
        assert torch.equal(out, expected)
        seen.check_sequences(out, mask)


@pytest.mark.parametrize("recording", [True, False], ids=["recording", "plain"])
def test_crop(model, draw, feed, recording):
    """After `cache.crop` the history still held the tokens that were taken back, or could not be cropped at all."""
    n = model.config.engram_max_ngram_size
    prompt, drafted, other = draw(2, n + 4, 1), draw(2, n + 2, 2), draw(2, 3, 3)
    for removed in range(n + 3):
        cache = new_cache(model)
        if recording:
            cache.activate_past_recording()
        feed(cache, prompt, prompt)
        full = torch.cat([prompt, drafted], 1)
        feed(cache, drafted, full)
        cache.crop(-removed)
        kept = full[:, : full.shape[1] - removed]
        assert cache.get_seq_length() == kept.shape[1]
        for i in range(3):
            kept = torch.cat([kept, other[:, i : i + 1]], 1)
            feed(cache, other[:, i : i + 1], kept)


@pytest.mark.parametrize("recording", [True, False], ids=["recording", "plain"])
def test_crop_again_and_again(model, draw, feed, recording):
    """A second rollback found a history that the first had cut short."""
    full = draw(1, 6)
    cache = new_cache(model)
    if recording:
        cache.activate_past_recording()
    feed(cache, full, full)
    for seed, (added, removed) in enumerate(((3, 2), (1, 1), (4, 4), (2, 1), (5, 3))):
        drafted = draw(1, added, seed + 1)
        longer = torch.cat([full, drafted], 1)
        feed(cache, drafted, longer)
        cache.crop(-removed)
        full = longer[:, : longer.shape[1] - removed]
    feed(cache, drafted[:, :1], torch.cat([full, drafted[:, :1]], 1))


def test_drafts_that_are_rejected(model, own_model, draw, watch, generate, plain_greedy):
    """Rejected tokens of an assistant stayed in the n-gram history, so assisted decoding changed the text."""
    with torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        for parameter in own_model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs().sum()
            parameter.add_(0.1 * spread * torch.randn(parameter.shape, generator=noise))
    own_model.generation_config.num_assistant_tokens = 3
    own_model.generation_config.num_assistant_tokens_schedule = "constant"
    own_model.generation_config.assistant_confidence_threshold = 0.0
    n_rejected = n_accepted = 0
    for seed in range(4):
        ids = draw(1, 6, seed)
        with watch(model) as seen, watch(own_model) as drafts:
            out = generate(model, ids, 16, assistant_model=own_model)
        assert torch.equal(out, plain_greedy(model, ids, 16)[0])
        seen.check_steps()
        drafts.check_steps()
        looked_at = sum(used.shape[1] for used in seen.used)
        n_rejected += looked_at - (out.shape[1] - 1)
        n_accepted += 16 - len(seen.used)
    assert n_rejected > 0, "nothing was rejected, so nothing was rolled back"
    assert n_accepted > 0, "nothing was accepted"


def test_prompt_lookup(model, draw, watch, generate, plain_greedy):
    """Prompt lookup decoding, whose drafts come from the prompt, changed the text."""
    ids = draw(1, 5).repeat(1, 3)
    with watch(model) as seen:
        out = generate(model, ids, 14, prompt_lookup_num_tokens=3)
    assert torch.equal(out, plain_greedy(model, ids, 14)[0])
    assert sum(used.shape[1] for used in seen.used) > out.shape[1] - 1, "nothing was drafted and rejected"
    seen.check_steps()


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_two_branches_of_one_prefix(model, draw, feed, static):
    """Two answers continued from one shared prefix cache: the second saw the n-grams of the first."""
    prefix, one, two = draw(2, 7, 1), draw(2, 4, 2), draw(2, 4, 3)
    shared = new_cache(model, static)
    feed(shared, prefix, prefix)
    first, second = copy.deepcopy(shared), copy.deepcopy(shared)
    for i in range(1, 5):
        feed(first, one[:, i - 1 : i], torch.cat([prefix, one[:, :i]], 1))
        feed(second, two[:, i - 1 : i], torch.cat([prefix, two[:, :i]], 1))
    # The shared prefix is where it was.
    feed(shared, two, torch.cat([prefix, two], 1))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_deepcopy_of_a_cache(model, draw, watch, generate, plain_greedy, run_cached, static):
    """`copy.deepcopy(cache)`, as for prompt caching with `generate`, shared or lost the history."""
    prefix = draw(1, 8)
    shared = new_cache(model, static)
    run_cached(model, prefix, shared)
    for seed in (1, 2):
        prompt = torch.cat([prefix, draw(1, 3, seed)], 1)
        with watch(model) as seen:
            out = generate(model, prompt, 6, cache=copy.deepcopy(shared))
        assert sum(used.shape[1] for used in seen.used) == 3 + 5, "the prefix was computed again"
        seen.check_steps()
        assert torch.equal(out, plain_greedy(model, prompt, 6)[0])


def test_batch_repeat_interleave(model, draw, feed):
    """`cache.batch_repeat_interleave` repeated keys and values, but not the history."""
    prefix, more = draw(2, 6, 1), draw(6, 3, 2)
    cache = new_cache(model)
    feed(cache, prefix, prefix)
    cache.batch_repeat_interleave(3)
    prefix = prefix.repeat_interleave(3, dim=0)
    for i in range(1, 4):
        feed(cache, more[:, i - 1 : i], torch.cat([prefix, more[:, :i]], 1))


def test_batch_select_indices(model, draw, feed):
    """`cache.batch_select_indices` kept some rows' keys and values, and every row's history."""
    prefix, more = draw(4, 6, 1), draw(3, 3, 2)
    cache = new_cache(model)
    feed(cache, prefix, prefix)
    chosen = torch.tensor([3, 0, 3])
    cache.batch_select_indices(chosen)
    for i in range(1, 4):
        feed(cache, more[:, i - 1 : i], torch.cat([prefix[chosen], more[:, :i]], 1))


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_reorder_cache(model, draw, feed, static):
    """Beams got each other's n-gram history after a reorder."""
    prefix, more = draw(3, 6, 1), draw(3, 2, 2)
    orders = [*itertools.permutations(range(3)), (0, 0, 0), (2, 2, 1)]
    for order in orders:
        cache = new_cache(model, static)
        feed(cache, prefix, prefix)
        rows = prefix
        # Twice, with a token in between: a reorder that waits for the next update is one of the ways to get it wrong.
        for i in range(2):
            cache.reorder_cache(torch.tensor(order))
            rows = torch.cat([rows[list(order)], more[:, i : i + 1]], 1)
            feed(cache, more[:, i : i + 1], rows)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_two_interleaved_caches(model, draw, feed, static):
    """Two conversations on one model mixed their histories, since the history lived on the model."""
    one, two = draw(2, 10, 1), draw(1, 10, 2)
    first, second = new_cache(model, static), new_cache(model, static)
    for start, end in ((0, 3), (3, 4), (4, 5), (5, 8), (8, 10)):
        feed(first, one[:, start:end], one[:, :end])
        feed(second, two[:, start:end], two[:, :end])


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_cache_reset(model, draw, feed, static):
    """A cache that was reset and used again began with the n-grams of the last conversation."""
    cache = new_cache(model, static)
    for seed in (1, 2, 3):
        ids = draw(2, 6, seed)
        feed(cache, ids[:, :2], ids[:, :2])
        feed(cache, ids[:, 2:], ids)
        if not static:
            # Reset in place leaves keys and values of zeros in a dynamic cache, for any model: start a new one.
            cache = new_cache(model)
        else:
            cache.reset()


def test_dead_tokens_in_the_history(model, draw, spelled_out_hash, watch, generate):
    """After an image span at the end of a prompt, the first generated tokens looked at the image's placeholder ids."""
    ids = draw(1, 8)
    for dead in ([7], [6], [5, 6], [2, 7]):
        token_mask = torch.ones_like(ids, dtype=torch.bool)
        token_mask[0, dead] = False
        with watch(model) as seen:
            out = generate(model, ids, 6, token_mask=token_mask)
        used = torch.cat(seen.used, 1)[0]
        expected = spelled_out_hash(model, out[0, :-1].tolist(), dead=dead)
        live = [i for i in range(len(used)) if i not in dead]
        assert torch.equal(used[live], expected[live])


@pytest.mark.parametrize("continued", ["full_ids", "only_new_ids"])
def test_continued_chat(model, draw, watch, generate, plain_greedy, continued):
    """The second turn of a chat, with the first turn's cache, hashed as if the conversation began there."""
    cache = new_cache(model)
    conversation = draw(1, 5, 1)
    for turn in range(3):
        known = cache.get_seq_length()
        given = conversation if continued == "full_ids" else conversation[:, known:]
        with watch(model) as seen:
            out = generate(model, given, 4, cache=cache, attention_mask=torch.ones_like(conversation))
        expected = plain_greedy(model, conversation, 4)[0]
        assert torch.equal(out[:, -4:], expected[:, -4:])
        used = torch.cat(seen.used, 1)
        assert used.shape[1] == expected.shape[1] - 1 - known
        assert torch.equal(used, model.compute_hash_ids(expected)[:, known:-1])
        conversation = torch.cat([expected, draw(1, 2 + turn, turn + 2)], 1)
