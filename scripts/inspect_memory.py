"""Look at what an Engram model's memory does with a text.

    python scripts/inspect_memory.py --model runs/quickstart --text notes.txt --output runs/inspect --ablate

Writes a page to open in a browser (index.html: the text as a heat map of gates, with the n-grams and rows behind every
token), four plots, and all numbers as JSON. The model is a folder or a Hub id; --compare shows a second one beside it.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoTokenizer

from hf_engram import EngramForCausalLM
from hf_engram.inspect import (
    Ablation,
    MemoryTrace,
    RowNorms,
    RowUsage,
    ablate,
    find_browser,
    plot_gate_frequency,
    plot_gates,
    plot_row_norms,
    plot_row_usage,
    report,
    row_norms,
    row_usage,
    take_screenshot,
    trace_memory,
    write_page,
)
from hf_engram.inspect.report import copy_summary
from hf_engram.inspect.trace import encode
from hf_engram.processes import check_processes
from hf_engram.run_folder import check_is_model


PAGE_FILE, NUMBERS_FILE = "index.html", "inspect.json"
DPI = 130
# The screenshot shows the card of one of the first tokens, so that it is in sight, but not the very first.
FIRST_TOKENS, FIRST_LINES = slice(24, 120), 14


def parse_args() -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    def device(text: str) -> str:
        try:
            torch.zeros(1, device=text).item()
        except (RuntimeError, AssertionError) as error:
            raise argparse.ArgumentTypeError(f"{text} cannot be used: {str(error).splitlines()[0]}") from error
        return text

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder or Hub id of an Engram model")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="the text to read, in UTF-8")
    parser.add_argument("--output", type=Path, default="runs/inspect", metavar="DIR", help="folder to write to")
    parser.add_argument("--compare", metavar="OTHER", help="a second model, with the same tokenizer")
    parser.add_argument("--ablate", action="store_true", help="also measure the loss with each Engram layer shut off; "
                        "on text that the model was not trained on, what the memory is worth")  # fmt: skip
    parser.add_argument("--max-tokens", type=count, default=5000, metavar="N", help="most tokens of the text to read")
    parser.add_argument("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="where to compute")  # fmt: skip
    parser.add_argument("--engram-placement", choices=("device", "cpu", "disk"), default=argparse.SUPPRESS,
                        help="where the tables live; by default as the model's config says")  # fmt: skip
    parser.add_argument("--screenshot", type=Path, metavar="FILE.png", help="also take a picture of the page, with a "
                        "Chromium browser")  # fmt: skip
    return parser.parse_args()


def check_output(folder: Path) -> None:
    """Refuses a folder that holds anything but an earlier run."""
    for path in (folder, *folder.parents):
        if path.is_file():
            raise SystemExit(f"error: --output {folder}: {path} is a file: name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NUMBERS_FILE).is_file():
        raise SystemExit(f"error: --output {folder} holds files that are not an earlier run's: name another folder.")


def check_screenshot(picture: Path) -> None:
    """Refuses a name that no picture can be written to, and a computer without a browser."""
    if picture.suffix.lower() != ".png":
        raise SystemExit(f"error: --screenshot {picture} does not end in .png, which is what it will be.")
    if not picture.parent.is_dir():
        raise SystemExit(f"error: --screenshot {picture} lies in a folder that does not exist: make it first.")
    try:
        find_browser()
    except FileNotFoundError as error:
        raise SystemExit(f"error: --screenshot: {error}") from error


def read_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SystemExit(f"error: --text {path} is not UTF-8 ({error}): convert it, e.g. with iconv.") from error
    except OSError as error:
        raise SystemExit(f"error: --text {path} cannot be read: {error}") from error
    if not text:
        raise SystemExit(f"error: --text {path} is empty.")
    return text


def names_of(paths: list[str]) -> list[str]:
    """How to call the models: by the last part of their paths, or by the whole where two are alike."""
    short = [path.rstrip("/").rpartition("/")[2] or path for path in paths]
    names = short if len(set(short)) == len(short) else paths
    if len(set(names)) < len(names):
        raise SystemExit(f"error: --compare names the same model as --model ({paths[0]}): name another.")
    return names


def load_tokenizers(paths: list[str], text: str, max_tokens: int) -> list:
    """The tokenizers of the models; refuses what cannot be inspected or compared, before any weights are loaded."""
    tokenizers = []
    for path in paths:
        check_is_model(path)
        config = AutoConfig.from_pretrained(path)
        if not getattr(config, "engram_layer_ids", None):
            raise ValueError(f"{path} ({config.model_type}) has no Engram layers: there is nothing to inspect.")
        tokenizers.append(AutoTokenizer.from_pretrained(path))
    first, last = tokenizers[0], tokenizers[-1]
    ids, _ = encode(first, text, max_tokens)
    other_ids, _ = encode(last, text, max_tokens)
    if ids.tolist() != other_ids.tolist() or first.token_map.tolist() != last.token_map.tolist():
        raise ValueError(
            f"{paths[0]} and {paths[1]} have different tokenizers or token maps, so that their tokens cannot be laid "
            "side by side: inspect each by itself, without --compare."
        )
    return tokenizers


def inspect_model(
    path: str, name: str, tokenizer, text: str, args: argparse.Namespace
) -> tuple[MemoryTrace, list[RowUsage], list[RowNorms], Ablation | None]:
    """Loads one model, reads the text with it, and lets it go."""
    placement = {"engram_placement": args.engram_placement} if "engram_placement" in args else {}
    model = EngramForCausalLM.from_pretrained(path, dtype="auto", **placement).eval().to(args.device)
    trace = trace_memory(model, tokenizer, text, args.max_tokens, name=name, progress=True)
    ablation = ablate(model, tokenizer, text, args.max_tokens, progress=True) if args.ablate else None
    norms = row_norms(model, trace)
    check_numbers(path, trace, norms, ablation)
    return trace, row_usage(trace), norms, ablation


def check_numbers(path: str, trace: MemoryTrace, norms: list[RowNorms], ablation: Ablation | None) -> None:
    """Refuses a model that computes no numbers, of which there is nothing to show."""
    for layer, table in zip(trace.layers, norms, strict=True):
        for what, values in (("gates", layer.gates[trace.reach > 0]), ("table rows", (table.sample, table.used))):
            if not all(map(np.all, map(np.isfinite, values))):
                raise ValueError(f"{path}: {what} of Engram layer {layer.layer_id} are not finite: its weights are "
                                 "damaged, or diverged in training.")  # fmt: skip
    if ablation is not None and not np.isfinite([ablation.loss, *ablation.without_layer.values()]).all():
        raise ValueError(f"{path}: the loss is {ablation.loss}: its weights are damaged, or diverged in training.")


def print_table(trace: MemoryTrace, usage: list[RowUsage], norms: list[RowNorms], ablation: Ablation | None) -> None:
    print(f"\n{trace.name}\nlayer  copy  gate: mean    10 %    90 %  above 1/2   share of the stream")
    for layer in trace.layers:
        for copy, numbers in enumerate(copy_summary(trace, layer)):
            columns = "{gate_mean:10.3f}  {gate_10:6.3f}  {gate_90:6.3f}  {gate_open:9.0%}   {share_mean:19.1%}"
            print(f"{layer.layer_id:5}  {copy:4}  {columns.format(**numbers)}")
    print("layer  n-grams  different  collisions  with a perfect hash   table rows  norm: mean  of those used")
    for layer, table in zip(trace.layers, norms, strict=True):
        for size in trace.sizes:
            heads = [column for column in usage if (column.layer_id, column.size) == (layer.layer_id, size)]
            measured = sum(column.collision_rate for column in heads) / len(heads)
            expected = sum(column.expected_collision_rate for column in heads) / len(heads)
            end = f"{table.n_rows:13,}  {table.sample.mean():10.3f}  {table.used.mean():13.3f}" if size == 2 else ""
            print(f"{layer.layer_id:5}  {size:7}  {heads[0].n_ngrams:9,}  {measured:10.3%}  {expected:19.3%}{end}")
    if ablation is not None:
        print(f"loss on {ablation.n_tokens:,} tokens: {ablation.loss:.4f}", end="")
        for layer_id, loss in ablation.without_layer.items():
            print(f", {loss:.4f} without layer {layer_id}", end="")
        print(f", {ablation.without_memory:.4f} without memory")


def fragment_for(trace: MemoryTrace) -> str:
    """The page's address part that shows the widest open gate among the first tokens, at a word if there is one."""
    layer = trace.layers[0]
    lines = np.cumsum(["\n" in piece for piece in trace.pieces])
    in_sight = range(int(np.searchsorted(lines, FIRST_LINES)))
    tokens = in_sight[FIRST_TOKENS] or in_sight
    words = [token for token in tokens if len(trace.pieces[token]) > 4 and trace.pieces[token].strip().isalpha()]
    token = max(words or tokens, key=lambda token: layer.gates[token].mean())
    return f"layer={layer.layer_id}&token={token}&theme=light"


