"""Upload a model's folder to the Hub, after it has been seen to work from there.

    python scripts/push_to_hub.py my-engram someone/my-engram --dry-run     # what would be uploaded; contacts nobody
    python scripts/push_to_hub.py my-engram someone/my-engram --private
    python scripts/push_to_hub.py runs/first/checkpoint-1000 someone/my-engram --revision step-1000
    python scripts/push_to_hub.py my-adapter someone/my-adapter --base someone/my-engram

First the folder is loaded by its own code (an adapter by that of its base), in a process that has Transformers and
PEFT alone: its logits must be those of this package to the bit, and it must generate. An adapter comes with the table
rows that it has trained, and names its base by its Hub id. Then its files are uploaded: all but training state,
temporary and hidden ones. The card gets the Hub id for a name, unless somebody wrote it; one that somebody wrote
on the Hub stays. An interrupted upload goes on when the same command is run again. Log in first: `hf auth login`, or
HF_TOKEN.
"""

import argparse
import fnmatch
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import validate_repo_id
from transformers import AutoConfig
from transformers.utils import logging

import hf_engram  # noqa: F401 - registers the architecture with the Auto classes
from hf_engram.adapters import hub_id
from hf_engram.modeling_engram.model_card import CARD_FILE, KINDS, is_generated, renamed, size, write_card
from hf_engram.processes import check_processes


# Of the Trainer, accelerate, DeepSpeed and FSDP: what a run is resumed from.
TRAINING_STATE = ("optimizer*.pt", "optimizer*.bin", "scheduler*.pt", "scheduler*.bin", "scaler*.pt", "rng_state*.pth",
                  "random_states_*.pkl", "trainer_state.json", "training_args.bin", "checkpoint-*", "global_step*",
                  "latest", "zero_to_fp32.py", "optimizer_*", "pytorch_model_fsdp*", "training_state", "runs",
                  "logs")  # fmt: skip
TEMPORARY = ("*.tmp", "*.old", "*.lock", "*.incomplete", "*~", "__pycache__")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What a checkpoint consists of: one of another layout must not stay on the Hub beside the new one, or it is loaded.
WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


def answer(folder: str, auto_class: str, base: str | None, trust_remote_code: bool) -> dict:
    """What a model (or an adapter on its base) makes of a text. Runs here and, by its source, in the process without
    the package."""
    import os

    import torch
    import transformers

    has_tokenizer = os.path.exists(os.path.join(folder, "tokenizer_config.json"))
    source = folder if has_tokenizer else base
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    model = getattr(transformers, auto_class).from_pretrained(
        base or folder,
        trust_remote_code=trust_remote_code,
        # So that a table is not read whole, however large. An adapter has rows for tables in memory.
        engram_placement="disk" if base is None else "device",
    )
    if base is not None:
        import peft

        model = peft.PeftModel.from_pretrained(model, folder)
    inputs = tokenizer("The quick brown fox jumps over the lazy dog.", return_tensors="pt")
    with torch.no_grad():
        outputs = model.eval()(**inputs)
        tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
        if auto_class == "AutoModelForCausalLM":
            tensors["tokens"] = model.generate(**inputs, max_new_tokens=1, do_sample=False)
    return {**{name: value for name, value in inputs.items()}, **tensors}


IN_A_FRESH_PROCESS = f"""
import json, sys
sys.modules["hf_engram"] = None  # importing it fails: the folder brings all the code it needs
import torch

{inspect.getsource(answer)}

request = json.load(sys.stdin)
torch.set_num_threads(request["threads"])
found = answer(request["folder"], request["auto_class"], request["base"], trust_remote_code=True)
torch.save(found, request["output"])
"""


