"""What to expect from fine-tuning a pretrained decoder: LoRA alone, memory alone, both.

    apt-get download manpages-de && dpkg -x manpages-de_*.deb pages      # German manual pages; Debian, Ubuntu
    python benchmarks/finetune.py --model my-smollm2 --data pages/usr/share/man/de

Each arm is one run of scripts/train.py, which the backbone enters as it is, on the same blocks in the same order, at
the same learning rate; so what can be measured here can be had with that script (its commands are printed). Text is a
folder: of manual pages (.gz), whose markup is taken off, or of any text files. Documents are held out whole.

With the defaults and SmolLM2-135M, about five minutes an arm on two cores. Arms that are finished are not run again.
"""

import argparse
import gzip
import json
import random
import re
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
from matplotlib.figure import Figure


TRAIN = Path(__file__).resolve().parents[1] / "scripts" / "train.py"
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA = ["--lora", "16", "--lora-targets", *PROJECTIONS]
# The options of scripts/train.py that make an arm. Without Engram layers, LoRA is what it is to a plain decoder.
ARMS = {
    "LoRA": [*LORA, "--config", "engram_layer_ids=[]"],
    "memory": ["--memory-only", "--config"],
    "LoRA and memory": [*LORA, "--lora-full", "engram", "--config"],
}
COLORS = {"LoRA": "tab:orange", "memory": "tab:blue", "LoRA and memory": "tab:green"}


def plain_text(page: str) -> str:
    """The text of a manual page in roff: without requests, comments and fonts, and without the note on its translators
    that ends every page."""
    page = page.partition("\n.SH ÜBERSETZUNG")[0]
    page = re.sub(r"\\f(?:\[\w*\]|\(\w\w|\w)|\\[,/&|^]|\\s[+-]?\d", "", page)
    page = re.sub(r"\\\((?:co|hy)|\\-", "-", page).replace("\\e", "\\").replace("\\(bu", "*")
    lines = []
    for line in page.splitlines():
        heading = re.match(r"\.\s*(?:SH|SS|B|I|BR|IR|BI|IB|RB|RI|IP)\b\s*(.*)", line)
        if heading:
            lines.append(heading[1].replace('"', ""))
        elif not line.startswith((".", "'")):
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def write_corpus(source: Path, folder: Path, documents: int, seed: int) -> None:
    """Some documents of a folder as plain text files, the same ones for a seed."""
    files = sorted(path for path in source.rglob("*") if path.is_file())
    files = random.Random(seed).sample(files, min(documents, len(files)))
    if not files:
        raise SystemExit(f"error: --data {source} holds no files.")
    folder.mkdir(parents=True, exist_ok=True)
    for index, path in enumerate(files):
        data = path.read_bytes()
        text = plain_text(gzip.decompress(data).decode("utf-8")) if path.suffix == ".gz" else data.decode("utf-8")
        (folder / f"{index:04d}.txt").write_text(text + "\n", encoding="utf-8")


def cpu_seconds() -> float:
    """Of the processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def run_arm(name: str, options: list[str], args: argparse.Namespace, corpus: Path) -> dict:
    """Trains one arm. Returns its held-out losses by step, and the seconds that cores worked for it."""
    output = args.output / name.replace(" ", "-")
    record = output.with_suffix(".json")
    if options[-1] == "--config":
        layers = ",".join(map(str, args.engram_layer_ids))
        options = [*options, f"engram_layer_ids=[{layers}]", f"engram_vocab_size={args.engram_vocab_size}",
                   f"engram_head_dim={args.engram_head_dim}"]  # fmt: skip
    command = [
        str(TRAIN), str(output), "--data", str(corpus), "--model", args.model, *options, "--steps", str(args.steps),
        "--batch-size", str(args.batch_size), "--block-size", str(args.block_size), "--lr", str(args.lr),
        "--warmup", str(max(1, args.steps // 20)), "--eval-share", "0.2", "--eval-blocks", str(args.eval_blocks),
        "--eval-every", str(max(1, args.steps // 2)), "--save-every", str(args.steps), "--seed", str(args.seed),
    ]  # fmt: skip
    if record.exists():
        finished = json.loads(record.read_text(encoding="utf-8"))
        if finished["command"] == command:
            return finished
    print(f"{name}: python {shlex.join(command)}", flush=True)
    start = cpu_seconds()
    if subprocess.run([sys.executable, *command]).returncode:
        raise SystemExit(f"error: the run {name!r} failed; its error is above.")
    metrics = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    curve = [(entry["step"], entry["eval_loss"]) for entry in metrics if "eval_loss" in entry]
    finished = {"command": command, "curve": curve, "cpu_seconds": cpu_seconds() - start}
    record.write_text(json.dumps(finished, indent=1) + "\n", encoding="utf-8")
    return finished


def report(results: dict[str, dict], args: argparse.Namespace) -> str:
    base = results["LoRA"]["curve"][0][1]
    lines = [
        f"{args.steps} steps of {args.batch_size * args.block_size} tokens, learning rate {args.lr:g}; held-out loss "
        f"in nats per token. Torch {torch.__version__}, {time.strftime('%Y-%m-%d')}.",
        "",
        "| | before | "
        + " | ".join(f"step {step}" for step, _ in results["LoRA"]["curve"][1:])
        + " | gain | core minutes |",
        "|---|" + "---:|" * (len(results["LoRA"]["curve"]) + 2),
    ]
    for name, result in results.items():
        losses = [loss for _, loss in result["curve"]]
        lines.append(f"| {name} | " + " | ".join(f"{loss:.3f}" for loss in losses)
                     + f" | {base - losses[-1]:.3f} | {result['cpu_seconds'] / 60:.1f} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def plot(results: dict[str, dict], path: Path) -> None:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        steps, losses = zip(*result["curve"], strict=True)
        axes.plot(steps, losses, "o-", color=COLORS[name], label=f"{name}: {losses[-1]:.3f}")
    axes.set(xlabel="step", ylabel="held-out loss (nats per token)", title="Fine-tuning a pretrained decoder")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formatter)
    parser.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="decoder: a folder or a Hub id")
    parser.add_argument("--data", type=Path, required=True, help="folder of text files or manual pages")
    parser.add_argument("--documents", type=int, default=60, help="documents to use, drawn at random")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder for runs and figures")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--eval-blocks", type=int, default=32, help="held-out blocks to measure on")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--engram-layer-ids", type=int, nargs="+", default=[1, 15])
    parser.add_argument("--engram-vocab-size", type=int, default=50_000, help="least rows a hash column")
    parser.add_argument("--engram-head-dim", type=int, default=32, help="width of a row")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    corpus = args.output / "corpus"
    if not corpus.exists():
        write_corpus(args.data, corpus, args.documents, args.seed)
    results = {name: run_arm(name, options, args, corpus) for name, options in ARMS.items()}
    text = report(results, args)
    (args.output / "finetune.md").write_text(text, encoding="utf-8")
    plot(results, args.output / "finetune.png")
    print(text)
    print(f"output folder: {args.output}")


if __name__ == "__main__":
    main()
