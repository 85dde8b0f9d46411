"""Is the memory worth its bytes? Models with and without it, trained alike on real text: held-out loss, and why.

    python benchmarks/learning.py            # everything: 27 models, within an hour on two cores
    python benchmarks/learning.py --quick    # fewer steps and one seed: what to expect of the figures, not the figures

Text: Python's own documentation and sources as they are installed, split by file. All models see the same batches in
the same order (of a seed), with the optimizer and the initialisation that are the package's defaults, so nothing here
is tuned to the memory. A model is compared with its twin without memory, whose MLPs are wider, so that both use as
many parameters per token: all of them, and of the tables the rows that a token reads.

Time is that of the one thread that computes a model: the wall time it would take on an idle core. Models are spread
over the cores. A finished model's figures are kept in the output folder, so that an interrupted run goes on.
"""

import argparse
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path


os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; one thread a model

import numpy as np
import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer
from hf_engram.optim import EngramOptimizer, clip_grad_norm_


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from quickstart import cut_blocks, read_corpus, split_files, train_tokenizer


BLOCK, BATCH = 128, 16
LEARNING_RATE = 2e-3
SIZES = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "max_position_embeddings": BLOCK}
INTERMEDIATE_SIZE = 384
ENGRAM_LAYERS, COLUMNS, ROW_WIDTH = [1, 3], 12, 32
# What a token of the held-out text can be, by the longest n-gram seen in training that it is the end of.
CLASSES = ("3-gram seen", "only 2-gram seen", "neither seen")


@dataclass(frozen=True)
class Arm:
    """A kind of model: with or without memory, copies of the stream, longest n-gram, least rows a hash column.

    Of every order there are as many columns in all, so as many rows and as many parameters that read them.
    """

    name: str
    memory: bool = True
    hc_mult: int = 1
    ngram_size: int = 3
    rows: int = 25_000

    @property
    def n_heads(self) -> int:
        return COLUMNS // (self.ngram_size - 1)


MAIN, TWIN = Arm("memory"), Arm("no memory", memory=False)
ARMS = [
    TWIN,
    MAIN,
    Arm("no memory, 4 copies", memory=False, hc_mult=4),
    Arm("memory, 4 copies", hc_mult=4),
    Arm("2-grams", ngram_size=2),
    Arm("2- to 4-grams", ngram_size=4),
    Arm("1,000 rows a column", rows=1_000),
    Arm("5,000 rows a column", rows=5_000),
    Arm("125,000 rows a column", rows=125_000),
]
TABLE_SIZES = [ARMS[6], ARMS[7], MAIN, ARMS[8]]
ORDERS = [ARMS[4], MAIN, ARMS[5]]


# --- models ----------------------------------------------------------------------------------------------------------


def make_model(
    arm: Arm, tokenizer: EngramTokenizer, seed: int, intermediate_size: int = INTERMEDIATE_SIZE
) -> EngramForCausalLM:
    """A fresh model of the package's defaults."""
    layers = ENGRAM_LAYERS if arm.memory else []
    layout = {"engram_layer_ids": layers, "engram_head_dim": ROW_WIDTH}
    if layers:
        tokenizer = EngramTokenizer.from_tokenizer(
            tokenizer,
            engram_layer_ids=layers,
            engram_max_ngram_size=arm.ngram_size,
            engram_n_heads=arm.n_heads,
            engram_vocab_size=arm.rows,
        )
        layout |= tokenizer.engram_fields()
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = EngramConfig(
        **SIZES, **ids, **layout, vocab_size=len(tokenizer), hc_mult=arm.hc_mult, intermediate_size=intermediate_size
    )
    torch.manual_seed(seed)
    model = EngramForCausalLM(config)
    return model.bind_tokenizer(tokenizer) if layers else model


