"""How the memory of a converted decoder should start: held-out loss after 0, 100 and 500 steps, in one run.

    python benchmarks/init_tables.py

A small Llama is pretrained on one half of the text (Python's own documentation and sources, blocks dealt out at
random), then converted and trained on the other half, all weights, on the same batches from each start:

- `random`: rows random, values of zero. `init_tables="random"`.
- `zero`: rows of zero, random values. `init_tables="zero"`.
- `ngram-mean`: rows are the mean of the backbone's own input embeddings over the n-gram's tokens, values of zero.
- `next-token`: rows are the mean of the head's weights of the tokens that follow the n-gram in the text to train on,
  one pass without the model; values write them into the stream.
- `gradient`: rows are the mean gradient of the loss at the Engram layer over the n-gram's places, one pass forward and
  backward over as many tokens as 94 training steps see; values write them, damped by the gradient's covariance.

The last three were tried as a start from statistics and are not in the package: docs/limits.md says what came of it.
Rows of `next-token` and `gradient` hold principal directions, a slice of them for each hash head, shrunk for n-grams
that are rare; how much of them is written is what does best on 64 blocks that they were not made of.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path


os.environ["OMP_NUM_THREADS"] = "1"

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_engram import EngramForCausalLM
from hf_engram.convert import convert_backbone
from hf_engram.optim import EngramOptimizer, clip_grad_norm_


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
from quickstart import cut_blocks, read_corpus, split_files, train_tokenizer


STARTS = ["random", "zero", "ngram-mean", "next-token", "gradient"]
BLOCK, BATCH = 128, 16
LAYERS, HEADS, NGRAM, WIDTH = [1, 3], 8, 3, 16
BACKBONE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
# Rows start with this root mean square; a row that appears once counts a sixth of what it says.
ROW_RMS, SHRINKAGE, DAMPING = 0.1, 5, 1.0
SCALES = (0.01, 0.03, 0.06, 0.1, 0.15, 0.3)
GRADIENT_BLOCKS = 1500


@torch.no_grad()
def evaluate(model: torch.nn.Module, blocks: torch.Tensor) -> float:
    losses = [model(input_ids=b, labels=b, use_cache=False).loss.item() * len(b) for b in blocks.split(BATCH)]
    return sum(losses) / len(blocks)


def train(model: torch.nn.Module, data: dict[str, torch.Tensor], text: str, steps: int, lr: float, marks=()) -> dict:
    """Trains on `BATCH` blocks of `data[text]` a step. Returns the held-out loss after the steps in `marks`."""
    optimizer = EngramOptimizer(model, lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
    )
    blocks, generator = data[text], torch.Generator().manual_seed(0)
    epochs = math.ceil(steps * BATCH / len(blocks))
    order = torch.cat([torch.randperm(len(blocks), generator=generator) for _ in range(epochs)])
    found = {}
    for step in tqdm(range(steps + 1), desc=f"training on the {text}", mininterval=1, leave=False):
        if step in marks:
            found[step] = evaluate(model, data["held out"])
        if step < steps:
            ids = blocks[order[step * BATCH : (step + 1) * BATCH]]
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return found


# --- starts from statistics ------------------------------------------------------------------------------------------


def principal(vectors: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The directions `[D, heads * width]` in which vectors `[n, D]` vary most, and how much they do."""
    variances, directions = torch.linalg.eigh((vectors * weights[:, None]).T @ vectors)
    kept = HEADS * WIDTH
    return directions.flip(1)[:, :kept], variances.flip(0)[:kept] / weights.sum()


