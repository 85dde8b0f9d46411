"""What it costs to have tables in host memory or on disk, in one run; a table of figures, and JSON on request.

1. Loading: seconds and peak memory of `from_pretrained` and one forward, each in a process of its own, for a model
   with a large table (a sparse file, so that it takes no disk) by placement, and for the model without Engram. On a
   CPU, Transformers maps the weights of the placement "device" and reads them later, when they are used.
2. Rows per second from a file, of other ids each time: ours, `numpy.memmap`, safetensors' `get_slice`, the package
   engramdb-python if it is installed, and parallel `pread` calls, which is what the drive can do. Cold: dropped from
   the kernel's cache before. Cached: there, but not yet used by this process. Warm: used before.
3. Decoded tokens per second by placement, warm.

Ratios are of runs taken in turn. Run: `python benchmarks/memory.py` (about two minutes; `--help` for sizes).
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from hf_engram import EngramConfig, EngramForCausalLM
from hf_engram.modeling_engram.row_request import DiskRequest
from hf_engram.modeling_engram.table_storage import find_tensors, open_table


try:
    import engramdb
except ImportError:
    engramdb = None

ROW = 128  # Columns of bf16: 256 bytes, as a row of the released tables.
READERS = 16
CPU = torch.device("cpu")


def config_of(args: argparse.Namespace, gigabytes: float, **fields) -> EngramConfig:
    """A model whose one table has about so many bytes."""
    rows = int(gigabytes * 1e9 / (2 * ROW))
    return EngramConfig(
        vocab_size=8000,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=8,
        num_attention_heads=args.hidden_size // 64,
        dtype="bfloat16",
        **{"engram_vocab_size": rows // 8, "engram_head_dim": ROW, "engram_layer_ids": [1], **fields},
    )


def save_with_sparse_table(config: EngramConfig, folder: Path) -> None:
    """A checkpoint whose table is a hole in its file."""
    config.engram_placement = "disk"
    model = EngramForCausalLM(config).to(torch.bfloat16)
    names = dict.fromkeys(model.state_dict(), "model-00001-of-00002.safetensors")
    config.engram_placement = "device"
    config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    key, shape = "model.engram_memory.tables.0.weight", [config.engram_num_embeddings[0], ROW]
    size = 2 * shape[0] * shape[1]
    header = json.dumps({key: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}).encode()
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, path.stat().st_size + size)
    index = {"metadata": {}, "weight_map": {**names, key: path.name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def load_and_report(folder: str, placement: str) -> None:
    """In a process of its own: loads, runs once, and prints what that took."""
    torch.set_num_threads(1)
    start = time.perf_counter()
    options = {} if placement == "none" else {"engram_placement": placement}
    model = EngramForCausalLM.from_pretrained(folder, **options)
    seconds = time.perf_counter() - start
    with torch.no_grad():
        model(torch.arange(32).unsqueeze(0))
    print(json.dumps({"load_s": seconds, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def measure_loading(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    small = args.table_gb / 10
    cases = [("none", 0.0), ("disk", small), ("disk", args.table_gb), ("device", small), ("cpu", small)]
    if args.full:
        cases += [("device", args.table_gb), ("cpu", args.table_gb)]
    figures = {}
    for placement, gigabytes in tqdm(cases, desc="loading"):
        target = folder / f"{gigabytes}"
        if placement == "none":
            EngramForCausalLM(config_of(args, 1, engram_layer_ids=[])).to(torch.bfloat16).save_pretrained(target)
        elif not target.exists():
            save_with_sparse_table(config_of(args, gigabytes), target)
        runs = []
        for _ in range(args.loads):
            run = [sys.executable, "-P", __file__, "--child", str(target), placement]
            output = subprocess.run(run, capture_output=True, text=True, check=True).stdout
            runs.append(json.loads(output.splitlines()[-1]))
        name = placement if placement == "none" else f"{placement}_{gigabytes:g}gb"
        for key in ("load_s", "peak_mb"):
            figures[f"{name}_{key}"] = min(run[key] for run in runs)
    for name in [name for name in figures if name.endswith("_peak_mb") and not name.startswith("none")]:
        figures[name.replace("_peak_mb", "_mb_above_none")] = figures[name] - figures["none_peak_mb"]
    return figures


def readers_of(path: Path, rows: int) -> tuple[dict[str, Callable[[np.ndarray], object]], Callable[[], None]]:
    """Ways to read rows, int64 `[n]` -> `[n, ROW]`, and what drops the file from all caches."""
    table, entry = open_table(path, "table"), find_tensors(path)["table"]
    mapped = np.memmap(path, np.uint8, "r", entry.start, (rows, 2 * ROW))
    file = os.open(path, os.O_RDONLY)
    pool = ThreadPoolExecutor(READERS)
    piece = safe_open(path, "pt").get_slice("table")

    def ours(ids: np.ndarray) -> torch.Tensor:
        return DiskRequest(table, torch.from_numpy(ids)[None, None], CPU).gather(CPU, None)

    def preads(ids: np.ndarray) -> np.ndarray:
        out = np.empty((len(ids), 2 * ROW), np.uint8)
        offsets = (entry.start + ids * (2 * ROW)).tolist()

        def read(first: int) -> None:
            for index in range(first, len(offsets), READERS):
                os.preadv(file, [out[index]], offsets[index])

        list(pool.map(read, range(READERS)))
        return out

    files = [file]

    def drop() -> None:
        for view in (table.weight._map, mapped._mmap):
            view.madvise(4)  # MADV_DONTNEED: pages that are mapped are not dropped.
        for item in files:
            os.posix_fadvise(item, 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)

    readers = {
        "ours": ours,
        "preads": preads,
        "memmap": lambda ids: np.asarray(mapped[ids]),
        "get_slice": lambda ids: torch.cat([piece[i : i + 1] for i in ids.tolist()]),
    }
    if engramdb is not None:
        # It reads files of its own format.
        (path.parent / "store").mkdir()
        mapped.tofile(path.parent / "store" / "shard_000.bin")
        files.append(os.open(path.parent / "store" / "shard_000.bin", os.O_RDONLY))
        os.fsync(files[-1])
        store = engramdb.Store(str(path.parent / "store"), shards=1, rows_per_shard=rows, width=2 * ROW)
        readers["engramdb"] = lambda ids: np.frombuffer(store.fetch(ids.tolist()), np.uint8)
    return readers, drop


def measure_rows(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    rows = int(args.file_gb * 1e9 / (2 * ROW))
    path = folder / "rows.safetensors"
    table = torch.empty(rows, ROW, dtype=torch.bfloat16)
    table.view(torch.int64).random_()
    save_file({"table": table}, path)
    del table
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
    readers, drop = readers_of(path, rows)
    generator = np.random.default_rng(args.seed)
    figures = {}
    for state in ("cold", "cached", "warm"):
        rates = {name: [] for name in readers}
        if state == "cached":
            for file in folder.rglob("*"):
                if file.is_file():
                    file.read_bytes()
        elif state == "warm":
            for name in ("ours", "memmap"):
                readers[name](np.arange(0, rows, 4096 // (2 * ROW)))
        for _ in tqdm(range(args.rounds), desc=f"rows, {state}"):
            for name, read in readers.items():
                # The slow get fewer rows: they make one read at a time.
                is_slow = name == "get_slice" or (state == "cold" and name in ("memmap", "engramdb"))
                count = args.rows // 100 if is_slow else args.rows
                ids = generator.integers(0, rows, count)
                if state == "cold":
                    drop()
                start = time.perf_counter()
                read(ids)
                rates[name].append(count / (time.perf_counter() - start))
        for name, values in rates.items():
            figures[f"{state}_{name}_rows_per_s"] = statistics.median(values)
            if name != "ours":
                pairs = zip(rates["ours"], values, strict=True)
                figures[f"{state}_ours_over_{name}"] = statistics.median(own / other for own, other in pairs)
    return figures


@torch.no_grad()
def decode(model: EngramForCausalLM, prompt: torch.Tensor, tokens: int) -> float:
    """Tokens per second, greedily, prefill left out."""
    outputs = model(prompt, use_cache=True)
    name = "cache" if "cache" in outputs else "past_key_values"
    cache = outputs[name]
    token = outputs.logits[:, -1:].argmax(-1)
    start = time.perf_counter()
    for _ in range(tokens):
        token = model(token, **{name: cache}, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    return tokens / (time.perf_counter() - start)


def measure_decoding(args: argparse.Namespace, folder: Path) -> dict[str, float]:
    config = config_of(args, 0.1, engram_layer_ids=[1, 4])
    EngramForCausalLM(config).save_pretrained(folder / "decode")
    models = {
        placement: EngramForCausalLM.from_pretrained(folder / "decode", engram_placement=placement).eval()
        for placement in ("device", "cpu", "disk")
    }
    prompt = torch.randint(0, 8000, (1, 32), generator=torch.Generator().manual_seed(args.seed))
    rates = {placement: [] for placement in models}
    for model in models.values():
        decode(model, prompt, args.tokens)
    for turn in tqdm(range(2 * args.rounds), desc="decoding"):
        # Forth and back, so that none always comes after the same other.
        for placement, model in list(models.items())[:: 1 if turn % 2 else -1]:
            rates[placement].append(decode(model, prompt, args.tokens))
    figures = {f"{placement}_tokens_per_s": statistics.median(values) for placement, values in rates.items()}
    for placement in ("cpu", "disk"):
        pairs = zip(rates[placement], rates["device"], strict=True)
        figures[f"{placement}_over_device"] = statistics.median(own / other for own, other in pairs)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table-gb", type=float, default=10, help="table of the loaded model (default 10, sparse)")
    parser.add_argument("--full", action="store_true", help="load it whole as well, into memory; else a tenth of it")
    parser.add_argument("--loads", type=int, default=2, help="processes for each load, of which the best (default 2)")
    parser.add_argument("--file-gb", type=float, default=1, help="file that rows are read from (default 1)")
    parser.add_argument("--rows", type=int, default=8192, help="rows read at a time (default 8192)")
    parser.add_argument("--rounds", type=int, default=7, help="runs of everything that is compared (default 7)")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a run decodes (default 32)")
    parser.add_argument("--hidden-size", type=int, default=512, help="width, a multiple of 64 (default 512)")
    parser.add_argument("--folder", help="where files are made, and removed again (default: the temporary folder)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        load_and_report(*args.child)
        return

    folder = Path(tempfile.mkdtemp(prefix="engram-memory-", dir=args.folder))
    figures = {"threads": torch.get_num_threads()}
    try:
        for measure in (measure_loading, measure_rows, measure_decoding):
            figures |= measure(args, folder)
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:34} {value:,.3f}" if isinstance(value, float) else f"{name:34} {value}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
