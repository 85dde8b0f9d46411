"""Optimizers for the tables of an Engram model: what a step costs, what state takes, and how well models learn.

Two parts, each in one run, its alternatives taken in turn, step by step:

- "cost": a step with tables of 1e5 and of 1e7 rows, and the same batches: a whole training step (forward, backward,
  clipping, optimizer), and the optimizer's part for the tables alone.
- "learning": equal models on equal batches of real text (Python's own documentation and sources, as in
  scripts/quickstart.py), with AdamW for all but the tables, and for those each of the optimizers: held-out loss, time
  of the optimizer's step, bytes of state.

Run: `python benchmarks/optim.py`, `--help` for more. Times are those of the process on the CPU, so that a machine that
is not idle does not count; figures are medians.
"""

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path


# One thread: so a thread's time is the process's.
os.environ["OMP_NUM_THREADS"] = "1"
# Lets torch ask for large pages for large tensors, without which most of what a row of a large table costs is looking
# up its page.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from tqdm import tqdm

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer
from hf_engram.optim import EngramOptimizer, clip_grad_norm_


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from quickstart import cut_blocks, read_corpus, split_files, train_tokenizer


LEARNING_RATE = 2e-3
COLUMNS = 16


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def table_model(rows: int, tokens: int) -> EngramForCausalLM:
    """A small model with one table of `rows` rows."""
    config = EngramConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        hc_mult=1,
        max_position_embeddings=tokens,
        engram_layer_ids=[0],
        engram_max_ngram_size=3,
        engram_n_heads=COLUMNS // 2,
        engram_vocab_size=rows // COLUMNS,
        engram_head_dim=16,
    )
    model = EngramForCausalLM(config)
    model.model.engram_memory.sparse_grad = True
    return model


def measure_cost(rows_of: list[int], rounds: int, seed: int) -> list[dict]:
    """Median times of a training step and of its part for the tables, for each number of rows."""
    tokens, batch = 128, 4
    generator = torch.Generator().manual_seed(seed)
    # Each batch is new: a row in use is in no cache.
    draws = torch.rand(rounds + 2, batch, tokens, generator=generator).pow(2)
    models = {rows: table_model(rows, tokens) for rows in rows_of}
    optimizers = {rows: EngramOptimizer(model, lr=LEARNING_RATE) for rows, model in models.items()}
    times: dict[int, dict[str, list[float]]] = {rows: {"step": [], "tables": [], "per row": []} for rows in rows_of}
    for index, draw in enumerate(tqdm(draws, desc="cost", mininterval=1)):
        ids = (draw * 4096).long()
        for rows, model in models.items():
            optimizer = optimizers[rows]
            in_tables = 0.0

            def step(*arguments, optimizer=optimizer, inner=EngramOptimizer._step_table):
                nonlocal in_tables
                in_tables += cpu_seconds(lambda: inner(optimizer, *arguments))

            optimizer._step_table = step

            def train(model=model, optimizer=optimizer, ids=ids):
                model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
                clip_grad_norm_(model, 1.0)
                optimizer.step()

            elapsed = cpu_seconds(train)
            touched = model.model.engram_memory.tables[0].weight.grad._nnz()
            optimizer.zero_grad()
            if index >= 2:
                for name, value in (("step", elapsed), ("tables", in_tables), ("per row", in_tables / touched)):
                    times[rows][name].append(value)
    smallest = times[rows_of[0]]
    return [
        {
            "rows": rows,
            "step_ms": 1e3 * statistics.median(of["step"]),
            "tables_ms": 1e3 * statistics.median(of["tables"]),
            "ns_per_row": 1e9 * statistics.median(of["per row"]),
            # Of steps next to each other, on the same batch.
            "step_ratio": statistics.median(a / b for a, b in zip(of["step"], smallest["step"], strict=True)),
            "state_bytes_per_row": state_bytes([optimizers[rows]], models[rows]) / len(table_weights(models[rows])[0]),
        }
        for rows, of in times.items()
    ]


def table_weights(model: EngramForCausalLM) -> list[torch.Tensor]:
    return [table.weight for table in model.model.engram_memory.tables]


def state_bytes(optimizers: list[torch.optim.Optimizer], model: EngramForCausalLM) -> int:
    """Bytes of the state of the tables."""
    states = [optimizer.state[table] for optimizer in optimizers for table in table_weights(model)
              if table in optimizer.state]  # fmt: skip
    return sum(value.nbytes for state in states for value in state.values() if isinstance(value, torch.Tensor))


def make_optimizers(name: str, model: EngramForCausalLM) -> list[torch.optim.Optimizer]:
    """All with the same AdamW for what is not a table."""
    if name.startswith("EngramOptimizer"):
        model.model.engram_memory.sparse_grad = True
        options = {"table_momentum": 0.9} if "momentum" in name else {}
        return [EngramOptimizer(model, lr=LEARNING_RATE, **options)]
    tables = table_weights(model)
    rest = [p for n, p in model.named_parameters() if ".engram_memory." not in n]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LEARNING_RATE, fused=True)
    kind, rate = name.split()
    model.model.engram_memory.sparse_grad = kind != "AdamW"
    if kind == "AdamW":
        return [adamw, torch.optim.AdamW(tables, lr=float(rate), weight_decay=0.0, fused=True)]
    return [adamw, getattr(torch.optim, kind)(tables, lr=float(rate))]


