"""Train an Engram model: from scratch, from a checkpoint or a pretrained decoder; all weights, memory or adapters.

    python scripts/train.py runs/first --data corpus/ --config hidden_size=256 intermediate_size=768   # from scratch
    python scripts/train.py runs/first --resume                                                      # after a crash
    python scripts/train.py runs/tuned --data notes.txt --model HuggingFaceTB/SmolLM2-135M-Instruct --lora 16
    torchrun --nproc_per_node 2 scripts/train.py ...                                                 # data parallel

Texts -> token ids, cut into blocks in which documents stay apart -> steps -> checkpoints, each a complete Hub folder;
hf_engram/run_folder.py says what else OUTPUT holds.
The text is held in memory as token ids. Weights are fp32; --bf16 computes in bf16. One seed decides everything.
"""

import argparse
import dataclasses
import difflib
import gc
import hashlib
import importlib.util
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

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
    hub_id,
    load_table_delta,
    unfreeze_tables,
    write_adapter_card,
)
from hf_engram.convert import convert_backbone
from hf_engram.modeling_engram.model_card import write_model_card
from hf_engram.optim import EngramOptimizer, clip_grad_norm_
from hf_engram.processes import check_processes
from hf_engram.run_folder import (
    ARGUMENTS_FILE,
    check_arguments,
    checkpoints,
    keep_metrics,
    load_arguments,
    load_state,
    log_metrics,
    remove,
    save_arguments,
    save_state,
    tidy,
    written_whole,
)
from hf_engram.text_blocks import hold_out, make_batch, pack, read_documents, step_indices
from hf_engram.training_record import run_record


try:
    from peft import LoraConfig, PeftModel, get_peft_model
except ImportError:
    LoraConfig = None


END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # all bytes and END_OF_TEXT
TOKENIZER_FIELDS = {"engram_layer_ids", "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads",
                    "engram_pad_token_id", "engram_compressed_vocab_size"}  # fmt: skip
LOGS_FOLDER = "logs"  # TensorBoard's
# What may differ when a run is resumed, because no later step depends on it; the text to train on is known by its
# digest, so that it may be elsewhere by then.
FREE_ON_RESUME = {"save_every", "keep", "log_every", "eval_every", "eval_blocks", "eval_data", "data"}


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


def check_block_size(args: argparse.Namespace) -> None:
    """Refuses blocks that the model has no positions for."""
    longest = args.config.get("max_position_embeddings")
    if args.model:
        longest = getattr(load(AutoConfig, "--model", args.model), "max_position_embeddings", None)
    if longest is not None and args.block_size > longest:
        raise ValueError(f"--block-size {args.block_size} exceeds the model's max_position_embeddings, {longest}.")


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
        model, tokenizer = convert_backbone(args.model, tokenizer, init_tables="zero", **args.config)
        return model.float(), tokenizer
    if args.config:
        raise ValueError(f"--config {args.config} is for new models; {args.model} is an Engram model as it is.")
    model = EngramForCausalLM.from_pretrained(args.model, dtype=torch.float32, engram_placement="device")
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
    config = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules=args.lora_targets,
                        modules_to_save=args.lora_full or None, task_type="CAUSAL_LM")  # fmt: skip
    parts = {part for name, _ in model.named_modules() for part in (name, name.rpartition(".")[2])}
    if unknown := sorted({*args.lora_targets, *args.lora_full} - {*LORA_TARGETS} - parts):
        raise ValueError(
            f"--lora-targets or --lora-full names {', '.join(unknown)}, but the model has no such module."
        )
    if AutoConfig.from_pretrained(args.model).model_type == "engram":
        state["base"] = str(Path(args.model).resolve()) if Path(args.model).exists() else args.model
    else:
        state["base"] = str(args.output.resolve() / "base")
        if accelerator.is_main_process:
            remove(args.output / "base")
            with written_whole(args.output / "base") as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
    model.name_or_path = hub_id(state["base"])  # PEFT saves it with the adapter
    return get_peft_model(model, config)


def load_checkpoint(args: argparse.Namespace, checkpoint: Path, state: dict):
    """The model as it was: in full, or its base with the adapter."""
    own_base = args.output.resolve() / "base"
    if state["base"] and Path(state["base"]).is_absolute() and not Path(state["base"]).exists() and own_base.exists():
        state["base"] = str(own_base)  # the output was moved since
    source = state["base"] or checkpoint
    load(AutoConfig, "--resume", source)  # what has no config.json would else be taken for a model of the default size
    model = EngramForCausalLM.from_pretrained(source, dtype=torch.float32, engram_placement="device")
    if args.lora:
        model = PeftModel.from_pretrained(model, checkpoint, is_trainable=True)
        model.active_peft_config.base_model_name_or_path = hub_id(source)
        if (checkpoint / TABLE_DELTA_FILE).exists():  # of a run that an older version began
            load_table_delta(model, checkpoint)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def choose_weights(args: argparse.Namespace, accelerator: Accelerator, model: torch.nn.Module) -> None:
    """Decides which weights are trained: those of an adapter, of the memory alone, or all; and the tables or not."""
    if args.memory_only and not model.config.engram_layer_ids:
        raise ValueError("--memory-only: the model has no memory to train (its `engram_layer_ids` is []).")
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


