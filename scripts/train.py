"""Train an Engram model: from scratch, from a checkpoint or a pretrained decoder; all weights, memory or adapters.

    python scripts/train.py runs/first --data corpus/ --config hidden_size=256 num_hidden_layers=6   # from scratch
    python scripts/train.py runs/first --data corpus/ --config ... --resume                          # after a crash
    python scripts/train.py runs/tuned --data notes.txt --model HuggingFaceTB/SmolLM2-135M-Instruct --lora 16
    accelerate launch --num_processes 2 scripts/train.py ...                                         # data parallel

Texts -> token ids, cut into blocks in which documents stay apart -> steps -> checkpoints, each a complete Hub folder.
The text is held in memory as token ids. Weights are fp32; --bf16 computes in bf16. One seed decides everything.
"""

import argparse
import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import random
import shutil
import time
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import LoggerType, ProjectConfiguration, broadcast_object_list, gather_object, set_seed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer
from hf_engram.adapters import (
    LORA_TARGETS,
    TABLE_DELTA_FILE,
    load_table_delta,
    save_table_delta,
    unfreeze_tables,
    write_adapter_card,  # fmt: skip
)
from hf_engram.convert import convert_backbone
from hf_engram.modeling_engram.model_card import write_model_card
from hf_engram.optim import EngramOptimizer, clip_grad_norm_


try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError:
    LoraConfig = None


END_OF_TEXT = "<|endoftext|>"
DATASET_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
TOKENIZER_FIELDS = {"engram_layer_ids", "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads",
                    "engram_pad_token_id", "engram_compressed_vocab_size"}  # fmt: skip
STATE_FILE = "training_state.pt"
METRICS_FILE = "metrics.jsonl"
LOGS_FOLDER = "logs"  # TensorBoard's
# What may differ when a run is resumed, because no later step depends on it.
FREE_ON_RESUME = {"resume", "output", "save_every", "keep", "log_every", "eval_every", "eval_blocks"}


# --- text -> blocks --------------------------------------------------------------------------------------------------