# Those of torch with the tables' learning rate; AdamW is dense.
LEARNERS = [
    "EngramOptimizer",
    "EngramOptimizer momentum",
    "SparseAdam 0.01",
    "Adagrad 0.05",
    "Adagrad 0.1",
    "AdamW 0.002",
    "AdamW 0.01",
]


class Learner:
    """A model with its optimizers and its times."""

    def __init__(self, name: str, tokenizer: EngramTokenizer, length: int, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        config = EngramConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=288,
            num_hidden_layers=2,
            num_attention_heads=4,
            hc_mult=1,
            max_position_embeddings=length,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            engram_head_dim=16,
            **tokenizer.engram_fields(),
        )
        self.name, self.times = name, []
        self.model = EngramForCausalLM(config).bind_tokenizer(tokenizer)
        self.optimizers = make_optimizers(name, self.model)
        warmup = min(20, steps)

        def schedule(step: int) -> float:
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

        self.schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) for optimizer in self.optimizers]

    def step(self, batch: torch.Tensor) -> None:
        self.model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        self.times.append(cpu_seconds(lambda: [optimizer.step() for optimizer in self.optimizers]))
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.zero_grad()
            schedule.step()

    @torch.no_grad()
    def evaluate(self, blocks: torch.Tensor) -> float:
        losses = [self.model(input_ids=b, labels=b, use_cache=False).loss.item() * len(b) for b in blocks.split(32)]
        return sum(losses) / len(blocks)


def measure_learning(names: list[str], steps: int, seeds: list[int], max_files: int) -> list[dict]:
    """Held-out loss, time and state of each optimizer, over seeds of weights and order."""
    length, batch = 64, 16
    corpus = read_corpus()
    train_files, held_out_files = split_files(list(corpus), 0, max_files)
    tokenizer = train_tokenizer([corpus[name] for name in train_files], 4096)
    tokenizer = EngramTokenizer.from_tokenizer(
        tokenizer, engram_layer_ids=[0], engram_max_ngram_size=3, engram_n_heads=8, engram_vocab_size=20_000
    )
    blocks = cut_blocks(tokenizer, [corpus[name] for name in train_files], length)
    held_out = cut_blocks(tokenizer, [corpus[name] for name in held_out_files], length)
    held_out = held_out[torch.linspace(0, len(held_out) - 1, min(192, len(held_out))).long()]
    results = {name: {"loss": [], "times": [], "state": 0} for name in names}
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        epochs = math.ceil(steps * batch / len(blocks))
        order = torch.cat([torch.randperm(len(blocks), generator=generator) for _ in range(epochs)])
        learners = [Learner(name, tokenizer, length, steps, seed) for name in names]
        for step in tqdm(range(steps), desc=f"learning, seed {seed}", mininterval=1):
            for learner in learners:
                learner.step(blocks[order[step * batch : (step + 1) * batch]])
        for learner in learners:
            result = results[learner.name]
            result["loss"].append(learner.evaluate(held_out))
            result["times"] += learner.times[2:]
            result["state"] = state_bytes(learner.optimizers, learner.model)
    return [
        {
            "optimizer": name,
            "held_out_loss": statistics.mean(result["loss"]),
            "losses": result["loss"],
            "optimizer_ms": 1e3 * statistics.median(result["times"]),
            "table_state_mb": result["state"] / 1e6,
        }
        for name, result in results.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["cost", "learning"], choices=["cost", "learning"])
    parser.add_argument("--rows", nargs="+", type=int, default=[100_000, 10_000_000], help="tables to compare")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each table (default 15)")
    parser.add_argument("--optimizers", nargs="+", default=LEARNERS, choices=LEARNERS)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default 200)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--max-files", type=int, default=150, help="modules of text to use (default 150)")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()
    torch.set_num_threads(1)

    figures = {"torch": torch.__version__}
    if "cost" in args.parts:
        figures["cost"] = measure_cost(args.rows, args.rounds, args.seeds[0])
        print(
            f"{'rows':>11} {'training step ms':>17} {'ratio':>6} {'tables ms':>10} {'ns/row':>7} {'state B/row':>12}"
        )
        for row in figures["cost"]:
            print(
                f"{row['rows']:11,} {row['step_ms']:17.1f} {row['step_ratio']:6.3f} {row['tables_ms']:10.2f} "
                f"{row['ns_per_row']:7.0f} {row['state_bytes_per_row']:12.1f}"
            )
    if "learning" in args.parts:
        figures["learning"] = measure_learning(args.optimizers, args.steps, args.seeds, args.max_files)
        print(f"{'tables by':25} {'held-out loss':>13} {'optimizer step ms':>18} {'table state MB':>15}")
        for row in figures["learning"]:
            print(
                f"{row['optimizer']:25} {row['held_out_loss']:13.4f} {row['optimizer_ms']:18.1f} "
                f"{row['table_state_mb']:15.1f}"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