def write_card(args: argparse.Namespace, model, folder: Path, name: str, state: dict) -> None:
    """The model card, under the checkpoint's name, which the folder does not have yet, with what the run recorded."""
    record = run_record(args.output, state["step"])
    if args.lora:
        write_adapter_card(folder, name, state["base"], record)
    else:
        model.training_record = record
        write_model_card(model, folder, name)


def save_checkpoint(args: argparse.Namespace, accelerator: Accelerator, model, tokenizer, optimizer, state) -> None:
    """Writes output/checkpoint-<step>, a Hub folder (the model, or the adapter), and the state to resume from; then
    deletes all but the newest --keep."""
    checkpoint = args.output / f"checkpoint-{state['step']}"
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    generators, failure = gather_object([[torch.get_rng_state(), *devices]]), None
    if accelerator.is_main_process:
        model = accelerator.unwrap_model(model)
        try:
            with written_whole(checkpoint) as folder:
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
                write_card(args, model, folder, checkpoint.name, state)
                rest = {"generators": generators, "optimizer": optimizer.state_dict()}
                save_state(checkpoint, {**state, **rest}, folder)
            tidy(args.output, args.keep)
        except OSError as error:
            tidy(args.output)
            failure = f"error: {error} {last_good(args)}"
    if failure := broadcast_object_list([failure])[0]:
        raise SystemExit(failure)


def last_good(args: argparse.Namespace) -> str:
    good = checkpoints(args.output)
    return f"The last good one is {good[-1]}: continue with --resume." if good else "There is no other checkpoint."


# --- metrics ---------------------------------------------------------------------------------------------------------


def write_metrics(args: argparse.Namespace, accelerator: Accelerator, bar: tqdm, step: int, **values: float) -> None:
    """To the console, to a JSONL file and to the trackers that are installed."""
    accelerator.log(values, step=step)
    if accelerator.is_main_process:
        log_metrics(args.output, step, values)
        bar.write(f"step {step:6,d}  " + "  ".join(f"{name} {value:.4g}" for name, value in values.items()))


