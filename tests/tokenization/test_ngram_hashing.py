"""What must hold for any ids, masks, documents and layouts."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_engram.tokenization.ngram_hashing import (
    DEAD,
    build_layout,
    build_multipliers,
    check_token_ids,
    document_starts,
    encode_stream,
    hash_stream,
    is_prime,
)


VOCAB_SIZE = 1000
LAYER_IDS = (0, 3, 7)


def setup(max_ngram_size: int, n_heads: int = 2, engram_vocab_size: int = 40):
    layout = build_layout(len(LAYER_IDS), engram_vocab_size, max_ngram_size, n_heads)
    return build_multipliers(LAYER_IDS, VOCAB_SIZE, max_ngram_size), layout.primes, layout.offsets


def hash_rows(ids, max_ngram_size: int, dead=None, starts=None, pad_id: int = 5, before=None):
    """[B, L] ids to hash ids, from the first position on or after the stream `before`."""
    multipliers, primes, offsets = setup(max_ngram_size)
    stream = encode_stream(ids, dead, starts)
    if before is None:
        before = np.full((len(ids), max_ngram_size - 1), DEAD)
    return hash_stream(np.concatenate((before, stream), 1), pad_id, multipliers, primes, offsets), stream


@st.composite
def sequences(draw):
    """ids, dead, starts (one row each) and N."""
    length = draw(st.integers(1, 12))
    row = lambda element: np.array([draw(st.lists(element, min_size=length, max_size=length))])  # noqa: E731
    ids = row(st.integers(0, VOCAB_SIZE - 1)).astype(np.int64)
    return ids, row(st.booleans()), row(st.booleans()), draw(st.integers(2, 5))


@given(st.integers(1, 4), st.integers(1, 100_000), st.integers(2, 5), st.integers(1, 8))
def test_primes_are_distinct_ascending_and_as_small_as_can_be(n_layers, vocab_size, max_ngram_size, n_heads):
    layout = build_layout(n_layers, vocab_size, max_ngram_size, n_heads)
    primes = layout.primes.flatten().tolist()
    assert primes == [n for n in range(vocab_size, primes[-1] + 1) if is_prime(n)]
    assert layout.num_embeddings == tuple(layout.primes.sum((1, 2)))
    for layer in range(n_layers):
        ends = (layout.offsets[layer] + layout.primes[layer]).flatten()
        assert layout.offsets[layer].flatten().tolist() == [0, *ends[:-1]]


def test_is_prime_agrees_with_a_sieve():
    sieve = np.ones(20_000, dtype=bool)
    sieve[:2] = False
    for n in range(2, 142):
        sieve[n * n :: n] = False
    assert [n for n in range(20_000) if is_prime(n)] == np.flatnonzero(sieve).tolist()
    assert is_prime(2**61 - 1) and not is_prime(3215031751) and not is_prime(341550071728321)


@given(st.lists(st.integers(0, 200), max_size=4, unique=True), st.integers(1, 2**31), st.integers(2, 6))
def test_products_with_the_multipliers_never_overflow(layer_ids, vocab_size, max_ngram_size):
    multipliers = build_multipliers(tuple(layer_ids), vocab_size, max_ngram_size)
    assert multipliers.shape == (len(layer_ids), max_ngram_size)
    assert all(m % 2 == 1 and m > 0 and m * (vocab_size - 1) < 2**63 for m in multipliers.flatten().tolist())


@given(sequences())
def test_every_row_lies_in_its_bucket_range(sequence):
    ids, dead, starts, max_ngram_size = sequence
    _, primes, offsets = setup(max_ngram_size)
    rows, _ = hash_rows(ids, max_ngram_size, dead, starts)
    assert rows.dtype == np.int64 and rows.shape == (*ids.shape, len(LAYER_IDS), (max_ngram_size - 1) * 2)
    low = offsets.reshape(len(LAYER_IDS), -1)
    assert (rows >= low).all() and (rows < low + primes.reshape(len(LAYER_IDS), -1)).all()


@given(sequences())
def test_torch_and_numpy_agree(sequence):
    ids, dead, starts, max_ngram_size = sequence
    rows, stream = hash_rows(ids, max_ngram_size, dead, starts)
    torch_stream = encode_stream(torch.tensor(ids), torch.tensor(dead), torch.tensor(starts))
    assert torch_stream.tolist() == stream.tolist()
    before = torch.full((1, max_ngram_size - 1), DEAD)
    constants = [torch.tensor(constant) for constant in setup(max_ngram_size)]
    assert hash_stream(torch.cat((before, torch_stream), 1), 5, *constants).tolist() == rows.tolist()


@given(sequences(), st.data())
def test_in_chunks_with_history_as_in_one_go(sequence, data):
    ids, dead, starts, max_ngram_size = sequence
    whole, _ = hash_rows(ids, max_ngram_size, dead, starts)
    history = np.full((1, max_ngram_size - 1), DEAD)
    chunks, begin = [], 0
    while begin < ids.shape[1]:
        end = data.draw(st.integers(begin + 1, ids.shape[1]))
        chunk = slice(begin, end)
        rows, part = hash_rows(ids[:, chunk], max_ngram_size, dead[:, chunk], starts[:, chunk], before=history)
        history = np.concatenate((history, part), 1)[:, -(max_ngram_size - 1) :]
        chunks.append(rows)
        begin = end
    assert np.array_equal(np.concatenate(chunks, 1), whole)


@given(sequences(), st.booleans())
def test_nothing_is_seen_beyond_a_dead_position_or_a_document_start(sequence, is_dead):
    ids, dead, starts, max_ngram_size = sequence
    cut = ids.shape[1] // 2
    dead[:, cut], starts[:, cut] = is_dead, not is_dead
    whole, _ = hash_rows(ids, max_ngram_size, dead, starts)
    fresh, _ = hash_rows(ids[:, cut:], max_ngram_size, dead[:, cut:], starts[:, cut:])
    assert np.array_equal(whole[:, cut:], fresh)


@given(sequences())
def test_what_a_dead_position_holds_is_of_no_account(sequence):
    ids, dead, starts, max_ngram_size = sequence
    other = np.where(dead, (ids + 17) % VOCAB_SIZE, ids)
    assert np.array_equal(
        hash_rows(ids, max_ngram_size, dead, starts)[0], hash_rows(other, max_ngram_size, dead, starts)[0]
    )


def test_an_id_equal_to_the_pad_id_is_seen_if_it_is_alive():
    ids = np.array([[3, 5, 7]])
    alive, _ = hash_rows(ids, 3, pad_id=5)
    dead, _ = hash_rows(ids, 3, dead=np.array([[False, True, False]]), pad_id=5)
    # The 3-gram 3 5 7 against 5 5 7: the id in the middle is the same, but one lets the 3 be seen.
    assert (alive[0, 2, :, 2:] != dead[0, 2, :, 2:]).any()


@pytest.mark.parametrize("convert", [np.array, torch.tensor])
def test_document_starts(convert):
    positions = convert([[0, 1, 2, 0, 1, 0], [4, 5, 0, 1, 3, 4]])
    assert document_starts(positions).tolist() == [
        [True, False, False, True, False, True],
        [False, False, True, False, True, False],
    ]


@settings(max_examples=20)
@given(st.integers(-(2**40), 2**40))
def test_ids_outside_the_vocabulary_are_refused(token_id):
    for ids in (np.array([[1, token_id]]), torch.tensor([[1, token_id]])):
        if 0 <= token_id < 10:
            check_token_ids(ids, 10)
        else:
            with pytest.raises(ValueError, match=f"`input_ids` holds the id {token_id}, outside"):
                check_token_ids(ids, 10)


@pytest.mark.parametrize("ids", [np.array([1.0]), torch.tensor([1.0]), np.array([True]), torch.tensor([True])])
def test_ids_that_are_no_integers_are_refused(ids):
    with pytest.raises(TypeError, match="`input_ids` must hold integers"):
        check_token_ids(ids, 10)