def mean_rows(model: EngramForCausalLM, layer: int, pairs, prior: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every row, the mean of what `pairs` of token ids `[B, L]` and vectors `[B, L, heads * width]` have at the
    places of its n-grams, as if there were `prior` more places with zeros; and which rows have any."""
    table = model.engram_memory.tables[layer].weight
    sums, counts = torch.zeros_like(table), torch.zeros(len(table))
    for ids, vectors in pairs:
        rows = model.compute_hash_ids(ids)[:, :, layer]
        for column in range(rows.shape[-1]):
            slice_ = vectors.unflatten(-1, (HEADS, WIDTH))[:, :, column % HEADS].flatten(0, 1)
            at = rows[:, : vectors.shape[1], column].flatten()
            sums.index_add_(0, at, slice_)
            counts.index_add_(0, at, torch.ones(len(at)))
    return sums / (counts + prior).clamp_min(1)[:, None], counts > 0


def write_start(model: EngramForCausalLM, rows: list, directions: list, scale: float) -> None:
    """Rows, and values that read them back along their directions, times `scale`."""
    for index, layer_id in enumerate(LAYERS):
        (values, used), (basis, variances) = rows[index], directions[index]
        size = ROW_RMS / values[used].square().mean().sqrt()
        model.engram_memory.tables[index].weight.copy_(values * size)
        damped = basis / (variances + DAMPING * variances.mean()) * scale / size
        wkv = model.model.layers[layer_id].engram.wkv.weight
        wkv[-model.config.hidden_size :] = damped.repeat(1, NGRAM - 1)


@torch.no_grad()
def choose_scale(model: EngramForCausalLM, rows: list, directions: list, blocks: torch.Tensor) -> None:
    losses = {}
    for scale in SCALES:
        write_start(model, rows, directions, scale)
        losses[scale] = evaluate(model, blocks)
    write_start(model, rows, directions, min(losses, key=losses.get))


@torch.no_grad()
def start_from_embeddings(model: EngramForCausalLM, blocks: torch.Tensor) -> None:
    embeddings = model.model.embed_tokens.weight
    basis, _ = principal(embeddings - embeddings.mean(0), torch.ones(len(embeddings)))
    projected = (embeddings - embeddings.mean(0)) @ basis

    def means():
        for ids in blocks.split(64):
            here = projected[ids]
            shifted = [
                torch.roll(here, n, dims=1) for n in range(NGRAM)
            ]  # the first places of a block are too few to matter
            yield ids, torch.stack(shifted).mean(0)

    for index in range(len(LAYERS)):
        rows, used = mean_rows(model, index, means(), 0)
        model.engram_memory.tables[index].weight[used] = (rows * ROW_RMS / rows[used].square().mean().sqrt())[used]


@torch.no_grad()
def start_from_next_tokens(model: EngramForCausalLM, blocks: torch.Tensor, spare: torch.Tensor) -> None:
    counts = torch.bincount(blocks.flatten(), minlength=model.config.vocab_size).float()
    head = model.lm_head.weight * model.model.norm.weight
    head = head - counts @ head / counts.sum()
    basis, variances = principal(head, counts)
    projected = head @ basis
    rows = [
        mean_rows(model, index, ((ids, projected[ids[:, 1:]]) for ids in blocks.split(64)), SHRINKAGE)
        for index in range(len(LAYERS))
    ]
    choose_scale(model, rows, [(basis, variances)] * len(LAYERS), spare)


def value_gradients(model: EngramForCausalLM, ids: torch.Tensor) -> list[torch.Tensor]:
    """For each Engram layer, minus the gradient of the summed loss by the value, `[B, L, D]`."""
    outputs, handles = [], []

    def keep(_module, _args, output):
        output.retain_grad()
        outputs.append(output)

    for layer_id in LAYERS:
        handles.append(model.model.layers[layer_id].engram.wkv.register_forward_hook(keep))
    (model(input_ids=ids, labels=ids, use_cache=False).loss * (ids[:, 1:].numel())).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return [-output.grad[..., -model.config.hidden_size :] for output in outputs]


def start_from_gradients(model: EngramForCausalLM, blocks: torch.Tensor, spare: torch.Tensor) -> None:
    batches = blocks[:GRADIENT_BLOCKS].split(BATCH)
    gradients = [value_gradients(model, ids) for ids in tqdm(batches, desc="gradients", leave=False)]
    with torch.no_grad():
        rows, directions = [], []
        for index in range(len(LAYERS)):
            some = torch.cat([of[index].flatten(0, 1) for of in gradients[:20]])
            basis, variances = principal(some, torch.ones(len(some)))
            directions.append((basis, variances))
            # The last place predicts nothing.
            pairs = ((ids, (of[index] @ basis)[:, :-1]) for ids, of in zip(batches, gradients, strict=True))
            rows.append(mean_rows(model, index, pairs, SHRINKAGE))
        choose_scale(model, rows, directions, spare)


# --- the run ---------------------------------------------------------------------------------------------------------


def start(name: str, backbone: Path, tokenizer, data: dict[str, torch.Tensor]) -> EngramForCausalLM:
    torch.manual_seed(0)
    layout = {"engram_max_ngram_size": NGRAM, "engram_n_heads": HEADS, "engram_vocab_size": 50_000}
    model, _ = convert_backbone(
        LlamaForCausalLM.from_pretrained(backbone), tokenizer, engram_layer_ids=LAYERS, engram_head_dim=WIDTH,
        init_tables="zero" if name == "zero" else "random", **layout,
    )  # fmt: skip
    model.engram_memory.sparse_grad = True
    blocks, spare = data["second half"], data["spare"]
    if name == "ngram-mean":
        start_from_embeddings(model, blocks)
    elif name == "next-token":
        start_from_next_tokens(model, blocks, spare)
    elif name == "gradient":
        start_from_gradients(model, blocks, spare)
    return model


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--steps", type=int, default=500, help="after the conversion (default 500)")
    parser.add_argument("--pretraining-steps", type=int, default=900, help="of the backbone (default 900)")
    parser.add_argument("--max-files", type=int, help="most modules to use (default all)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate after the conversion (default 1e-3)")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/init_tables"), help="folder (default runs/init_tables)"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    corpus = read_corpus()
    files, held_out_files = split_files(list(corpus), 0, args.max_files)
    # Plain, without a layout of its own: the conversion chooses it.
    bpe = train_tokenizer([corpus[name] for name in files], 4096)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe.backend_tokenizer, eos_token=bpe.eos_token, pad_token=bpe.pad_token
    )
    blocks = cut_blocks(bpe, [corpus[name] for name in files], BLOCK)
    held_out = cut_blocks(bpe, [corpus[name] for name in held_out_files], BLOCK)
    shuffled = torch.randperm(len(blocks), generator=torch.Generator().manual_seed(1))
    first, second = blocks[shuffled].chunk(2)
    data = {"first half": first, "second half": second[:-64], "spare": second[-64:]}
    data["held out"] = held_out[torch.linspace(0, len(held_out) - 1, min(200, len(held_out))).long()]

    backbone = LlamaForCausalLM(
        LlamaConfig(**BACKBONE, vocab_size=len(tokenizer), max_position_embeddings=4 * BLOCK, bos_token_id=None,
                    pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id)
    )  # fmt: skip
    train(backbone, data, "first half", args.pretraining_steps, 2e-3)
    backbone.save_pretrained(args.output / "backbone")
    marks = sorted({0, args.steps // 5, args.steps // 2, args.steps})
    print("| start | " + " | ".join(f"step {step}" for step in marks) + " | seconds before |")
    print("|---|" + "---:|" * (len(marks) + 1), flush=True)
    results = {}
    for name in args.starts:
        begin = time.process_time()
        model = start(name, args.output / "backbone", tokenizer, data)
        seconds = time.process_time() - begin
        results[name] = train(model, data, "second half", args.steps, args.lr, marks)
        cells = " | ".join(f"{results[name][step]:.3f}" for step in marks)
        print(f"| {name} | {cells} | {seconds:.0f} |", flush=True)
    (args.output / "init_tables.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