@torch.no_grad()
def evaluate(args: argparse.Namespace, accelerator: Accelerator, model, blocks: dict[str, torch.Tensor]) -> float:
    """Mean loss in nats per token, over all processes."""
    # Not DDP's forward, which has every process wait for all others: some have a batch less.
    model = accelerator.unwrap_model(model)
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
def plain_errors() -> Iterator[None]:
    """What the user can mend is named in one line, without a traceback."""
    try:
        yield
    except (OSError, TypeError, ValueError, ImportError) as error:
        raise SystemExit(f"error: {error}") from error


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line; the usage would take thirty."""
        self.exit(2, f"error: {message} (--help lists all arguments)\n")


def make_parser() -> argparse.ArgumentParser:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    def field(text: str) -> tuple[str, object]:
        name, equals, value = text.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(f"{text!r} is not FIELD=VALUE")
        names = [f.name for f in dataclasses.fields(EngramConfig)]
        if name not in names:
            nearest = ", ".join(difflib.get_close_matches(name, names, 3, cutoff=0.0))
            raise argparse.ArgumentTypeError(f"EngramConfig has no field {name!r}; the nearest are {nearest}")
        try:
            return name, json.loads(value)
        except json.JSONDecodeError:
            return name, value

    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=formatter)
    add = parser.add_argument
    add("output", type=Path, help="folder for checkpoints and metrics")
    add("--data", nargs="+", metavar="SOURCE", help="text files, folders of them, or datasets (files, saved, Hub); a "
        "text file is one document, and so is a dataset's row. A share of the documents (--eval-share), chosen at "
        "random, is held out; where that is less than one, the end of each")  # fmt: skip
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
    return parser


def whole_path(source: str) -> str:
    """A file or folder by its whole path; any other name, as on the Hub, as it is."""
    return os.path.abspath(source) if os.path.exists(source) else source


def parse_args() -> argparse.Namespace:
    """The arguments; what a resumed run is not told, it takes from when it was started."""
    parser = make_parser()
    args = parser.parse_args()
    if args.resume and (recorded := load_arguments(args.output)):
        recorded = {name: value for name, value in recorded.items() if name != "processes"}
        check_arguments(args.output, recorded, vars(make_parser().parse_args([str(args.output)])))
        parser.set_defaults(**recorded)
        args = parser.parse_args()
    if not args.data:
        parser.error(f"{args.output} holds no run to resume" if args.resume else "--data is needed")
    # So that a run can be resumed from anywhere.
    for name in ("data", "eval_data", "model", "tokenizer"):
        given = getattr(args, name)
        setattr(args, name, [whole_path(s) for s in given] if isinstance(given, list) else given and whole_path(given))
    args.config = dict(args.config)
    if args.warmup is None:
        args.warmup = min(50, args.steps // 10)
    if args.model and (Path(args.model) / "adapter_config.json").exists():
        parser.error(f"--model {args.model} is an adapter: merge it into its base first (its README.md says how)")
    if args.lora and (args.memory_only or not args.model):
        parser.error("--lora needs a --model to adapt" if not args.model else "choose one of --lora and --memory-only")
    if args.lora and LoraConfig is None:
        parser.error("--lora needs PEFT: pip install peft")
    if not args.model and not args.tokenizer and args.vocab_size < SMALLEST_VOCABULARY:
        parser.error(f"--vocab-size must be at least {SMALLEST_VOCABULARY} (256 bytes, and {END_OF_TEXT}), got "
                     f"{args.vocab_size}")  # fmt: skip
    if args.block_size < 2:
        parser.error("--block-size must be at least 2: in a block of one token there is nothing to predict")
    if not 0 <= args.eval_share < 1:
        parser.error(f"--eval-share must be in [0, 1), got {args.eval_share}")
    return args


def find_checkpoint(
    args: argparse.Namespace, accelerator: Accelerator, arguments: dict
) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from, and its state; refuses arguments with which this would not be the same run. What
    a killed run has left half-written is removed."""
    found, then = checkpoints(args.output), load_arguments(args.output)
    if found and not args.resume:
        raise ValueError(f"{args.output} holds {found[-1].name}: add --resume, or name another folder.")
    if found and then is None:
        raise ValueError(f"{args.output / ARGUMENTS_FILE} is missing, so the run cannot go on: begin another with "
                         f"--model {found[-1]}.")  # fmt: skip
    state = load_state(found[-1]) if found else {"step": 0, "base": None}
    names = arguments.keys() - FREE_ON_RESUME
    recorded = [then or {}, state.get("arguments", then or {})]  # run.json may have been edited since
    state["arguments"] = {name: arguments[name] for name in names}
    changed = {
        f"{name} was {record.get(name)!r}, is {arguments[name]!r}"
        for record in recorded
        for name in names
        if found and record.get(name) != arguments[name]
    }
    if changed:
        raise ValueError(f"--resume continues the same run, but {', '.join(sorted(changed))}: restore that, or begin "
                         f"another run with --model {found[-1]}.")  # fmt: skip
    accelerator.wait_for_everyone()  # so that all have found the same
    if accelerator.is_main_process:
        tidy(args.output)
    return (found[-1] if found else None), state


def main() -> None:
    with plain_errors():
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
    # Told to use the CPU, or else, where there is no other device, each of several processes would train alone.
    cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(cpu=cpu, mixed_precision=precision, log_with=trackers or None, project_config=project)
    check_processes(accelerator.num_processes)
    rank, processes = accelerator.process_index, accelerator.num_processes
    set_seed(args.seed)

    with plain_errors():
        arguments = {name: value for name, value in vars(args).items() if name not in ("output", "resume")}
        arguments["processes"] = processes
        checkpoint, state = find_checkpoint(args, accelerator, arguments)
        if not checkpoint:
            check_block_size(args)
        documents, held_out = read_documents(args.data, args.text_column, args.split), []
        if args.eval_data:
            held_out = read_documents(args.eval_data, args.text_column, args.split)
        elif args.eval_share:
            documents, held_out = hold_out(documents, args.eval_share, args.seed)
        model, tokenizer = load_checkpoint(args, checkpoint, state) if checkpoint else make_model(args, documents)
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
        # Nothing was written before, so that no folder is left of a run that could not begin.
        if accelerator.is_main_process:
            save_arguments(args.output, arguments)
            keep_metrics(args.output, state["step"] if checkpoint else -1)

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
        f"of {args.block_size} tokens, {args.steps * per_step / n_blocks:.2f} epochs in {args.steps:,} steps of "
        f"{processes} process{'es' if processes > 1 else ''}"
        + (f"; continuing after {checkpoint.name}" if checkpoint else ""),
    )
    accelerator.init_trackers(args.output.name, config={name: str(value) for name, value in arguments.items()})
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
    # DDP must go first: the last to hold a process group waits, with Python's lock, for a thread that needs the lock.
    accelerator.free_memory()
    del model, optimizer
    gc.collect()
    accelerator.end_training()
    accelerator.print(f"done: {checkpoints(args.output)[-1]}")


if __name__ == "__main__":
    main()