def active_parameters(model: EngramForCausalLM) -> int:
    """Parameters that a token uses: all but the tables, and the rows that it reads of these."""
    layers = len(model.config.engram_layer_ids)
    outside = sum(p.numel() for name, p in model.named_parameters() if ".engram_memory." not in name)
    return outside + layers * COLUMNS * ROW_WIDTH


def make_arm(arm: Arm, tokenizer: EngramTokenizer, seed: int) -> EngramForCausalLM:
    """The arm's model; without memory, with MLPs as wide as it takes to use no fewer parameters than its twin."""
    if arm.memory:
        return make_model(arm, tokenizer, seed)
    twin = make_model(dataclasses.replace(arm, memory=True, rows=100), tokenizer, seed)
    missing = active_parameters(twin) - active_parameters(make_model(arm, tokenizer, seed))
    wider = math.ceil(missing / (3 * SIZES["hidden_size"] * SIZES["num_hidden_layers"]))
    return make_model(arm, tokenizer, seed, INTERMEDIATE_SIZE + wider)


@torch.no_grad()
def token_losses(model: EngramForCausalLM, blocks: torch.Tensor) -> torch.Tensor:
    """Loss of every token but the first of each block, in nats: fp32 `[n_blocks, L - 1]`."""
    losses = []
    for ids in blocks.split(32):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2).float(), ids[:, 1:], reduction="none"))
    return torch.cat(losses)