# --- the folder ------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """The files to upload, relative to the folder, and what is left out, with the reason."""
    files, left_out = [], {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if any(parent in left_out for parent in name.parents):
            continue
        if path.name.startswith("."):
            left_out[name] = "hidden"
        elif any(fnmatch.fnmatch(path.name, pattern) for pattern in TEMPORARY):
            left_out[name] = "temporary"
        elif any(fnmatch.fnmatch(path.name, pattern) for pattern in TRAINING_STATE):
            left_out[name] = "training state"
        elif path.is_file():
            files.append(name)
    return files, left_out


def read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error


def auto_class_of(folder: Path, files: list[Path]) -> str:
    """The Auto class that loads a folder.

    Raises:
        ValueError: the folder is not that of an Engram model, or lacks something; says what, and what to do.
    """
    names = {name.as_posix() for name in files}
    if "config.json" not in names:
        checkpoints = sorted(folder.glob("checkpoint-*[0-9]"), key=lambda path: path.stat().st_mtime)
        remedy = f"name one of its checkpoints, such as {checkpoints[-1]}" if checkpoints else "save a model there"
        raise ValueError(f"{folder} has no config.json: {remedy}.")
    config = read_json(folder / "config.json")
    if config.get("model_type") != "engram":
        raise ValueError(
            f"{folder} holds a {config.get('model_type')} model, not an Engram one: upload it with `hf upload`."
        )
    missing = {f"{entry.rpartition('--')[2].partition('.')[0]}.py" for entry in config.get("auto_map", {}).values()}
    if not config.get("auto_map") or missing - names:
        raise ValueError(
            f"{folder} lacks the code that loads it ({', '.join(sorted(missing - names)) or 'no auto_map'}): save the "
            "model there again."
        )
    weights = {SINGLE}
    if INDEX in names and SINGLE not in names:
        weights = set(read_json(folder / INDEX)["weight_map"].values())
    if weights - names:
        raise ValueError(
            f"{folder} lacks weights ({', '.join(sorted(weights - names))}): save the model there again, as "
            "safetensors files."
        )
    if "tokenizer_config.json" not in names:
        raise ValueError(f"{folder} has no tokenizer: `tokenizer.save_pretrained({str(folder)!r})` puts it there.")
    kind = (config.get("architectures") or [None])[0]
    if kind not in KINDS:
        raise ValueError(f"{folder}/config.json names the architecture {kind}, not one of {', '.join(KINDS)}.")
    return KINDS[kind][1]


def base_of(folder: Path, files: list[Path], given: str | None) -> tuple[str, str] | None:
    """Of an adapter, what its base is loaded by here, and its id on the Hub; None for a model.

    Raises:
        ValueError: the base has no id on the Hub, as far as is known; or --base is given for a model.
    """
    names = {name.as_posix() for name in files}
    if ADAPTER_CONFIG not in names:
        if given:
            raise ValueError(f"--base is for adapters, but {folder} has no {ADAPTER_CONFIG}.")
        return None
    if ADAPTER_WEIGHTS not in names:
        raise ValueError(f"{folder} lacks {ADAPTER_WEIGHTS}: save the adapter there again, as a safetensors file.")
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not base:
        raise ValueError(f"{folder}/{ADAPTER_CONFIG} names no base: set `base_model_name_or_path` there.")
    known = given or hub_id(base)
    if os.path.exists(known) or os.path.isabs(known):
        raise ValueError(
            f"{folder} is an adapter for {base}, a folder that nobody else has: upload that first, and say with "
            "--base OWNER/NAME where it is."
        )
    return base, known


def auto_class_of_base(base: str) -> str:
    kind = (AutoConfig.from_pretrained(base).architectures or [None])[0]
    if kind not in KINDS:
        raise ValueError(f"the base {base} is a {kind}, not an Engram model: upload the adapter with `hf upload`.")
    return KINDS[kind][1]


def stage(folder: Path, files: list[Path], target: Path, repo_id: str, base: tuple[str, str] | None) -> None:
    """Links the files into a folder of their own, the card under the name that the model will have; an adapter's base
    (its name here, and its id) is called by its id."""
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to((folder / name).resolve())
    card, config = target / CARD_FILE, target / ADAPTER_CONFIG
    if card.exists():
        content = card.read_text(encoding="utf-8", errors="replace")
        if (own := renamed(content, repo_id, base)) != content:
            write_card(card, own)
    if base is not None:
        content = read_json(config) | {"base_model_name_or_path": base[1]}
        config.unlink()
        config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check(folder: Path, auto_class: str, base: str | None, temporary: Path) -> None:
    """Loads and runs the folder, of an adapter on its base, with this package and without it.

    Raises:
        ValueError: it does not load, cannot be run, or computes something else without the package.
    """
    # First: a base that is on the Hub is in the cache then.
    ours = answer(str(folder), auto_class, base, trust_remote_code=False)
    output = temporary / "answer.pt"
    request = {"folder": str(folder), "auto_class": auto_class, "base": base, "output": str(output)}
    request["threads"] = torch.get_num_threads()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(temporary / "modules")}
    child = subprocess.run(
        [sys.executable, "-c", IN_A_FRESH_PROCESS],
        input=json.dumps(request),
        cwd=temporary,
        env=environment,
        capture_output=True,
        text=True,
    )
    if child.returncode:
        reason = (child.stderr.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
        raise ValueError(f"the folder cannot be used without this package: {reason}")
    theirs = torch.load(output)
    for name in ours.keys() | theirs.keys():
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name]):
            raise ValueError(
                f"with the folder's own code, `{name}` is not what this package computes (or not a number). If the "
                "folder was saved by another version, load it and save it again."
            )


# --- the Hub ---------------------------------------------------------------------------------------------------------


