"""Looking into an Engram model: what its memory does with a text, what each layer is worth, and what its tables hold.

    trace = trace_memory(model, tokenizer, text)    # gates, norms, n-grams and rows, at every token
    trace.layer(1).gates                            # [L, H]
    ablate(model, tokenizer, text)                  # the loss without each Engram layer
    row_usage(trace), row_norms(model, trace)       # collisions; norms of rows
    write_page("page.html", [trace])                # the text as a heat map, to look at in a browser

`scripts/inspect_memory.py` does all of it from the command line.
"""

from .ablation import Ablation, ablate, shut_off
from .page import write_page
from .plots import plot_gate_frequency, plot_gates, plot_row_norms, plot_row_usage
from .report import report
from .screenshot import find_browser, take_screenshot
from .tables import RowNorms, RowUsage, expected_rows, row_norms, row_usage
from .trace import LayerTrace, MemoryTrace, trace_memory


__all__ = [
    "Ablation",
    "LayerTrace",
    "MemoryTrace",
    "RowNorms",
    "RowUsage",
    "ablate",
    "expected_rows",
    "find_browser",
    "plot_gate_frequency",
    "plot_gates",
    "plot_row_norms",
    "plot_row_usage",
    "report",
    "row_norms",
    "row_usage",
    "shut_off",
    "take_screenshot",
    "trace_memory",
    "write_page",
]
