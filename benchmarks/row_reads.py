"""Ways to copy rows of a file that the kernel has cached into a buffer, in one run; nanoseconds a row, and ratios.

`ours` has the kernel copy out of a mapping, through a pipe, so that a file that is truncated meanwhile is an error;
`mapping` touches the mapping itself, which is what a signal ends the process for; `preads` is one `preadv` a row, and
`preads, threads` the same from four threads. Ratios are of runs taken in turn.

Run: `python benchmarks/row_reads.py` (about a minute).
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from hf_engram.modeling_engram.table_storage import open_table


THREADS = 4


def ways_to_read(path: Path, row_bytes: int) -> dict:
    """`read(row_ids, out)` by name."""
    tensor = open_table(path, "table").weight
    start, rows = tensor.entry.start, tensor.shape[0]
    mapped = mmap.mmap(tensor.file, 0, access=mmap.ACCESS_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    table = np.frombuffer(mapped, np.uint8, rows * row_bytes, start).reshape(rows, row_bytes)
    pool = ThreadPoolExecutor(THREADS)

    def preads(ids: np.ndarray, out: np.ndarray) -> None:
        view = memoryview(out.reshape(-1))
        for at, offset in enumerate((start + ids * row_bytes).tolist()):
            os.preadv(tensor.file, [view[at * row_bytes : (at + 1) * row_bytes]], offset)

    def in_threads(ids: np.ndarray, out: np.ndarray) -> None:
        step = -(-len(ids) // THREADS)
        list(pool.map(lambda at: preads(ids[at : at + step], out[at : at + step]), range(0, len(ids), step)))

    def mapping(ids: np.ndarray, out: np.ndarray) -> None:
        np.take(table, ids, axis=0, out=out, mode="clip")

    return {"ours": tensor.gather, "mapping": mapping, "preads": preads, "preads, threads": in_threads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file-gb", type=float, default=0.5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--row-bytes", type=int, nargs="+", default=[264, 512])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512, 4096, 16384])
    args = parser.parse_args()
    generator = np.random.default_rng(0)
    for row_bytes in args.row_bytes:
        with tempfile.TemporaryDirectory() as folder:
            path, total = Path(folder) / "rows.safetensors", int(args.file_gb * 1e9 / row_bytes)
            save_file({"table": torch.zeros(total, row_bytes // 2, dtype=torch.bfloat16)}, path)
            ways = ways_to_read(path, row_bytes)
            for count in args.rows:
                times = {name: [] for name in ways}
                for _ in range(args.rounds):
                    ids, out = np.sort(generator.integers(0, total, count)), np.empty((count, row_bytes), np.uint8)
                    for name, read in ways.items():
                        start = time.perf_counter()
                        read(ids, out)
                        times[name].append((time.perf_counter() - start) / count * 1e9)
                line = "  ".join(f"{name} {statistics.median(values):6.0f} ns" for name, values in times.items())
                ratios = "  ".join(
                    f"{statistics.median(b / a for a, b in zip(times['ours'], values, strict=True)):.2f}"
                    for values in times.values()
                )
                print(f"{row_bytes} bytes, {count:6} rows: {line}   over ours: {ratios}", flush=True)


if __name__ == "__main__":
    main()
