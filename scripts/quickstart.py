"""Quick start: train a small Engram model beside its twin without memory, on text that comes with Python.

Text -> tokenizer -> two models, equal steps on equal batches -> Hub folder -> loaded and used in a fresh process.
Needs neither network nor GPU, and takes a few minutes on two cores: `make demo`, or `python scripts/quickstart.py`.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import sysconfig
import time
import tokenize
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics


os.environ["HF_HUB_OFFLINE"] = "1"  # read on import: nothing here needs the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import torch
from matplotlib.figure import Figure
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer
from hf_engram.optim import EngramOptimizer
from hf_engram.processes import check_processes


TOPICS = "pydoc_data/topics.py"
# Tests, tools, tables of character codes, and what is not the standard library's.
SKIPPED_FOLDERS = {"dist-packages", "distutils", "encodings", "ensurepip", "idlelib", "lib2to3", "pydoc_data",
                   "site-packages", "test", "tests", "turtledemo"}  # fmt: skip
HELD_OUT_SHARE = 0.1
END_OF_TEXT = "<|endoftext|>"
PROMPT = "def __init__(self, "

BACKBONE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
            "hc_mult": 1}  # fmt: skip
MEMORY = {"engram_layer_ids": [1, 3], "engram_max_ngram_size": 3, "engram_n_heads": 8, "engram_vocab_size": 50_000}
TABLE_ROW_SIZE = 16
LEARNING_RATE = 2e-3

WITH, WITHOUT = "with memory", "without memory"
FIGURES_FILE, CURVES_FILE = "quickstart.json", "quickstart.png"

# What anyone does with a Hub folder. It runs in a process of its own, in which hf_engram cannot be imported.
USE_HUB_FOLDER = """
import json, sys
sys.modules["hf_engram"] = None  # importing it fails: the folder brings all the code it needs
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

request = json.load(sys.stdin)
torch.set_num_threads(request["threads"])
tokenizer = AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=True)
held_out = tokenizer(request["text"], truncation=True, max_length=request["length"], return_tensors="pt")
with torch.no_grad():
    loss = model(**held_out, labels=held_out["input_ids"]).loss.item()
set_seed(request["seed"])
prompt = tokenizer(request["prompt"], return_tensors="pt")
output = model.generate(**prompt, max_new_tokens=request["new_tokens"], do_sample=True, temperature=0.7, top_k=50)
print(json.dumps({"loss": loss, "text": tokenizer.decode(output[0], skip_special_tokens=True)}))
"""


def read_corpus() -> dict[str, str]:
    """The texts of Python's documentation topics and of its standard library's modules, by file name."""
    root = Path(sysconfig.get_path("stdlib"))
    corpus = {TOPICS: "\n\n".join(topics[name] for name in sorted(topics))}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        # _sysconfigdata_*.py and config-*/ hold this computer's build settings.
        if SKIPPED_FOLDERS.isdisjoint(name.parts) and not name.parts[0].startswith(("_sysconfigdata", "config-")):
            with tokenize.open(path) as file:  # decodes as the file itself declares
                corpus[name.as_posix()] = file.read()
    return corpus


def split_files(names: list[str], seed: int, max_files: int | None = None) -> tuple[list[str], list[str]]:
    """Splits file names into training and held-out; the topics, one large file, are always trained on."""
    modules = sorted(set(names) - {TOPICS})
    random.Random(seed).shuffle(modules)
    modules = modules[:max_files]
    n_held_out = math.ceil(HELD_OUT_SHARE * len(modules))
    return [TOPICS, *modules[n_held_out:]], modules[:n_held_out]


def train_tokenizer(texts: list[str], vocab_size: int) -> EngramTokenizer:
    """A byte-level BPE tokenizer that also says where in the tables each token looks."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    return EngramTokenizer.from_tokenizer(fast, **MEMORY)


