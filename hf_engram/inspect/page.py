"""The page: a text as a heat map of what the memory does, in one HTML file that needs nothing else."""

import base64
import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from .ablation import Ablation
from .trace import MemoryTrace


MOST_MODELS = 2


def check_comparable(traces: Sequence[MemoryTrace]) -> None:
    """Raises ValueError unless a page can show the traces side by side: one or two, of different names, of one text
    under one token map."""
    if not 1 <= len(traces) <= MOST_MODELS:
        raise ValueError(f"`traces` must hold one trace, or two to compare, got {len(traces)}.")
    first, last = traces[0], traces[-1]
    if first is last:
        return
    if first.name == last.name:
        raise ValueError(f"Both traces are named {first.name!r}: give `trace_memory` a `name` for each model.")
    for attribute, what in (("token_ids", "token ids"), ("compressed_ids", "compressed ids")):
        ours, theirs = getattr(first, attribute), getattr(last, attribute)
        if not np.array_equal(ours, theirs):
            raise ValueError(
                f"{first.name} and {last.name} have different {what} for the text ({len(ours)} and {len(theirs)}): "
                "only traces of one text, by models with one tokenizer, can be compared."
            )


def write_page(path: str | Path, traces: Sequence[MemoryTrace], ablations: dict[str, Ablation] | None = None) -> None:
    """Writes the page.

    Args:
        path: of the HTML file.
        traces: of one model, or of two on the same text, which are shown side by side.
        ablations (*optional*): losses to show, by the model's name.

    Raises:
        ValueError: the traces cannot be compared.
    """
    check_comparable(traces)
    parts = files(__package__)
    # "<" would end the element, or begin a comment in it; all else stays text in there.
    data = json.dumps(page_data(traces, ablations or {}), allow_nan=False).replace("<", "\\u003c")
    contents = {
        "title": html.escape("Engram memory: " + " and ".join(trace.name for trace in traces)),
        "style": (parts / "page.css").read_text(encoding="utf-8"),
        "script": (parts / "page.js").read_text(encoding="utf-8"),
        "data": data,
    }
    template = (parts / "page.html").read_text(encoding="utf-8")
    # In one pass, so that contents may hold what looks like a place.
    page = re.sub(r"\{\{(\w+)\}\}", lambda place: contents[place[1]], template)
    Path(path).write_text(page, encoding="utf-8")


def page_data(traces: Sequence[MemoryTrace], ablations: dict[str, Ablation]) -> dict[str, Any]:
    """What the page's script reads: numbers as typed arrays in base64, since they are many."""
    first = traces[0]
    distinct = list(dict.fromkeys(first.pieces))
    place = {piece: index for index, piece in enumerate(distinct)}
    return {
        "pieces": distinct,
        "tokens": packed(np.array([place[piece] for piece in first.pieces])),
        "compressed": packed(first.compressed_ids),
        "cut": first.n_cut,
        "models": [_model_data(trace, ablations.get(trace.name)) for trace in traces],
    }


def _model_data(trace: MemoryTrace, ablation: Ablation | None) -> dict[str, Any]:
    return {
        "name": trace.name,
        "sizes": list(trace.sizes),
        "heads": trace.n_heads,
        "copies": trace.layers[0].gates.shape[1],
        "windows": trace.window_starts,
        "reach": packed(trace.reach),
        "ablation": None if ablation is None else asdict(ablation),
        "layers": [
            {
                "id": layer.layer_id,
                "gates": packed(layer.gates),
                "shares": packed(layer.shares),
                "values": packed(layer.value_norms),
                "parts": packed(layer.size_shares),
                "rows": packed(layer.row_ids),
            }
            for layer in trace.layers
        ],
    }


def packed(array: np.ndarray) -> dict[str, str]:
    """An array, flat, for JavaScript: fp32 as such, others as the smallest of uint32 and float64 that holds them."""
    dtype = array.dtype
    if dtype != np.float32:
        is_small = np.issubdtype(dtype, np.integer) and (not array.size or 0 <= array.min() <= array.max() < 2**32)
        dtype = np.dtype(np.uint32) if is_small else np.dtype(np.float64)
    data = array.astype(dtype.newbyteorder("<")).tobytes()
    return {"type": dtype.name, "data": base64.b64encode(data).decode()}
