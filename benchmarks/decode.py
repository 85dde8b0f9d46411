"""Cost of Engram per decoded token: a model with 2 Engram layers of 8 against the same model without, in one run.

What must happen per token and Engram layer: C rows of the table and the weights of `wkv` are read once. The rest of
the difference is overhead. Run: `python benchmarks/decode.py` (CPU or GPU, `--help` for sizes).
"""

import argparse
import json
import statistics
import time

import torch
from tqdm import trange

from hf_engram import EngramConfig, EngramForCausalLM


def build(args: argparse.Namespace, engram_layer_ids: list[int]) -> EngramForCausalLM:
    torch.manual_seed(args.seed)
    config = EngramConfig(
        vocab_size=32000,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=8,
        num_attention_heads=args.hidden_size // 64,
        hc_mult=args.hc_mult,
        engram_layer_ids=engram_layer_ids,
        engram_vocab_size=args.engram_vocab_size,
    )
    return EngramForCausalLM(config).to(args.device, getattr(torch, args.dtype)).eval()


@torch.no_grad()
def decode(model: EngramForCausalLM, prompt: torch.Tensor, tokens: int) -> float:
    """Seconds per greedily decoded token, prefill left out."""
    outputs = model(prompt, use_cache=True)
    cache = outputs.get("cache", outputs.get("past_key_values"))
    token = outputs.logits[:, -1:].argmax(-1)
    synchronize(model.device)
    start = time.perf_counter()
    for _ in range(tokens):
        token = model(token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    synchronize(model.device)
    return (time.perf_counter() - start) / tokens


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=512, help="width, a multiple of 64 (default 512)")
    parser.add_argument("--hc-mult", type=int, default=4, help="copies of the residual stream (default 4)")
    parser.add_argument("--engram-vocab-size", type=int, default=20000, help="rows per head (default 20000)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens a run decodes (default 64)")
    parser.add_argument("--rounds", type=int, default=9, help="runs of each model, taken in turn (default 9)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()

    with_engram, without = build(args, [1, 4]), build(args, [])
    prompt = torch.randint(0, 32000, (1, 32), device=args.device)
    for model in (with_engram, without):
        decode(model, prompt, args.tokens)
    pairs = [
        (decode(with_engram, prompt, args.tokens), decode(without, prompt, args.tokens))
        for _ in trange(args.rounds, desc="rounds")
    ]
    figures = {
        "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "hidden_size": args.hidden_size,
        "hc_mult": args.hc_mult,
        "dtype": args.dtype,
        "ms_per_token_with_engram": 1e3 * statistics.median(a for a, _ in pairs),
        "ms_per_token_without": 1e3 * statistics.median(b for _, b in pairs),
        "ratio": statistics.median(a / b for a, b in pairs),
    }
    for name, value in figures.items():
        print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
