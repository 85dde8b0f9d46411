"""Plots of what `inspect` measures, as matplotlib figures; a row of panels for each model, a panel for each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from .tables import RowNorms, RowUsage
from .trace import MemoryTrace


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANEL_SIZE = (5.0, 3.6)  # inches
COLORS = ("#d9640a", "#2b6cb0", "#2f855a", "#7c4dbd", "#b83280", "#8a6d1a", "#0f8a8a", "#6b7280")
GATE_BINS = np.linspace(0, 1, 51)


def _panels(names: Sequence[str], layer_ids: Sequence[Sequence[int]], title: str) -> tuple[Figure, list[list[Axes]]]:
    """A figure with a row for each model and a panel for each of its layers."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'hf-engram[demo]'.") from error
    columns = max(map(len, layer_ids))
    width, height = PANEL_SIZE
    figure = Figure(figsize=(width * columns, height * len(names) + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold")
    grid = figure.subplots(len(names), columns, squeeze=False)
    for row, (name, layers) in enumerate(zip(names, layer_ids, strict=True)):
        for column, axes in enumerate(grid[row]):
            if column < len(layers):
                prefix = f"{name}, " if len(names) > 1 else ""
                axes.set_title(f"{prefix}layer {layers[column]}", fontsize=10, parse_math=False)
                axes.grid(alpha=0.25)
                axes.spines[["top", "right"]].set_visible(False)
            else:
                axes.set_axis_off()
    return figure, grid.tolist()


def _layers_of(traces: Sequence[MemoryTrace]) -> tuple[list[str], list[list[int]]]:
    if not traces:
        raise ValueError("`traces` is empty: give at least one trace.")
    return [trace.name for trace in traces], [[layer.layer_id for layer in trace.layers] for trace in traces]


def plot_gates(traces: Sequence[MemoryTrace]) -> Figure:
    """Histogram of the gates of each layer, a line for each copy of the stream."""
    figure, grid = _panels(*_layers_of(traces), "How far the gates open")
    for trace, row in zip(traces, grid, strict=True):
        live = trace.reach > 0
        for layer, axes in zip(trace.layers, row, strict=False):
            gates = layer.gates[live]
            for copy in range(gates.shape[1]):
                share, _ = np.histogram(gates[:, copy], GATE_BINS)
                share = share / max(1, share.sum())
                color = COLORS[copy % len(COLORS)]
                axes.stairs(share, GATE_BINS, color=color, lw=1.6, label=f"copy {copy}")
                if gates.shape[1] == 1:
                    axes.stairs(share, GATE_BINS, color=color, alpha=0.25, fill=True)
                axes.axvline(float(np.mean(gates[:, copy])), color=color, lw=1, ls=":")
            axes.set(xlim=(0, 1), ylim=(0, None), xlabel="gate (dotted: mean)", ylabel="share of tokens")
            if gates.shape[1] > 1:
                axes.legend(fontsize=8)
    return figure


def plot_gate_frequency(traces: Sequence[MemoryTrace]) -> Figure:
    """Gate (mean over copies) against how often the n-gram that ends at the token occurs in the text: for each size,
    the median, and the range of the middle half, over the tokens whose n-gram occurs 1, 2, 3-4, 5-8, ... times."""
    figure, grid = _panels(*_layers_of(traces), "Gate against the n-gram's frequency in the text")
    for trace, row in zip(traces, grid, strict=True):
        live = trace.reach > 0
        counts = {size: _occurrences(trace.ngram_ids(size)[live]) for size in trace.sizes}
        for layer, axes in zip(trace.layers, row, strict=False):
            gates = layer.gates[live].mean(1)
            labels: list[str] = []
            for index, size in enumerate(trace.sizes):
                bins = np.ceil(np.log2(counts[size])).astype(int)
                present = np.unique(bins)
                low, middle, high = np.transpose([np.quantile(gates[bins == b], (0.25, 0.5, 0.75)) for b in present])
                color = COLORS[index % len(COLORS)]
                axes.plot(present, middle, "o-", color=color, ms=4, label=f"{size}-grams")
                axes.fill_between(present, low, high, color=color, alpha=0.15, lw=0)
                labels += [_bin_label(b) for b in range(len(labels), present[-1] + 1)]
            axes.set_xticks(range(len(labels)), labels, fontsize=8)
            axes.set(ylim=(0, 1), xlabel="occurrences in the text", ylabel="gate (median, middle half)")
            axes.legend(fontsize=8)
    return figure


def _occurrences(ngrams: np.ndarray) -> np.ndarray:
    """int64 `[L]`: how often each row of int64 `[L, size]` occurs."""
    _, inverse, counts = np.unique(ngrams, axis=0, return_inverse=True, return_counts=True)
    return counts[inverse.reshape(-1)]


def _bin_label(index: int) -> str:
    return str(2**index) if index < 2 else f"{2 ** (index - 1) + 1}-{2**index}"


def plot_row_usage(usages: dict[str, Sequence[RowUsage]]) -> Figure:
    """Collision rate of every column beside what a perfect hash would give, and the share of rows in use.

    Args:
        usages: of each model by its name, from `row_usage`.
    """
    layers = [sorted({usage.layer_id for usage in columns}) for columns in usages.values()]
    figure, grid = _panels(list(usages), layers, "N-grams without a row of their own")
    for columns, layer_ids, row in zip(usages.values(), layers, grid, strict=True):
        for layer_id, axes in zip(layer_ids, row, strict=False):
            mine = [usage for usage in columns if usage.layer_id == layer_id]
            sizes = sorted({usage.size for usage in mine})
            for place, size in enumerate(sizes):
                heads = [usage for usage in mine if usage.size == size]
                spread = np.linspace(-0.28, 0.28, len(heads)) if len(heads) > 1 else np.zeros(1)
                expected = 100 * np.mean([usage.expected_collision_rate for usage in heads])
                axes.hlines(expected, place - 0.36, place + 0.36, color="#374151", lw=2, zorder=2,
                            label="a perfect hash" if not place else None)  # fmt: skip
                axes.scatter(place + spread, [100 * usage.collision_rate for usage in heads], s=26, zorder=3,
                             color=COLORS[0], label="measured, one dot a head" if not place else None)  # fmt: skip
            labels = []
            for size in sizes:
                heads = [usage for usage in mine if usage.size == size]
                in_use = np.mean([usage.n_used / usage.n_rows for usage in heads])
                labels.append(f"{size}-grams\n{heads[0].n_ngrams:,} different\n{in_use:.2%} of rows in use")
            axes.set_xticks(range(len(sizes)), labels, fontsize=8)
            axes.set(xlim=(-0.6, len(sizes) - 0.4), ylim=(0, None), ylabel="collision rate, %")
            axes.margins(y=0.2)
            axes.set_ylim(0, max(axes.get_ylim()[1], 1e-3))
            axes.legend(fontsize=8)
    return figure


def plot_row_norms(norms: dict[str, Sequence[RowNorms]]) -> Figure:
    """Histograms of the norms of table rows: some at random, and those that the text uses.

    Args:
        norms: of each model by its name, from `row_norms`.
    """
    layers = [[table.layer_id for table in tables] for tables in norms.values()]
    figure, grid = _panels(list(norms), layers, "Norms of table rows")
    for tables, row in zip(norms.values(), grid, strict=True):
        for table, axes in zip(tables, row, strict=False):
            largest = max(table.sample.max(), table.used.max(), np.finfo(np.float32).tiny)
            bins = np.linspace(0, largest * (1 + 1e-6), 61)
            which = "all" if len(table.sample) == table.n_rows else f"{len(table.sample):,} drawn from"
            for values, label, color in (
                (table.sample, f"{which} {table.n_rows:,} rows", COLORS[1]),
                (table.used, f"{len(table.used):,} rows that the text uses", COLORS[0]),
            ):
                share, _ = np.histogram(values, bins)
                axes.stairs(share / len(values), bins, color=color, alpha=0.25, fill=True)
                axes.stairs(share / len(values), bins, color=color, lw=1.4, label=label)
                axes.axvline(float(np.mean(values)), color=color, lw=1, ls=":")
            # Rows that were never trained may all be in one bin.
            axes.set_yscale("log")
            axes.set(xlim=(0, bins[-1]), xlabel="norm of a row (dotted: mean)", ylabel="share of rows")
            axes.legend(fontsize=8)
    return figure