def read_documents(sources: list[str], column: str, split: str) -> list[str]:
    """Texts, one a document: a text file, each text file in a folder, or each row of a dataset."""
    documents, skipped = [], []
    for path in map(Path, sources):
        if not path.exists() and (path.suffix or path.is_absolute() or "/" not in str(path)):
            raise ValueError(f"{path} does not exist. (A dataset on the Hub is named owner/name.)")
        saved_dataset = (path / "state.json").exists() or (path / "dataset_dict.json").exists()
        if saved_dataset or not path.exists() or path.suffix in DATASET_FORMATS:
            documents += read_dataset(str(path), column, split)
            continue
        files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        for file in files:
            try:
                documents.append(file.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                skipped.append(file)
    if skipped:
        print(f"skipped {len(skipped)} files that are not UTF-8 text, {skipped[0]} for one")
    documents = [text for text in documents if text and text.strip()]
    if not documents:
        raise ValueError(f"{', '.join(sources)} holds no text.")
    return documents


def read_dataset(source: str, column: str, split: str) -> list[str]:
    """One column of a dataset: a saved one, a file of `DATASET_FORMATS`, or `owner/name[:config]` on the Hub."""
    import datasets

    if Path(source).is_dir():
        dataset = datasets.load_from_disk(source)
        dataset = dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    elif Path(source).is_file():
        dataset = datasets.load_dataset(DATASET_FORMATS[Path(source).suffix], data_files=source, split="train")
    else:
        name, _, config = source.partition(":")
        dataset = datasets.load_dataset(name, config or None, split=split)
    if column not in dataset.column_names:
        raise ValueError(f"{source} has no column {column!r}, but {dataset.column_names}: choose with --text-column.")
    return dataset[column]


def hold_out(documents: list[str], share: float, seed: int) -> tuple[list[str], list[str]]:
    """Documents to train on and to evaluate on; where there are too few to choose from, each one's end is held out."""
    if share * len(documents) < 1:
        cuts = [(text, len(text) - math.ceil(share * len(text))) for text in documents]
        return [text[:cut] for text, cut in cuts], [text[cut:] for text, cut in cuts]
    chosen = set(random.Random(seed).sample(range(len(documents)), round(share * len(documents))))
    return [d for i, d in enumerate(documents) if i not in chosen], [documents[i] for i in sorted(chosen)]


def pack(tokenizer: EngramTokenizer, documents: list[str], length: int, what: str) -> dict[str, torch.Tensor]:
    """Token ids and positions, int32 `[n_blocks, length]`: documents one after the other, cut into blocks.

    Positions restart with every document and block, from which the model knows what neither attention nor n-grams may
    look back to. A rest that fills no block is dropped.
    """
    pieces, end = [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for start in tqdm(range(0, len(documents), 256), desc=f"tokens of the {what}", disable=None, leave=False):
        for encoding in tokenizer.backend_tokenizer.encode_batch_fast(documents[start : start + 256]):
            ids = encoding.ids if encoding.ids[-1:] == end else encoding.ids + end
            pieces.append(torch.tensor(ids, dtype=torch.int32))
    ids = torch.cat(pieces)
    n_blocks = len(ids) // length
    if n_blocks == 0:
        raise ValueError(f"The {what} has {len(ids)} tokens, fewer than one block: give more text, or a --block-size "
                         f"below {length}. (For no evaluation: --eval-share 0.)")  # fmt: skip
    is_first = torch.cat([torch.arange(len(piece)) for piece in pieces]) == 0
    is_first, ids = (values[: n_blocks * length].view(n_blocks, length) for values in (is_first, ids))
    columns = torch.arange(length, dtype=torch.int32)
    return {"input_ids": ids, "position_ids": columns - torch.where(is_first, columns, 0).cummax(1).values}


def make_batch(blocks: dict[str, torch.Tensor], indices: list[int], device: torch.device) -> dict[str, torch.Tensor]:
    """The model's inputs int64 `[B, L]` of some blocks. A document's first token is not to be predicted."""
    batch = {name: values[indices].long().to(device) for name, values in blocks.items()}
    return batch | {"labels": batch["input_ids"].masked_fill(batch["position_ids"] == 0, -100)}


@lru_cache(maxsize=2)
def epoch_order(n_blocks: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(n_blocks, generator=torch.Generator().manual_seed(seed + 1_000_003 * epoch)).tolist()


def step_indices(n_blocks: int, seed: int, step: int, size: int) -> list[int]:
    """The blocks of a step: a function of the step alone, so that a resumed run needs no other memory of the order."""
    places = (divmod(i, n_blocks) for i in range(step * size, (step + 1) * size))
    return [epoch_order(n_blocks, seed, epoch)[place] for epoch, place in places]


# --- tokenizer and model ---------------------------------------------------------------------------------------------


def load(kind: type, option: str, source: str):
    """A tokenizer or config, or an error that says which was not found."""
    try:
        return kind.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {source} cannot be loaded: {error}") from error


def make_tokenizer(args: argparse.Namespace, documents: list[str]) -> EngramTokenizer:
    """The tokenizer of --tokenizer, or a byte-level BPE trained on the text, with the memory's layout of --config."""
    layout = {name: value for name, value in args.config.items() if name in TOKENIZER_FIELDS}
    if args.tokenizer:
        tokenizer = load(AutoTokenizer, "--tokenizer", args.tokenizer)
        if not hasattr(tokenizer, "engram_fields"):
            return EngramTokenizer.from_tokenizer(tokenizer, **layout)
        if layout != {name: tokenizer.engram_fields()[name] for name in layout}:
            raise ValueError(f"--tokenizer {args.tokenizer} has a layout of its own, other than --config {layout}.")
        return tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(documents, trainer)
    plain = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)
    return EngramTokenizer.from_tokenizer(plain, **layout)


def make_model(args: argparse.Namespace, documents: list[str]) -> tuple[EngramForCausalLM, EngramTokenizer]:
    """A new model, the one in --model, or the pretrained decoder there with memory, which computes the same."""
    if args.model is None:
        tokenizer = make_tokenizer(args, documents)
        special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        defaults = {"vocab_size": len(tokenizer), "max_position_embeddings": max(2048, args.block_size), **special}
        model = EngramForCausalLM(EngramConfig(**{**defaults, **args.config, **tokenizer.engram_fields()}))
        return (model.bind_tokenizer(tokenizer) if model.config.engram_layer_ids else model), tokenizer
    if load(AutoConfig, "--model", args.model).model_type != "engram":
        tokenizer = load(AutoTokenizer, "--tokenizer", args.tokenizer) if args.tokenizer else None
        model, tokenizer = convert_backbone(args.model, tokenizer, **args.config)
        return model.float(), tokenizer
    if args.config:
        raise ValueError(f"--config {args.config} is for new models; {args.model} is an Engram model as it is.")
    model = EngramForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    tokenizer = load(AutoTokenizer, "--tokenizer", args.tokenizer or args.model)
    try:
        if not hasattr(tokenizer, "engram_fields"):
            layout = {name: getattr(model.config, name) for name in TOKENIZER_FIELDS}
            tokenizer = EngramTokenizer.from_tokenizer(tokenizer, **layout)
        return (model.bind_tokenizer(tokenizer) if model.config.engram_layer_ids else model), tokenizer
    except ValueError as error:
        raise ValueError(f"--tokenizer {tokenizer.name_or_path} does not fit {args.model}: {error}") from error


def add_adapter(args: argparse.Namespace, accelerator: Accelerator, model, tokenizer, state: dict) -> torch.nn.Module:
    """New LoRA adapters on a model. What they are for must be there later: --model, or, if that is a decoder without
    memory, what it has become, saved as output/base."""
    if AutoConfig.from_pretrained(args.model).model_type == "engram":
        state["base"] = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    else:
        state["base"] = str(args.output.resolve() / "base")
        if accelerator.is_main_process:
            remove(args.output / "base")
            with written_whole(args.output / "base") as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
    model.name_or_path = state["base"]  # PEFT saves it with the adapter
    config = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=args.lora_targets,
                        modules_to_save=args.lora_full or None, task_type="CAUSAL_LM")  # fmt: skip
    return get_peft_model(model, config)


def load_checkpoint(args: argparse.Namespace, checkpoint: Path, state: dict):
    """The model as it was: in full, or its base with the adapter and the table rows that changed."""
    model = EngramForCausalLM.from_pretrained(state["base"] or checkpoint, dtype=torch.float32)
    if args.lora:
        model = PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
        if (checkpoint / TABLE_DELTA_FILE).exists():
            load_table_delta(model, checkpoint)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def choose_weights(args: argparse.Namespace, accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Decides which weights are trained: those of an adapter, of the memory alone, or all; and the tables or not."""
    if args.memory_only:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".engram." in name)
    for name, parameter in model.named_parameters():
        if ".engram_memory." in name:
            parameter.requires_grad_(False)
    if model.config.engram_layer_ids and args.tables == "train":
        # NCCL cannot add up sparse gradients.
        unfreeze_tables(model, sparse_grad=accelerator.num_processes == 1 or accelerator.device.type == "cpu")


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.lr * (step + 1) / args.warmup
    done = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.lr * (0.55 + 0.45 * math.cos(math.pi * done))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def checkpoints(output: Path) -> list[Path]:
    """The folders checkpoint-<step>, oldest first. A folder has this name only once it is complete."""
    return sorted(output.glob("checkpoint-*[0-9]"), key=lambda folder: int(folder.name.rpartition("-")[2]))


def remove(folder: Path) -> None:
    """Deletes a folder, if it is there; under another name, since a deletion may be interrupted."""
    if folder.exists():
        shutil.rmtree(folder.rename(folder.with_name(f".{folder.name.strip('.')}.old")))


@contextmanager
def written_whole(folder: Path):
    """A temporary folder to write into, which gets its name when everything is on disk, and else is removed."""
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        temporary.rename(folder)
    # A full disk is an OSError, a SafetensorError or torch's RuntimeError, depending on who was writing.
    except Exception as error:
        free = shutil.disk_usage(folder.parent).free / 2**20
        raise OSError(f"{folder} could not be written, with {free:,.0f} MiB left on its disk: {error}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_card(args: argparse.Namespace, model, folder: Path, name: str, base: str | None) -> None:
    """The model card, under the checkpoint's name, which the folder does not have yet; an adapter's says how to load
    the table rows that changed."""
    if args.lora:
        write_adapter_card(folder, name, base)
    else:
        (folder / "README.md").unlink(missing_ok=True)
        write_model_card(model, folder, name)


def save_checkpoint(args: argparse.Namespace, accelerator: Accelerator, model, tokenizer, optimizer, state) -> None:
    """Writes output/checkpoint-<step>: a Hub folder (the model, or the adapter and the table rows that changed) with
    the state to resume from; then deletes all but the newest --keep."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    generators, failure = gather_object([[torch.get_rng_state(), *devices]]), None
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(model)
        try:
            with written_whole(args.output / f"checkpoint-{state['step']}") as folder:
                model.save_pretrained(folder)
                if args.lora and args.tables == "train" and model.config.engram_layer_ids:
                    save_table_delta(model, state["base"], folder)
                tokenizer.save_pretrained(folder)
                write_card(args, model, folder, f"checkpoint-{state['step']}", state["base"])
                state = {**state, "generators": generators, "optimizer": optimizer.state_dict()}
                torch.save(state, folder / STATE_FILE)
            for folder in checkpoints(args.output)[: -args.keep]:
                remove(folder)
        except OSError as error:
            failure = f"error: {error} {last_good(args)}"
    if failure := broadcast_object_list([failure])[0]:
        raise SystemExit(failure)


def last_good(args: argparse.Namespace) -> str:
    good = checkpoints(args.output)
    return f"The last good one is {good[-1]}: continue with --resume." if good else "There is no other checkpoint."


def load_state(checkpoint: Path, now: dict) -> dict:
    """What a checkpoint holds besides the model; refuses settings with which this would not be the same run."""
    state = torch.load(checkpoint / STATE_FILE, weights_only=True, map_location="cpu")
    then = state["settings"]
    if changed := [f"{name} was {then.get(name)!r}, is {now[name]!r}" for name in now if then.get(name) != now[name]]:
        raise ValueError(f"--resume continues the same run, but {', '.join(changed)}: restore that, or begin another "
                         f"run with --model {checkpoint}.")  # fmt: skip
    return state


# --- metrics ---------------------------------------------------------------------------------------------------------


def keep_metrics(path: Path, step: int) -> None:
    """Drops from the JSONL file what came after a checkpoint: these steps are taken again."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    # A line that a kill has cut off is one of those.
    kept = [f"{line}\n" for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
    path.with_suffix(".tmp").write_text("".join(kept), encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def write_metrics(args: argparse.Namespace, accelerator: Accelerator, bar: tqdm, step: int, **values: float) -> None:
    """To the console, to a JSONL file and to the trackers that are installed."""
    accelerator.log(values, step=step)
    if accelerator.is_main_process:
        with (args.output / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        bar.write(f"step {step:6,d}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))


@torch.no_grad()
def evaluate(args: argparse.Namespace, accelerator: Accelerator, model, blocks: dict[str, torch.Tensor]) -> float:
    """Mean loss in nats per token, over all processes."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=accelerator.device)
    batches = torch.arange(len(blocks["input_ids"])).split(args.batch_size)
    for indices in batches[accelerator.process_index :: accelerator.num_processes]:
        batch = make_batch(blocks, indices.tolist(), accelerator.device)
        total += model(**batch, num_items_in_batch=1, use_cache=False).loss.double()
    model.train()
    return accelerator.reduce(total).item() / int((blocks["position_ids"] != 0).sum())


# --- the run ---------------------------------------------------------------------------------------------------------


@contextmanager
def plain_errors():
    """What the user can mend is named in one line, without a traceback."""
    try:
        yield
    except (OSError, TypeError, ValueError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error


def parse_args() -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    def field(text: str) -> tuple[str, object]:
        name, equals, value = text.partition("=")
        if not equals or name not in {f.name for f in dataclasses.fields(EngramConfig)}:
            raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE with a field of EngramConfig")
        try:
            return name, json.loads(value)
        except json.JSONDecodeError:
            return name, value

    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], formatter_class=formatter)
    add = parser.add_argument
    add("output", type=Path, help="folder for checkpoints and metrics")
    add("--data", nargs="+", required=True, metavar="SOURCE", help="text files, folders, datasets (files, saved, Hub)")
    add("--text-column", default="text", help="a dataset's column of texts")
    add("--split", default="train", help="a dataset's split")
    add("--eval-data", nargs="+", metavar="SOURCE", help="held-out text; if not given, a share of --data")
    add("--eval-share", type=float, default=0.05, help="share of --data's documents to hold out; 0 for no evaluation")
    add("--eval-blocks", type=count, default=200, help="most blocks to evaluate on")
    add("--model", help="Engram model or pretrained decoder to start from (folder, Hub id); if not given, a new model")
    add("--tokenizer", help="tokenizer (folder, Hub id); if not given, the model's, or one trained on --data")
    add("--vocab-size", type=count, default=8192, help="vocabulary of a tokenizer that is trained")
    add("--config", type=field, nargs="+", default=[], metavar="FIELD=VALUE", help="fields of a new "
        "model's EngramConfig, or the memory's of a pretrained decoder: engram_layer_ids=[1,4] hc_mult=1")  # fmt: skip
    add("--lora", type=count, metavar="RANK", help="train LoRA adapters of this rank, and the tables, in place of all")
    add("--lora-targets", nargs="+", default=LORA_TARGETS, metavar="MODULE", help="modules that get an adapter")
    add("--lora-full", nargs="+", default=[], metavar="MODULE", help="modules trained in full and saved with the "
        "adapter: engram, attn_hc, mlp_hc")  # fmt: skip
    add("--memory-only", action="store_true", help="train Engram layers and tables alone")
    add("--tables", choices=("train", "freeze"), default="train", help="what to do with the tables")
    add("--steps", type=count, default=1000, help="optimizer steps")
    add("--block-size", type=count, default=512, help="tokens a block")
    add("--batch-size", type=count, default=8, help="blocks at once, for each process")
    add("--accumulate", type=count, default=1, help="batches a step, for each process")
    add("--lr", type=float, default=1e-3, help="highest learning rate; it falls to a tenth")
    add("--table-lr-multiplier", type=float, default=5.0, help="the tables' learning rate, in multiples of --lr")
    add("--warmup", type=int, help="steps until the highest learning rate; by default a tenth of --steps, at most 50")
    add("--weight-decay", type=float, default=0.1, help="weight decay of matrices; tables have none")
    add("--clip", type=float, default=1.0, help="largest norm of a step's gradient")
    add("--bf16", action="store_true", help="compute in bf16")
    add("--gradient-checkpointing", action="store_true", help="recompute activations instead of keeping them")
    add("--log-every", type=count, default=10, metavar="STEPS", help="steps between metrics")
    add("--eval-every", type=count, default=200, metavar="STEPS", help="steps between evaluations")
    add("--save-every", type=count, default=200, metavar="STEPS", help="steps between checkpoints")
    add("--keep", type=count, default=2, metavar="N", help="checkpoints to keep")
    add("--resume", action="store_true", help="continue from the newest checkpoint in output, if there is one")
    add("--seed", type=int, default=0, help="seed of the split, weights, batches and dropout")
    args = parser.parse_args()
    args.config = dict(args.config)
    if args.warmup is None:
        args.warmup = min(50, args.steps // 10)
    if args.model and (Path(args.model) / "adapter_config.json").exists():
        parser.error(f"--model {args.model} is an adapter: merge it into its base first (its README.md says how)")
    if args.lora and (args.memory_only or not args.model):
        parser.error("--lora needs a --model to adapt" if not args.model else "choose one of --lora and --memory-only")
    if args.lora and LoraConfig is None:
        parser.error("--lora needs PEFT: pip install peft")
    if args.block_size < 2:
        parser.error("--block-size must be at least 2: in a block of one token there is nothing to predict")
    if not 0 <= args.eval_share < 1:
        parser.error(f"--eval-share must be in [0, 1), got {args.eval_share}")
    return args


def find_checkpoint(args: argparse.Namespace, accelerator: Accelerator) -> Path | None:
    """The checkpoint to resume from; what a killed run has left half-written is removed."""
    found = checkpoints(args.output)
    if found and not args.resume:
        raise ValueError(f"{args.output} holds {found[-1].name}: add --resume, or name another folder.")
    if accelerator.is_main_process:
        args.output.mkdir(parents=True, exist_ok=True)
        for rest in (*args.output.glob(".*.tmp"), *args.output.glob(".*.old")):
            shutil.rmtree(rest)
    accelerator.wait_for_everyone()
    return found[-1] if found else None


def main() -> None:
    args = parse_args()
    logging.disable_progress_bar()
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    names = ("tensorboard", "trackio")
    trackers = [name for name in names if name in LoggerType.list() and importlib.util.find_spec(name)]
    precision = "bf16" if args.bf16 else "no"
    project = ProjectConfiguration(str(args.output), logging_dir=str(args.output / LOGS_FOLDER))
    accelerator = Accelerator(mixed_precision=precision, log_with=trackers or None, project_config=project)
    rank, processes = accelerator.process_index, accelerator.num_processes
    set_seed(args.seed)

    with plain_errors():
        checkpoint = find_checkpoint(args, accelerator)
        settings = {name: value for name, value in vars(args).items() if name not in FREE_ON_RESUME}
        settings["processes"] = processes
        state = {"step": 0, "base": None, "settings": settings}
        state = load_state(checkpoint, settings) if checkpoint else state
        documents, held_out = read_documents(args.data, args.text_column, args.split), []
        if args.eval_data:
            held_out = read_documents(args.eval_data, args.text_column, args.split)
        elif args.eval_share:
            documents, held_out = hold_out(documents, args.eval_share, args.seed)
        model, tokenizer = load_checkpoint(args, checkpoint, state) if checkpoint else make_model(args, documents)
        if args.block_size > model.config.max_position_embeddings:
            raise ValueError(f"--block-size {args.block_size} exceeds the model's max_position_embeddings, "
                             f"{model.config.max_position_embeddings}.")  # fmt: skip
        blocks = pack(tokenizer, documents, args.block_size, "training text")
        eval_blocks = pack(tokenizer, held_out, args.block_size, "held-out text") if held_out else None
        if eval_blocks:
            n = len(eval_blocks["input_ids"])
            kept = torch.linspace(0, n - 1, min(args.eval_blocks, n)).long()
            eval_blocks = {name: values[kept] for name, values in eval_blocks.items()}
        digest = hashlib.sha256(blocks["input_ids"].numpy()).hexdigest()
        if state.setdefault("data_sha256", digest) != digest:
            raise ValueError(f"--data has changed since {checkpoint} was written: restore it to resume.")
        if args.lora and not checkpoint:
            model = add_adapter(args, accelerator, model, tokenizer, state)
        choose_weights(args, accelerator, model)
        # AdamW, and row-wise steps for the tables. The groups' learning rates are set before every step.
        optimizer = EngramOptimizer(model, args.lr, weight_decay=args.weight_decay, betas=(0.9, 0.95), seed=args.seed,
                                    table_lr_multiplier=args.table_lr_multiplier)  # fmt: skip

    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    model, optimizer = accelerator.prepare(model, optimizer)
    if checkpoint:
        optimizer.load_state_dict(state.pop("optimizer"))
        torch.set_rng_state(state["generators"][rank][0])
        if torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state["generators"][rank][1:])
    else:
        set_seed(args.seed + rank)  # weights are the same everywhere, dropout is not

    n_blocks, per_step = len(blocks["input_ids"]), args.batch_size * args.accumulate * processes
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    accelerator.print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {trained:,} of them trained; {n_blocks:,} blocks "
        f"of {args.block_size} tokens, {args.steps * per_step / n_blocks:.2f} epochs in {args.steps:,} steps"
        + (f"; continuing after {checkpoint.name}" if checkpoint else ""),
    )
    accelerator.init_trackers(args.output.name, config={name: str(value) for name, value in settings.items()})
    if accelerator.is_main_process:
        keep_metrics(args.output / METRICS_FILE, state["step"])
    hidden = None if accelerator.is_main_process else True  # None: shown if there is a terminal
    bar = tqdm(total=args.steps, initial=state["step"], desc="training", disable=hidden, mininterval=1)
    if eval_blocks and not checkpoint:
        write_metrics(args, accelerator, bar, 0, eval_loss=evaluate(args, accelerator, model, eval_blocks))

    since, tokens = time.perf_counter(), 0
    for step in range(state["step"], args.steps):
        indices = step_indices(n_blocks, args.seed, step, per_step)
        targets = max(1, int((blocks["position_ids"][indices] != 0).sum()))
        mine = indices[rank::processes]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        total = torch.zeros((), device=accelerator.device)
        for i in range(args.accumulate):
            batch = make_batch(blocks, mine[i * args.batch_size : (i + 1) * args.batch_size], accelerator.device)
            # Gradients are exchanged once a step.
            with accelerator.no_sync(model) if i < args.accumulate - 1 else nullcontext():
                # Divided by the step's tokens, so that it does not matter how they are spread over batches.
                loss = model(**batch, num_items_in_batch=targets, use_cache=False).loss
                accelerator.backward(loss * processes)  # processes take the mean of their gradients
            total += loss.detach()
        loss = accelerator.reduce(total).item()
        norm = clip_grad_norm_(model, args.clip).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            raise SystemExit(
                f"error: at step {step + 1} the loss is {loss}, its gradient's norm {norm}; the step was not taken. "
                f"Lower --lr ({args.lr}), raise --warmup ({args.warmup}), or leave out --bf16. {last_good(args)}"
            )
        optimizer.step()
        optimizer.zero_grad()

        state["step"] = step + 1
        last = state["step"] == args.steps
        tokens += per_step * args.block_size
        bar.update()
        if state["step"] % args.log_every == 0 or last:
            speed = tokens / (time.perf_counter() - since)
            values = {"loss": loss, "grad_norm": norm, "lr": learning_rate(args, step), "tokens_per_second": speed}
            write_metrics(args, accelerator, bar, state["step"], **values)
            since, tokens = time.perf_counter(), 0
        if eval_blocks and (state["step"] % args.eval_every == 0 or last):
            loss = evaluate(args, accelerator, model, eval_blocks)
            write_metrics(args, accelerator, bar, state["step"], eval_loss=loss)
        if state["step"] % args.save_every == 0 or last:
            save_checkpoint(args, accelerator, model, tokenizer, optimizer, state)
    bar.close()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    accelerator.print(f"done: {checkpoints(args.output)[-1]}")


if __name__ == "__main__":
    main()