def main() -> None:
    args = parse_args()
    check_processes()
    check_output(args.output)
    if args.screenshot is not None:
        check_screenshot(args.screenshot)
    text = read_text(args.text)
    paths = [args.model] if args.compare is None else [args.model, args.compare]
    names = names_of(paths)
    try:
        tokenizers = load_tokenizers(paths, text, args.max_tokens)
        results = [
            inspect_model(path, name, tokenizer, text, args)
            for path, name, tokenizer in zip(paths, names, tokenizers, strict=True)
        ]
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error

    traces = [trace for trace, *_ in results]
    first = traces[0]
    if first.n_cut:
        whole = len(first) + first.n_cut
        print(f"{first.n_cut:,} of {whole:,} tokens were left out: --max-tokens is {args.max_tokens}.")
    for trace in traces:
        if len(trace.window_starts) > 1:
            print(f"{trace.name} reads {trace.window_starts[1]:,} tokens at most (max_position_embeddings): the text "
                  f"was read in {len(trace.window_starts)} pieces, each by itself.")  # fmt: skip
    args.output.mkdir(parents=True, exist_ok=True)
    numbers = {"text": str(args.text), "models": [report(*result) for result in results]}
    (args.output / NUMBERS_FILE).write_text(json.dumps(numbers, allow_nan=False) + "\n", encoding="utf-8")
    page = args.output / PAGE_FILE
    write_page(page, traces, {trace.name: ablation for trace, *_, ablation in results if ablation is not None})
    figures = {
        "gates.png": plot_gates(traces),
        "gate_frequency.png": plot_gate_frequency(traces),
        "row_usage.png": plot_row_usage({trace.name: usage for trace, usage, *_ in results}),
        "row_norms.png": plot_row_norms({trace.name: norms for trace, _, norms, _ in results}),
    }
    for name, figure in figures.items():
        figure.savefig(args.output / name, dpi=DPI)
    for result in results:
        print_table(*result)
    if args.screenshot is not None:
        take_screenshot(page, args.screenshot, fragment_for(first))
        print(f"picture of the page: {args.screenshot}")
    print(f"\n{len(first):,} tokens; open {page.resolve()} in a browser. Plots and {NUMBERS_FILE} lie beside it.")


if __name__ == "__main__":
    main()