def cut_blocks(tokenizer: EngramTokenizer, texts: list[str], length: int) -> torch.Tensor:
    """Token ids `[n_blocks, length]`. A block lies in one file, so no n-gram crosses files; rests are dropped."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts)
    files = [torch.tensor(encoding.ids, dtype=torch.long) for encoding in encodings]
    return torch.cat([ids[: len(ids) // length * length].view(-1, length) for ids in files])


def make_twins(tokenizer: EngramTokenizer, max_length: int) -> dict[str, EngramForCausalLM]:
    """An Engram model, and the same without Engram layers."""
    backbone = {
        **BACKBONE,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": max_length,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = EngramConfig(**backbone, engram_head_dim=TABLE_ROW_SIZE, **tokenizer.engram_fields())
    model = EngramForCausalLM(config).bind_tokenizer(tokenizer)
    twin = EngramForCausalLM(EngramConfig(**backbone, engram_layer_ids=[]))
    # A fresh Engram layer adds nothing, so with equal weights both start as the same function.
    twin.load_state_dict(model.state_dict(), strict=False)
    return {WITH: model, WITHOUT: twin}


class Trainer:
    """A model with its optimizer: AdamW, and row-wise steps for the tables, if there are any."""

    def __init__(self, model: EngramForCausalLM, steps: int) -> None:
        self.model = model
        if model.config.engram_layer_ids:
            model.model.engram_memory.sparse_grad = True
        self.optimizer = EngramOptimizer(model, lr=LEARNING_RATE)
        warmup = min(40, steps)

        def schedule(step: int) -> float:
            return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)

    def step(self, batch: torch.Tensor) -> float:
        """One step on token ids `[B, L]`; returns the loss before it."""
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, blocks: torch.Tensor) -> float:
        """Mean loss in nats per token on token ids `[n_blocks, L]`."""
        losses = [self.model(input_ids=b, labels=b, use_cache=False).loss.item() * len(b) for b in blocks.split(16)]
        return sum(losses) / len(blocks)


def train_side_by_side(
    twins: dict[str, EngramForCausalLM], blocks: torch.Tensor, held_out: torch.Tensor, args: argparse.Namespace
) -> list[dict[str, float]]:
    """Trains all models on the same batches, each in a thread of its own.

    Returns:
        the held-out losses as they went: dicts with the key `"step"` and one for each model.
    """
    trainers_ = [Trainer(model, args.steps) for model in twins.values()]
    generator = torch.Generator().manual_seed(args.seed)
    epochs = math.ceil(args.steps * args.batch_size / len(blocks))
    order = torch.cat([torch.randperm(len(blocks), generator=generator) for _ in range(epochs)])
    every = max(1, args.steps // 10)
    curves = []
    with ThreadPoolExecutor(len(twins)) as pool, tqdm(total=args.steps, desc="training", mininterval=1) as bar:
        for step in range(args.steps + 1):
            if step % every == 0 or step == args.steps:
                losses = pool.map(lambda trainer: trainer.evaluate(held_out), trainers_)
                curves.append({"step": step, **dict(zip(twins, losses, strict=True))})
                shown = ", ".join(f"{curves[-1][name]:.3f} {name}" for name in twins)
                bar.write(f"step {step:4d}, held-out loss: {shown}")
            if step < args.steps:
                batch = blocks[order[step * args.batch_size : (step + 1) * args.batch_size]]
                losses = list(pool.map(lambda trainer, batch=batch: trainer.step(batch), trainers_))
                bar.set_postfix_str(f"training loss {losses[0]:.2f} / {losses[1]:.2f}", refresh=False)
                bar.update()
    return curves


def use_in_fresh_process(request: dict) -> dict:
    """Loads the folder in a new interpreter that has only Transformers, and returns what it computed there."""
    child = subprocess.run(
        [sys.executable, "-c", USE_HUB_FOLDER], input=json.dumps(request), stdout=subprocess.PIPE, text=True
    )
    if child.returncode:
        raise SystemExit(f"error: {request['folder']} could not be used in a fresh process; its error is above.")
    return json.loads(child.stdout.splitlines()[-1])


def plot_curves(curves: list[dict[str, float]], path: Path) -> None:
    """Draws the held-out loss of both models over the steps."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, color in ((WITH, "tab:blue"), (WITHOUT, "tab:gray")):
        losses = [point[name] for point in curves]
        axes.plot([p["step"] for p in curves], losses, "o-", color=color, ms=3, label=f"{name}: {losses[-1]:.3f}")
    axes.set(xlabel="training step", ylabel="held-out loss (nats per token)", title="Engram and its twin without")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def prepare_output(folder: Path) -> Path:
    """Makes the output folder; refuses one that holds anything but an earlier run."""
    if folder.is_file():
        raise SystemExit(f"error: --output {folder} is a file: name a folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / FIGURES_FILE).is_file():
        raise SystemExit(f"error: --output {folder} holds files that are not an earlier run's: name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def parse_args() -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formatter)
    parser.add_argument("--output", type=Path, default="runs/quickstart", help="folder for the model and the figures")
    parser.add_argument("--steps", type=count, default=500, help="training steps of each model")
    parser.add_argument("--batch-size", type=count, default=16, help="blocks of text a step")
    parser.add_argument("--block-size", type=count, default=128, help="tokens a block")
    parser.add_argument("--held-out-blocks", type=count, default=160, help="blocks that the models are compared on")
    parser.add_argument("--max-files", type=count, default=None, help="most modules to use, for a quick look")
    parser.add_argument("--vocab-size", type=count, default=4096, help="size of the tokenizer's vocabulary")
    parser.add_argument("--new-tokens", type=count, default=96, help="tokens to generate")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split, weights, batches and generated text")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    check_processes()
    start = time.perf_counter()
    output = prepare_output(args.output)
    threads = max(1, torch.get_num_threads() // 2)  # the two models train at the same time
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed)

    corpus = read_corpus()
    train_files, held_out_files = split_files(list(corpus), args.seed, args.max_files)
    print(f"{len(train_files)} files to train on, {len(held_out_files)} held out; making a tokenizer ...", flush=True)
    tokenizer = train_tokenizer([corpus[name] for name in train_files], args.vocab_size)
    blocks = cut_blocks(tokenizer, [corpus[name] for name in train_files], args.block_size)
    held_out = cut_blocks(tokenizer, [corpus[name] for name in held_out_files], args.block_size)
    if not len(blocks) or not len(held_out):
        raise SystemExit(f"error: no file has a block of {args.block_size} tokens: use a smaller one, or more files.")
    held_out = held_out[torch.linspace(0, len(held_out) - 1, min(args.held_out_blocks, len(held_out))).long()]

    twins = make_twins(tokenizer, max_length=4 * args.block_size)
    sizes = " and ".join(f"{model.num_parameters():,} {name}" for name, model in twins.items())
    print(f"parameters: {sizes}; {blocks.numel():,} tokens to train on", flush=True)
    curves = train_side_by_side(twins, blocks, held_out, args)

    twins[WITH].eval().save_pretrained(output)
    tokenizer.save_pretrained(output)
    print("using the saved folder in a fresh process, without the hf_engram package ...", flush=True)
    text = max((corpus[name] for name in held_out_files), key=len)
    answer = use_in_fresh_process(
        {"folder": str(output), "text": text, "length": args.block_size, "threads": threads, "seed": args.seed}
        | {"prompt": PROMPT, "new_tokens": args.new_tokens}
    )
    encoding = tokenizer(text, truncation=True, max_length=args.block_size, return_tensors="pt")
    with torch.no_grad():
        loss = twins[WITH](**encoding, labels=encoding["input_ids"]).loss.item()
    if not math.isclose(answer["loss"], loss, abs_tol=1e-4):
        raise SystemExit(f"error: on the same text, the loss is {answer['loss']} there, but {loss} here.")
    print(f"on a held-out text its loss is {answer['loss']:.4f}, as it is here; it writes:\n\n{answer['text']}\n")

    gain = curves[-1][WITHOUT] - curves[-1][WITH]
    figures = {"gain": gain, "curves": curves, "fresh_process": answer, "seconds": time.perf_counter() - start}
    figures |= {"arguments": vars(args) | {"output": str(output)}}
    figures |= {"train_files": train_files, "held_out_files": held_out_files}
    (output / FIGURES_FILE).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    plot_curves(curves, output / CURVES_FILE)
    print(f"held-out loss after {args.steps} steps: " + ", ".join(f"{curves[-1][name]:.3f} {name}" for name in twins))
    print(f"difference: {gain:.3f} nats per token in favour of the memory, at equal steps and batches")
    print(f"output folder: {output}")


if __name__ == "__main__":
    main()
