"""All that was measured of one model, as numbers that JSON can hold."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from .ablation import Ablation
from .tables import RowNorms, RowUsage
from .trace import LayerTrace, MemoryTrace


# Significant digits are those of fp32; JSON would write twice as many.
DECIMALS = 7


def report(
    trace: MemoryTrace, usage: Sequence[RowUsage], norms: Sequence[RowNorms], ablation: Ablation | None = None
) -> dict[str, Any]:
    """A summary of each layer, and everything at every token.

    Returns:
        `dict`: `"name"`; `"layers"`, one dict for each Engram layer: `"copies"` (see `copy_summary`), `"row_norms"`,
        `"row_usage"`, and lists over the tokens: `"gates"` and `"shares"` `[L][H]`, `"value_norms"` `[L]`,
        `"size_shares"` `[L][N - 1]`, `"row_ids"` `[L][C]`; `"tokens"`, the pieces; `"ngrams"`, for each size the
        n-gram at each token, in pieces; and `"ablation"`. None stands where a number is not finite.
    """
    return {
        "name": trace.name,
        "n_tokens": len(trace),
        "n_tokens_left_out": trace.n_cut,
        "window_starts": trace.window_starts,
        "layers": [
            {
                "layer_id": layer.layer_id,
                "copies": copy_summary(trace, layer),
                "row_norms": _norm_summary(table),
                "row_usage": [_usage_summary(column) for column in usage if column.layer_id == layer.layer_id],
                "gates": _numbers(layer.gates),
                "shares": _numbers(layer.shares),
                "value_norms": _numbers(layer.value_norms),
                "size_shares": _numbers(layer.size_shares),
                "row_ids": layer.row_ids.tolist(),
            }
            for layer, table in zip(trace.layers, norms, strict=True)
        ],
        "token_ids": trace.token_ids.tolist(),
        "tokens": trace.pieces,
        "ngrams": {size: [trace.ngram(position, size) for position in range(len(trace))] for size in trace.sizes},
        "ablation": None if ablation is None else asdict(ablation),
    }


def copy_summary(trace: MemoryTrace, layer: LayerTrace) -> list[dict[str, float]]:
    """For each copy of the stream the gate's mean and deciles, how often it is above one half, and the mean share."""
    live = trace.reach > 0
    summary = []
    for gates, shares in zip(layer.gates[live].T, layer.shares[live].T, strict=True):
        low, middle, high = np.quantile(gates, (0.1, 0.5, 0.9))
        summary.append(
            {
                "gate_mean": float(gates.mean()),
                "gate_10": float(low),
                "gate_median": float(middle),
                "gate_90": float(high),
                "gate_open": float((gates > 0.5).mean()),
                "share_mean": float(shares[np.isfinite(shares)].mean()),
            }
        )
    return summary


def _usage_summary(column: RowUsage) -> dict[str, float]:
    rates = {name: getattr(column, name) for name in ("collision_rate", "expected_collision_rate")}
    return {name: value for name, value in asdict(column).items() if name != "layer_id"} | rates


def _norm_summary(table: RowNorms) -> dict[str, float]:
    return {
        "n_rows": table.n_rows,
        "n_sampled": len(table.sample),
        "sample_mean": float(table.sample.mean()),
        "sample_zero": float((table.sample == 0).mean()),
        "n_used": len(table.used),
        "used_mean": float(table.used.mean()),
        "used_zero": float((table.used == 0).mean()),
    }


def _numbers(array: np.ndarray) -> list:
    rounded = array.astype(np.float64).round(DECIMALS)
    return np.where(np.isfinite(rounded), rounded.astype(object), None).tolist()