def train(arm: Arm, seed: int, steps: int, data: dict[str, torch.Tensor], tokenizer: EngramTokenizer) -> dict:
    """Trains one model. Returns its curve, the sums of its held-out losses by class, and what fp8 tables do to it."""
    torch.set_num_threads(1)
    model = make_arm(arm, tokenizer, seed)
    if arm.memory:
        model.model.engram_memory.sparse_grad = True
    optimizer = EngramOptimizer(model, lr=LEARNING_RATE, weight_decay=0.1)
    warmup = min(40, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    batches = batch_order(len(data["train"]), seed, steps)
    few = data["held_out"][:: max(1, len(data["held_out"]) // 128)]
    curve, seconds = [], 0.0
    for step in range(steps + 1):
        if step % max(1, steps // 10) == 0 or step == steps:
            loss = token_losses(model, few).mean().item()
            curve.append({"step": step, "seconds": seconds, "loss": loss})
        if step == steps:
            break
        start = time.thread_time()
        ids = data["train"][batches[step]]
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        seconds += time.thread_time() - start
        if not math.isfinite(loss.item()):
            raise FloatingPointError(f"{arm.name}, seed {seed}: the loss of step {step} is {loss.item()}.")
    model.eval()
    losses = token_losses(model, data["held_out"])
    result = {"arm": arm.name, "seed": seed, "curve": curve, "loss": losses.mean().item()}
    result |= {"seconds": seconds, "active_parameters": active_parameters(model)}
    result["table_bytes"] = sum(t.weight.nbytes for t in model.model.engram_memory.tables) if arm.memory else 0
    result["by_class"] = [losses[data["classes"] == c].double().sum().item() for c in range(len(CLASSES))]
    result["by_context"] = [losses[data["contexts"] == c].double().sum().item() for c in range(len(CLASSES))]
    if arm == MAIN:
        model.quantize_tables()
        result["fp8_loss"] = token_losses(model, data["held_out"]).mean().item()
    return result


# --- text ------------------------------------------------------------------------------------------------------------


def batch_order(n_blocks: int, seed: int, steps: int) -> torch.Tensor:
    """Indices of the blocks of each step, `[steps, BATCH]`: epoch after epoch, each block once in each."""
    generator = torch.Generator().manual_seed(seed)
    epochs = math.ceil(steps * BATCH / n_blocks)
    order = torch.cat([torch.randperm(n_blocks, generator=generator) for _ in range(epochs)])
    return order[: steps * BATCH].view(steps, BATCH)


def ngrams(ids: np.ndarray, size: int) -> np.ndarray:
    """A number for each n-gram that ends at a token, int64 `[n_blocks, L]`; -1 where the block begins too late."""
    numbers = np.full(ids.shape, -1, dtype=np.int64)
    window = np.lib.stride_tricks.sliding_window_view(ids.astype(np.int64), size, axis=1)
    numbers[:, size - 1 :] = window @ (int(ids.max()) + 1) ** np.arange(size, dtype=np.int64)
    return numbers


def seen_class(train_ids: np.ndarray, ids: np.ndarray) -> torch.Tensor:
    """Index into `CLASSES` of every token of `ids`, int64 of its shape; both in compressed ids."""
    both = np.concatenate([train_ids, ids])  # numbered alike
    seen = {}
    for size in (2, 3):
        numbers = ngrams(both, size)
        seen[size] = np.isin(numbers[len(train_ids) :], np.setdiff1d(numbers[: len(train_ids)], [-1]))
    return torch.from_numpy(np.where(seen[3], 0, np.where(seen[2], 1, 2)))


def read_data(args: argparse.Namespace) -> tuple[dict[str, torch.Tensor], EngramTokenizer]:
    """The text as blocks of token ids; a tokenizer made of the part to train on."""
    corpus = read_corpus()
    train_files, held_out_files = split_files(list(corpus), 0, args.max_files)
    tokenizer = train_tokenizer([corpus[name] for name in train_files], 4096)
    train_blocks, held_out = (
        cut_blocks(tokenizer, [corpus[name] for name in names], BLOCK) for names in (train_files, held_out_files)
    )
    held_out = held_out[torch.linspace(0, len(held_out) - 1, min(args.held_out_blocks, len(held_out))).long()]
    print(f"{len(train_files)} files, {train_blocks.numel():,} tokens to train on; of {len(held_out_files)} others, "
          f"{held_out.numel():,} tokens are held out", flush=True)  # fmt: skip
    return {"train": train_blocks, "held_out": held_out}, tokenizer


def classify(data: dict[str, torch.Tensor], tokenizer: EngramTokenizer, seed: int, steps: int) -> dict:
    """Which held-out tokens end an n-gram that these steps train on ("classes"), and of which tokens the n-gram before
    them, by whose rows they are predicted, is one ("contexts"); int64 `[n_blocks, L - 1]`."""
    used = data["train"][batch_order(len(data["train"]), seed, steps).flatten().unique()]
    token_map = np.asarray(tokenizer.token_map)
    classes = seen_class(token_map[used.numpy()], token_map[data["held_out"].numpy()])
    return {**data, "classes": classes[:, 1:], "contexts": classes[:, :-1]}


# --- figures ---------------------------------------------------------------------------------------------------------


def mean_and_spread(values: list[float]) -> str:
    spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{spread}"


def gains(results: dict[str, list[dict]], arm: Arm) -> list[float]:
    """Nats that the arm is ahead of the twin without memory (and with as many copies), seed by seed."""
    twin = next(other for other in ARMS if not other.memory and other.hc_mult == arm.hc_mult)
    without = {run["seed"]: run["loss"] for run in results[twin.name]}
    return [without[run["seed"]] - run["loss"] for run in results[arm.name]]


def at_time(curve: list[dict], seconds: float) -> float:
    """Loss after so much time, between the points of a curve."""
    return float(np.interp(seconds, [p["seconds"] for p in curve], [p["loss"] for p in curve]))


def report(results: dict[str, list[dict]], counts: dict[str, list[int]], settings: dict) -> str:
    """The tables, in Markdown."""
    lines = ["# What the memory is worth", ""]
    lines.append(
        f"{settings['steps']} steps of {BATCH * BLOCK} tokens, seeds {settings['seeds']}; held-out loss in nats per "
        f"token, mean and standard deviation over seeds. "
        f"Torch {settings['torch']}, {settings['date']}."
    )
    lines += ["", "| model | active parameters | tables | held-out loss | gain of memory | seconds |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for arm in ARMS:
        if arm.name not in results:
            continue
        runs = results[arm.name]
        lines.append(
            f"| {arm.name} | {runs[0]['active_parameters']:,} | {runs[0]['table_bytes'] / 2**20:,.0f} MiB "
            f"| {mean_and_spread([run['loss'] for run in runs])} "
            f"| {mean_and_spread(gains(results, arm)) if arm.memory else ''} "
            f"| {statistics.mean(run['seconds'] for run in runs):.0f} |"
        )
    with_memory, without = results[MAIN.name], results[TWIN.name]
    pairs = list(zip(with_memory, without, strict=True))
    ends = [min(a["seconds"], b["seconds"]) for a, b in pairs]
    timed = [at_time(b["curve"], end) - at_time(a["curve"], end) for (a, b), end in zip(pairs, ends, strict=True)]
    stepped = [b["curve"][-1]["loss"] - a["curve"][-1]["loss"] for a, b in pairs]
    lines += [
        "",
        f"At equal time ({statistics.mean(ends):.0f} s, when the faster of the two is done) the gain is "
        f"{mean_and_spread(timed)} nats; by steps, on the same sample, {mean_and_spread(stepped)}.",
        "",
    ]
    changes = [run["fp8_loss"] - run["loss"] for run in with_memory]
    lines.append(f"Tables quantised to fp8 after training: loss {statistics.mean(changes):+.5f} nats (largest change "
                 f"{max(map(abs, changes)):.5f}).")  # fmt: skip
    titles = {
        "by_class": "Where the gain is, by the longest n-gram seen in training that the predicted token ends:",
        "by_context": "The same by the n-gram before it, whose rows it is predicted from:",
    }
    for key, title in titles.items():
        lines += ["", title, "", "| | tokens | loss without | gain | share of the gain |", "|---|---:|---:|---:|---:|"]
        lost, gained = class_means(results, key)
        tokens = np.array(counts[key], dtype=float)
        for c, name in enumerate(CLASSES):
            lines.append(f"| {name} | {tokens[c] / tokens.sum():.0%} | {lost[c] / tokens[c]:.3f} "
                         f"| {gained[c] / tokens[c]:.3f} | {gained[c] / gained.sum():.0%} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def class_means(results: dict[str, list[dict]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """By class, the summed loss without memory and the sum that memory takes off it, mean over seeds."""
    without = np.array([run[key] for run in results[TWIN.name]])
    with_memory = np.array([run[key] for run in results[MAIN.name]])
    return without.mean(0), (without - with_memory).mean(0)


def plot(results: dict[str, list[dict]], counts: dict[str, list[int]], path: Path) -> None:
    """Curves over steps and time, the gain by class, and what orders, table size and copies change."""
    figure = Figure(figsize=(13, 7.5), layout="constrained")
    (by_step, by_time, by_class), (by_size, by_order, by_copies) = figure.subplots(2, 3)
    for arm, color in ((TWIN, "tab:gray"), (MAIN, "tab:blue")):
        for run in results[arm.name]:
            losses, label = [p["loss"] for p in run["curve"]], arm.name if run is results[arm.name][0] else None
            by_step.plot([p["step"] for p in run["curve"]], losses, color=color, alpha=0.7, label=label)
            by_time.plot([p["seconds"] for p in run["curve"]], losses, color=color, alpha=0.7, label=label)
    by_step.set(title="held-out loss over steps", xlabel="step", ylabel="nats per token")
    by_time.set(title="held-out loss over time", xlabel="seconds, one thread", ylabel="nats per token")
    by_step.legend()
    _, gained = class_means(results, "by_class")
    tokens = np.array(counts["by_class"], dtype=float)
    bars = by_class.bar(range(len(CLASSES)), gained / tokens, color="tab:blue")
    by_class.bar_label(bars, [f"{share:.0%} of the gain" for share in gained / gained.sum()])
    by_class.set_xticks(range(len(CLASSES)), CLASSES)
    by_class.set(title="gain by what training has seen", ylabel="nats per token")
    for axes, arms, labels, title in (
        (by_size, TABLE_SIZES, [f"{arm.rows:,}" for arm in TABLE_SIZES], "gain by rows a column"),
        (by_order, ORDERS, ["2", "2-3", "2-4"], "gain by n-gram sizes"),
        (by_copies, [MAIN, ARMS[3]], ["1", "4"], "gain by copies of the stream"),
    ):
        there = [i for i, arm in enumerate(arms) if arm.name in results]
        of = {i: gains(results, arms[i]) for i in there}
        axes.plot(there, [statistics.mean(of[i]) for i in there], "o-", color="tab:blue")
        points = [(i, gain) for i in there for gain in of[i]]
        axes.plot(*zip(*points, strict=True), ".", color="black", alpha=0.5)
        axes.set_xticks(there, [labels[i] for i in there])
        axes.set(title=title, ylabel="nats per token", ylim=(0, None))
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/learning"), help="folder (default runs/learning)")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, and half of the models")
    parser.add_argument("--steps", type=int, help="training steps of each model (default 300; quick: 60)")
    parser.add_argument("--seeds", type=int, nargs="+", help="of weights and order (default 0 1 2; quick: 0)")
    parser.add_argument("--max-files", type=int, help="most modules to use (default all; quick: 200)")
    parser.add_argument("--held-out-blocks", type=int, default=480, help="blocks to measure on (default 480)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="models at a time (default: one a core)")
    args = parser.parse_args()
    args.steps = args.steps or (60 if args.quick else 300)
    args.seeds = args.seeds or ([0] if args.quick else [0, 1, 2])
    args.max_files = args.max_files or (200 if args.quick else None)
    arms = [TWIN, MAIN, ARMS[6]] if args.quick else ARMS
    start = time.perf_counter()

    data, tokenizer = read_data(args)
    data = {seed: classify(data, tokenizer, seed, args.steps) for seed in args.seeds}
    shared = {"steps": args.steps, "max_files": args.max_files, "held_out_blocks": args.held_out_blocks}
    folder = args.output / "models"
    folder.mkdir(parents=True, exist_ok=True)
    # Spawned: a fork of a process whose libraries have threads may wait for one of them for ever.
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        jobs = {}
        for arm, seed in itertools.product(arms, args.seeds):
            file = folder / f"{arm.name.replace(' ', '_')}-{seed}.json"
            settings = {**shared, **dataclasses.asdict(arm), "seed": seed}
            if not file.exists() or json.loads(file.read_text(encoding="utf-8"))["settings"] != settings:
                jobs[pool.submit(train, arm, seed, args.steps, data[seed], tokenizer)] = file, settings
        for job in tqdm(as_completed(jobs), total=len(jobs), desc="models"):
            file, settings = jobs[job]
            file.write_text(json.dumps(job.result() | {"settings": settings}, indent=1) + "\n", encoding="utf-8")

    files = {arm: [folder / f"{arm.name.replace(' ', '_')}-{seed}.json" for seed in args.seeds] for arm in arms}
    results = {arm.name: [json.loads(f.read_text(encoding="utf-8")) for f in of] for arm, of in files.items()}
    counts = {
        key: np.mean([np.bincount(data[seed][name].flatten(), minlength=3) for seed in args.seeds], axis=0).tolist()
        for key, name in (("by_class", "classes"), ("by_context", "contexts"))
    }
    settings = {
        **shared,
        "seeds": args.seeds,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    text = report(results, counts, settings)
    (args.output / "learning.md").write_text(text, encoding="utf-8")
    everything = {"settings": settings, "counts": counts, "results": results}
    (args.output / "learning.json").write_text(json.dumps(everything, indent=1) + "\n", encoding="utf-8")
    plot(results, counts, args.output / "learning.png")
    print(text)
    print(f"{time.perf_counter() - start:.0f} s; tables, figures and curves are in {args.output}")


if __name__ == "__main__":
    main()