def upload(api: HfApi, args: argparse.Namespace, folder: Path, temporary: Path, base: tuple[str, str] | None) -> str:
    """Uploads a folder; returns the address of the commit.

    Raises:
        HTTPError, OSError, RuntimeError, ValueError: it was refused, or the connection failed.
    """
    try:
        is_private = api.repo_info(args.repo_id).private
    except RepositoryNotFoundError:
        api.create_repo(args.repo_id, private=args.private or None, exist_ok=True)
        is_private = True
    if args.private and not is_private:
        raise ValueError(f"--private: {args.repo_id} exists and is public. Change that in its settings on the Hub, or "
                         "name another.")  # fmt: skip
    if base is not None:
        try:
            api.repo_info(base[1])
        except RepositoryNotFoundError as error:
            raise ValueError(f"the base {base[1]} is not on the Hub, or not for you: upload it first.") from error
    if args.revision:
        api.create_branch(args.repo_id, branch=args.revision, exist_ok=True)
    info = api.repo_info(args.repo_id, revision=args.revision)
    there = {sibling.rfilename for sibling in info.siblings or []}
    card = folder / CARD_FILE
    if CARD_FILE in there and card.exists() and is_generated(card.read_text(encoding="utf-8", errors="replace")):
        theirs = api.hf_hub_download(args.repo_id, CARD_FILE, revision=info.sha, cache_dir=temporary / "cache")
        if not is_generated(Path(theirs).read_text(encoding="utf-8", errors="replace")):
            print(f"the {CARD_FILE} on the Hub was written by somebody, and stays", flush=True)
            card.unlink()
    ours = {path.name for path in folder.iterdir()}
    stale = sorted(name for name in there - ours if WEIGHTS.fullmatch(name))
    # huggingface_hub's way for large folders, too: streamed, resumed when repeated, and up to hundreds of files in one
    # commit.
    commit = api.upload_folder(
        repo_id=args.repo_id,
        folder_path=folder,
        revision=args.revision,
        commit_message=f"Upload {args.folder.resolve().name}",
        delete_patterns=stale or None,
    )
    return commit.commit_url


def parse_args() -> argparse.Namespace:
    def repo_id(text: str) -> str:
        if text.count("/") != 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not of the form owner/name")
        try:
            validate_repo_id(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return text

    def branch(text: str) -> str:
        if not re.fullmatch(r"[\w.+-]+(/[\w.+-]+)*", text) or re.fullmatch(r"[0-9a-f]{40}|refs/.*", text):
            raise argparse.ArgumentTypeError(f"{text!r} is not the name of a branch")
        return text

    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="a model with its tokenizer, or an adapter, as `save_pretrained` "
                        "writes them. Its own code is run")  # fmt: skip
    parser.add_argument("repo_id", type=repo_id, help="owner/name on the Hub; made if it is not there")
    parser.add_argument("--base", type=repo_id, metavar="OWNER/NAME", help="of an adapter, where its base is on the "
                        "Hub; not needed if it was loaded from there")  # fmt: skip
    parser.add_argument("--private", action="store_true", help="make the repository private")
    parser.add_argument("--revision", type=branch, help="branch to upload to, made if it is not there; default: main")
    parser.add_argument(
        "--dry-run", action="store_true", help="check the folder, list files and sizes, upload nothing"
    )
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"{args.folder} is not a folder")
    return args


def main() -> None:
    args = parse_args()
    check_processes()
    logging.disable_progress_bar()
    files, left_out = files_of(args.folder)
    try:
        base = base_of(args.folder, files, args.base)
        auto_class = auto_class_of(args.folder, files) if base is None else auto_class_of_base(base[0])
        if not args.dry_run and get_token() is None:
            raise ValueError("not logged in: run `hf auth login`, or set HF_TOKEN to a token that may write.")
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    sizes = {name: (args.folder / name).stat().st_size for name in files}
    with tempfile.TemporaryDirectory(prefix="push_to_hub-") as name:
        temporary = Path(name)
        staged = temporary / "folder"
        staged.mkdir()
        print(f"checking {args.folder} ...", flush=True)
        try:
            stage(args.folder, files, staged, args.repo_id, base)
            check(staged, auto_class, base and base[0], temporary)
        # Whatever its files make of it: nothing was sent yet.
        except Exception as error:
            raise SystemExit(f"error: {args.folder} was not uploaded: {error}") from error
        print(f"it loads, runs, and computes the same without this package\n"
              f"{'would upload' if args.dry_run else 'uploading'} {len(files)} files, {size(sum(sizes.values()))}, to "
              f"{args.repo_id}, branch {args.revision or 'main'}")  # fmt: skip
        for path, n_bytes in sizes.items() if args.dry_run else ():
            print(f"  {size(n_bytes):>10}  {path.as_posix()}")
        for path, reason in left_out.items():
            print(f"left out: {path.as_posix()} ({reason})", flush=True)
        if args.dry_run:
            return
        try:
            address = upload(HfApi(), args, staged, temporary, base)
        # The last is hf_xet's.
        except (HTTPError, OSError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise SystemExit(f"error: {reason}\nThe upload to {args.repo_id} was not finished. "
                             "When the cause is mended, the same command goes on.") from error  # fmt: skip
    print(f"done: {address}")


if __name__ == "__main__":
    main()
