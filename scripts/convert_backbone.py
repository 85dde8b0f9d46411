"""Put Engram memory into a pretrained decoder: a checkpoint in, a Hub folder out that computes the same function.

    python scripts/convert_backbone.py HuggingFaceTB/SmolLM2-135M-Instruct my-engram

The backbone is a local folder or a Hub id, of a family that hf_engram.convert.FAMILIES lists. All checks come first,
then the weights are loaded, given Engram layers, compared with the backbone on a text, and saved with the tokenizer.
"""

import argparse
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_engram import EngramConfig
from hf_engram.convert import FAMILIES, INIT_TABLES, convert_backbone, prepare_conversion, saved_bytes
from hf_engram.processes import check_processes


# Tokenizer, code and model card, generously.
OTHER_FILES_BYTES = 64 * 2**20
SAMPLE = "The capital of France is Paris. In 1789, the storming of the Bastille began a revolution there."
# Largest difference of logits with several copies of the stream, relative to the largest logit, by dtype.
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-1}


def parse_args() -> argparse.Namespace:
    def count(text: str) -> int:
        if (value := int(text)) < 1:
            raise argparse.ArgumentTypeError(f"{value} is below 1")
        return value

    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=f"Families: {', '.join(FAMILIES)}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    layers = "decoder layers that get an Engram layer, ascending; by default the second and the one after the middle"
    config = EngramConfig
    parser.add_argument("backbone", help="the pretrained model: a folder or a Hub id")
    parser.add_argument("output", type=Path, help="folder to make; must not exist, or be empty")
    parser.add_argument(
        "--tokenizer", default=argparse.SUPPRESS, help="folder or Hub id of its tokenizer, if it lies elsewhere"
    )
    parser.add_argument("--engram-layer-ids", type=int, nargs="*", default=argparse.SUPPRESS, metavar="LAYER",
                        help=layers)  # fmt: skip
    parser.add_argument("--engram-vocab-size", type=count, default=config.engram_vocab_size, metavar="ROWS",
                        help="least number of table rows for each n-gram size and head")  # fmt: skip
    parser.add_argument("--engram-max-ngram-size", type=count, default=config.engram_max_ngram_size, metavar="N",
                        help="longest n-gram, in tokens")  # fmt: skip
    parser.add_argument("--engram-n-heads", type=count, default=config.engram_n_heads, metavar="K",
                        help="hashes for each n-gram size")  # fmt: skip
    parser.add_argument("--engram-head-dim", type=count, default=config.engram_head_dim, metavar="WIDTH",
                        help="width of a table row")  # fmt: skip
    parser.add_argument("--hc-mult", type=count, default=1, metavar="COPIES",
                        help="copies of the residual stream; with 1, memory can be dropped again")  # fmt: skip
    parser.add_argument("--init-tables", default="random", choices=INIT_TABLES,
                        help="random rows read by values of zero, or rows of zero read by random values")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of the new weights")
    return parser.parse_args()


def check_output(folder: Path) -> Path:
    """The folder's full path; refuses a file, and a folder that holds anything."""
    if folder.is_file():
        raise SystemExit(f"error: {folder} is a file: name a folder to make.")
    if folder.is_dir() and any(folder.iterdir()):
        raise SystemExit(f"error: {folder} holds files, which would be overwritten: name another folder.")
    return folder.resolve()


def check_disk(folder: Path, needed: int) -> None:
    """Refuses to start where the result does not fit."""
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise SystemExit(
            f"error: the result takes about {needed / 2**30:.2f} GiB, but {existing} has {free / 2**30:.2f} GiB left: "
            "free some, name a folder on another disk, or choose smaller tables (--engram-vocab-size)."
        )


@torch.no_grad()
def logits(model, input_ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids.to(model.device)).logits.float()


def main() -> None:
    args = parse_args()
    check_processes()
    start = time.perf_counter()
    output = check_output(args.output)
    names = ("engram_layer_ids", "engram_vocab_size", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim")
    fields = {name: getattr(args, name, None) for name in (*names, "hc_mult")}
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer) if "tokenizer" in args else None
        config, tokenizer = prepare_conversion(args.backbone, tokenizer, **fields)
    except (OSError, TypeError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    check_disk(output, saved_bytes(config) + OTHER_FILES_BYTES)

    layers = ", ".join(map(str, config.engram_layer_ids)) or "no layer"
    rows = ", ".join(f"{rows:,}" for rows in config.engram_num_embeddings) or "no"
    print(f"{args.backbone} ({config.backbone_model_type}): memory in layers {layers} of {config.num_hidden_layers}, "
          f"{rows} table rows; loading ...", flush=True)  # fmt: skip
    backbone = AutoModelForCausalLM.from_pretrained(args.backbone, dtype="auto")
    input_ids = tokenizer(SAMPLE, return_tensors="pt")["input_ids"]
    expected = logits(backbone, input_ids)
    torch.manual_seed(args.seed)
    model, tokenizer = convert_backbone(backbone, tokenizer, init_tables=args.init_tables, **fields)
    del backbone

    difference = (logits(model, input_ids) - expected).abs().max().item()
    allowed = 0.0 if args.hc_mult == 1 else ROUNDING[model.dtype] * expected.abs().max().item()
    print(f"largest difference from the backbone's logits: {difference:.2g}, on a text of {input_ids.shape[1]} tokens")
    if difference > allowed:
        raise SystemExit(f"error: that is more than {allowed:.2g}, so the model is not the backbone's; nothing saved.")
    print(f"saving to {output} ...", flush=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    memory = sum(weight.numel() for name, weight in model.named_parameters() if ".engram" in name)
    print(f"done in {time.perf_counter() - start:.0f} s: {model.num_parameters():,} parameters, {memory:,} of them "
          f"memory. Load with AutoModelForCausalLM.from_pretrained({str(args.output)!r}, trust_remote_code=True).",
          flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
