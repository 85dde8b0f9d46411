"""Row usage against the formula of a perfect hash, and norms of rows, of which only those asked for are read."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_engram.inspect import expected_rows, row_norms, row_usage, trace_memory
from hf_engram.modeling_engram.table_storage import DiskTable


@given(n_ngrams=st.integers(0, 10**7), n_rows=st.integers(1, 4 * 10**9))
def test_expected_rows_is_the_formula(n_ngrams, n_rows):
    """p * (1 - (1 - 1/p)^m), here with 60 digits."""
    with localcontext() as context:
        context.prec = 60
        p = Decimal(n_rows)
        exact = p * (1 - (1 - 1 / p) ** n_ngrams) if n_ngrams else Decimal(0)
    assert expected_rows(n_ngrams, n_rows) == pytest.approx(float(exact), rel=1e-12)
    assert expected_rows(n_ngrams, n_rows) <= min(n_ngrams, n_rows) * (1 + 1e-12)


def test_expected_rows_by_throwing_balls():
    generator = np.random.default_rng(0)
    used = [len(np.unique(generator.integers(0, 97, 60))) for _ in range(4000)]
    # The mean of 4000 throws lies within four of its standard deviations.
    assert abs(np.mean(used) - expected_rows(60, 97)) < 4 * np.std(used) / 4000**0.5


def test_row_usage_counts(make_model, tokenizer, text):
    """By hand: n-grams and rows in sets."""
    model = make_model()
    trace = trace_memory(model, tokenizer, text)
    compressed = [int(tokenizer.token_map[token]) for token in trace.token_ids]
    padded = [int(tokenizer.token_map[0])] * 3 + compressed
    usages = row_usage(trace)
    assert [(u.layer_id, u.size, u.head) for u in usages] == [
        (layer, size, head) for layer in (0, 2) for size in (2, 3, 4) for head in range(3)
    ]
    for column, usage in enumerate(usages):
        windows = {tuple(padded[at + 4 - usage.size : at + 4]) for at in range(len(trace))}
        rows = {int(row) for row in trace.layer(usage.layer_id).row_ids[:, column % 9]}
        assert (usage.n_ngrams, usage.n_used) == (len(windows), len(rows))
        assert usage.n_rows == model.config.layout().primes[column // 9].flatten()[column % 9]
        assert usage.collision_rate == pytest.approx(1 - len(rows) / len(windows))
        expected = usage.n_rows * (1 - (1 - 1 / usage.n_rows) ** len(windows)) / len(windows)
        assert usage.expected_collision_rate == pytest.approx(1 - expected)


def test_the_hash_is_about_as_good_as_a_perfect_one(make_model, make_tokenizer):
    """Over many columns; the spread of one column is that of chance."""
    tokenizer = make_tokenizer(engram_n_heads=8)
    model = make_model(tokenizer)
    words = " ".join(str(number**3) for number in range(60))
    usages = row_usage(trace_memory(model, tokenizer, words))
    measured = np.mean([usage.collision_rate for usage in usages])
    expected = np.mean([usage.expected_collision_rate for usage in usages])
    assert expected > 0.3 and abs(measured - expected) < 0.05


def test_masked_tokens_use_no_rows(make_model, tokenizer, text):
    mask = np.zeros(len(tokenizer(text)["input_ids"]), dtype=bool)
    mask[4:6] = True
    trace = trace_memory(make_model(), tokenizer, text, token_mask=mask)
    assert {usage.n_ngrams for usage in row_usage(trace)} == {2}
    assert {usage.n_used for usage in row_usage(trace)} <= {1, 2}


@pytest.mark.parametrize("is_quantised", [False, True])
def test_norms(make_model, tokenizer, text, is_quantised):
    from hf_engram.modeling_engram.engram_table import dequantise_rows

    model = make_model(engram_scale_block_size=8)
    trace = trace_memory(model, tokenizer, text)
    if is_quantised:
        model.quantize_tables()
    for index, norms in enumerate(row_norms(model, trace)):
        table = model.model.engram_memory.tables[index]
        weight = dequantise_rows(table.weight, table.scale) if is_quantised else table.weight
        expected = weight.detach().norm(dim=-1).numpy()
        assert (norms.layer_id, norms.n_rows) == ([0, 2][index], len(expected))
        np.testing.assert_allclose(norms.sample, expected, rtol=1e-6)
        np.testing.assert_allclose(norms.used, expected[np.unique(trace.layers[index].row_ids)], rtol=1e-6)


def test_a_sample_is_drawn_without_repeats_and_again(make_model, tokenizer, text):
    model = make_model()
    trace = trace_memory(model, tokenizer, text)
    norms = row_norms(model, trace, n_sampled=50)
    for index, table in enumerate(norms):
        every = model.model.engram_memory.tables[index].weight.detach().norm(dim=-1).numpy()
        assert len(table.sample) == len(table.used) == 50
        assert len(np.unique(table.sample)) == 50 and np.isclose(table.sample[:, None], every).any(1).all()
    again, other = row_norms(model, trace, 50), row_norms(model, trace, 50, seed=1)
    np.testing.assert_array_equal(norms[0].sample, again[0].sample)
    assert (norms[0].sample != other[0].sample).any()
    with pytest.raises(ValueError, match="`n_sampled` must be at least 1, got 0"):
        row_norms(model, trace, 0)


def test_only_the_rows_in_question_are_read_from_disk(make_model, tokenizer, text, tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path)
    model = type(make_model()).from_pretrained(tmp_path, engram_placement="disk")
    trace = trace_memory(model, tokenizer, text)
    counts, request = [], DiskTable.request

    def counted(self, ids, **kwargs):
        counts.append(len(ids))
        return request(self, ids, **kwargs)

    monkeypatch.setattr(DiskTable, "request", counted)
    monkeypatch.setattr("hf_engram.inspect.tables.ROWS_AT_ONCE", 16)
    from_disk = row_norms(model, trace, n_sampled=40)
    # Two tables, a sample and the text's rows of each, 16 at once, and row 0 where a list is filled up.
    assert len(counts) == 2 * 2 * 3 and sum(counts) == 2 * 2 * 40
    in_memory = row_norms(make_model(), trace, n_sampled=40)
    for one, other in zip(from_disk, in_memory, strict=True):
        np.testing.assert_array_equal(one.sample, other.sample)
        np.testing.assert_array_equal(one.used, other.used)


def test_large_tables_are_sampled_without_a_list_of_their_rows(make_model, tokenizer, text):
    """A draw from 384 million rows takes time and memory of the sample alone."""
    import tracemalloc

    from hf_engram.inspect import tables

    class Table:
        num_embeddings = 384_006_168

    class Memory:
        tables = [Table(), Table()]

    model = make_model()
    trace = trace_memory(model, tokenizer, text)
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "find_decoder", lambda model: type("Decoder", (), {"engram_memory": Memory()}))
        patch.setattr(tables, "_norms", lambda memory, rows: drawn.append(rows) or rows)
        tracemalloc.start()
        row_norms(model, trace, n_sampled=1000)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2**22
    assert len(np.unique(drawn[0][0])) == 1000 and drawn[0][0].max() > 300_000_000
