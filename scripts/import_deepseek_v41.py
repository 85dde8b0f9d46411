"""Make the memory of a DeepSeek-V4.1 checkpoint usable: a checkpoint in, a small folder out, tables left in place.

    python scripts/import_deepseek_v41.py --checkpoint DeepSeek-V4.1 --output v41-memory

The checkpoint is a local folder; of its shards, only those that hold the memory are needed. All checks come before
anything is written. The new folder is loaded with hf_engram.deepseek_v41.load_memory, and refers to the tables where
they are: keep the checkpoint where it is, or import again. See docs/how-to/deepseek-v41.md.
"""

import argparse
import time
from pathlib import Path

from hf_engram.deepseek_v41 import import_memory
from hf_engram.processes import check_processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the DeepSeek-V4.1 checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="folder to make; must not exist, or be empty")
    args = parser.parse_args()
    check_processes()
    start = time.perf_counter()
    try:
        config = import_memory(args.checkpoint, args.output)
    except (OSError, ValueError) as error:
        raise SystemExit(f"error: {error}") from error
    layers = ", ".join(map(str, config.engram_layer_ids))
    rows = ", ".join(f"{rows:,}" for rows in config.engram_num_embeddings)
    print(f"done in {time.perf_counter() - start:.1f} s: layers {layers}, tables of {rows} rows, left in "
          f"{args.checkpoint}. Load with hf_engram.deepseek_v41.load_memory({str(args.output)!r}).")  # fmt: skip


if __name__ == "__main__":
    main()
