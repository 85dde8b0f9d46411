"""Plots: a panel for each layer of each model, and in it the numbers that were measured."""

import io
from dataclasses import replace

import numpy as np
import pytest

from hf_engram.inspect import (
    plot_gate_frequency,
    plot_gates,
    plot_row_norms,
    plot_row_usage,
    row_norms,
    row_usage,
    trace_memory,
)


pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def traced(make_model, tokenizer, text):
    """Two models, the second with fewer layers."""
    text = text * 4
    one, other = make_model(hc_mult=4), make_model(hc_mult=1, seed=1)
    models = {"one": one, "other": other}
    return [(model, trace_memory(model, tokenizer, text, name=name)) for name, model in models.items()]


def is_png(figure) -> bool:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=40)
    return buffer.getvalue().startswith(b"\x89PNG") and buffer.tell() > 4000


def titles(figure) -> list[str]:
    return [axes.get_title() for axes in figure.axes]


PANELS = ["one, layer 0", "one, layer 2", "other, layer 0", "other, layer 2"]


def test_gates(traced):
    traces = [trace for _, trace in traced]
    figure = plot_gates(traces)
    assert is_png(figure) and titles(figure) == PANELS
    lines = [patch for patch in figure.axes[1].patches if not patch.get_fill()]
    assert len(lines) == 4
    for copy, line in enumerate(lines):
        counts, _ = np.histogram(traces[0].layers[1].gates[:, copy], line.get_data().edges)
        np.testing.assert_allclose(line.get_data().values, counts / len(traces[0]))
    assert titles(plot_gates(traces[:1])) == ["layer 0", "layer 2"]


def test_a_name_that_looks_like_mathematics(traced):
    """matplotlib typesets what stands between dollars."""
    traces = [replace(trace, name=f"a$b^${index}") for index, (_, trace) in enumerate(traced)]
    figure = plot_gates(traces)
    assert is_png(figure) and titles(figure)[-1] == "a$b^$1, layer 2"


def test_gate_frequency(traced):
    _, trace = traced[0]
    figure = plot_gate_frequency([trace])
    assert is_png(figure)
    ngrams = [tuple(row) for row in trace.ngram_ids(3).tolist()]
    once_to_twice = [i for i, ngram in enumerate(ngrams) if ngrams.count(ngram) == 4]
    line = figure.axes[1].lines[1]  # that of 3-grams
    places = dict(zip(*line.get_data(), strict=True))
    # The text is there four times, and 4 lies in the third place: 1, 2, 3-4.
    assert places[2] == pytest.approx(np.median(trace.layers[1].gates.mean(1)[once_to_twice]), abs=0.02)
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()][:4] == ["1", "2", "3-4", "5-8"]


def test_row_usage(traced):
    usages = {trace.name: row_usage(trace) for _, trace in traced}
    figure = plot_row_usage(usages)
    assert is_png(figure) and titles(figure) == PANELS
    heads = [usage for usage in usages["one"] if (usage.layer_id, usage.size) == (0, 3)]
    perfect, dots = figure.axes[0].collections[2:4]
    assert dots.get_offsets()[:, 1].tolist() == pytest.approx([100 * usage.collision_rate for usage in heads])
    expected = 100 * np.mean([usage.expected_collision_rate for usage in heads])
    assert perfect.get_segments()[0][:, 1].tolist() == pytest.approx([expected, expected])
    assert f"{heads[0].n_ngrams} different" in figure.axes[0].get_xticklabels()[1].get_text()


def test_row_norms(traced, tokenizer):
    norms = {trace.name: row_norms(model, trace, n_sampled=200) for model, trace in traced}
    figure = plot_row_norms(norms)
    assert is_png(figure) and titles(figure) == PANELS
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    table = norms["one"][0]
    assert labels == [f"200 drawn from {table.n_rows:,} rows", f"{len(table.used):,} rows that the text uses"]
    sample = figure.axes[0].patches[1].get_data()
    counts, _ = np.histogram(table.sample, sample.edges)
    np.testing.assert_allclose(sample.values, counts / 200)


def test_nothing_to_plot():
    with pytest.raises(ValueError, match="`traces` is empty"):
        plot_gates([])


def test_tables_of_zeros(traced):
    from hf_engram.inspect import RowNorms

    zeros = np.zeros(5, dtype=np.float32)
    assert is_png(plot_row_norms({"one": [RowNorms(1, 5, zeros, zeros)]}))
