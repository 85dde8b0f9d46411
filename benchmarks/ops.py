"""Speed of the operations in modeling_engram/ops: time, peak extra memory, and bandwidth against a plain copy's.

Every operation, shape and dtype is measured in one run, its implementations taken in turn: "ours" (what `backend=None`
chooses: Triton kernels on a GPU, eager blocks on a CPU), "formula" (the plain PyTorch that it replaces) and, with
`--compile`, torch.compile of that formula; where liger-kernel is installed and there is a GPU for it, also its mHC
kernels. "must move" counts each input read once and each output written once. "step" is a whole training step.
Run: `python benchmarks/ops.py`, `--help` for more. On a CPU with other work to do, set OMP_WAIT_POLICY=PASSIVE or
OMP_NUM_THREADS=1: threads that spin while they wait for each other keep the others from running. An operation is added
as a function in OPERATIONS.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch.nn import functional as F
from tqdm import tqdm
from transformers import DynamicCache

from hf_engram import EngramConfig, EngramForCausalLM
from hf_engram.modeling_engram import engram_layer, engram_table, hyper_connection
from hf_engram.modeling_engram.ngram_hasher import NgramHasher
from hf_engram.modeling_engram.ngram_history import history_layer
from hf_engram.modeling_engram.ops.engram_gate import engram_gate, engram_gate_reference
from hf_engram.modeling_engram.ops.gather_rows import gather_rows, gather_rows_reference
from hf_engram.modeling_engram.ops.ngram_hash import ngram_hash, ngram_hash_reference
from hf_engram.modeling_engram.ops.residual_stream import stream_mixes, stream_update
from hf_engram.modeling_engram.ops.stream_mixes import plain_stream_mixes
from hf_engram.modeling_engram.ops.stream_update import plain_stream_collapse, plain_stream_expand


try:
    from liger_kernel.transformers.functional import liger_mhc_post_res, liger_mhc_pre
except ImportError:
    liger_mhc_post_res = None


@dataclass
class Problem:
    """One operation on given tensors.

    Args:
        shape: to print.
        implementations: by name, functions of `inputs`; the first is ours, "formula" what it is compared with.
        inputs: leaves; those that require gradients get them.
        forward_bytes, backward_bytes: what must move; without a backward, 0.
        compiles: whether torch.compile can take the formula.
    """

    shape: str
    implementations: dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]]
    inputs: list[torch.Tensor]
    forward_bytes: int
    backward_bytes: int = 0
    grad_out: torch.Tensor | tuple[torch.Tensor, ...] | None = field(default=None)
    compiles: bool = True


def gate(dtype: torch.dtype, device: torch.device) -> Problem:
    tokens, copies, dim = (4096, 4, 5120) if device.type == "cuda" else (2048, 4, 1024)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    x, kv = draw(tokens, copies, dim), draw(tokens, (copies + 1) * dim)
    q_weight, k_weight = draw(copies, dim), draw(copies, dim)
    inputs = [tensor.requires_grad_() for tensor in (x, kv, q_weight, k_weight)]
    return Problem(
        shape=f"T={tokens} H={copies} D={dim}",
        implementations={"ours": engram_gate, "formula": engram_gate_reference},
        inputs=inputs,
        # x, kv -> out; then x, kv, grad_out -> grad_x, grad_kv.
        forward_bytes=2 * x.nbytes + kv.nbytes,
        backward_bytes=3 * x.nbytes + 2 * kv.nbytes,
        grad_out=draw(tokens, copies, dim),
    )


def mixes(dtype: torch.dtype, device: torch.device) -> Problem:
    """The stream's mixing weights: outputs of a few numbers a token, so a forward moves the stream once."""
    tokens, copies, dim = (4096, 4, 5120) if device.type == "cuda" else (2048, 4, 1024)
    n_mixes = (2 + copies) * copies
    x = torch.randn(1, tokens, copies, dim, dtype=dtype, device=device)
    fn = torch.randn(n_mixes, copies * dim, device=device) * 0.02
    scale, base = torch.randn(3, device=device), torch.randn(n_mixes, device=device)
    constants = {"norm_eps": 1e-6, "hc_eps": 1e-6, "sinkhorn_iters": 20}
    outputs = [(1, tokens, copies), (1, tokens, copies), (1, tokens, copies, copies)]
    return Problem(
        shape=f"T={tokens} H={copies} D={dim}",
        implementations={
            "ours": lambda *inputs: stream_mixes(*inputs, **constants),
            "formula": lambda *inputs: plain_stream_mixes(*inputs, **constants),
        },
        inputs=[tensor.requires_grad_() for tensor in (x, fn, scale, base)],
        # x, fn -> weights; then x, fn -> grad_x, grad_fn.
        forward_bytes=x.nbytes + fn.nbytes,
        backward_bytes=2 * x.nbytes + 2 * fn.nbytes,
        grad_out=tuple(torch.randn(shape, device=device) for shape in outputs),
    )


def plain_stream_update(y, x, post, comb, pre):
    out = plain_stream_expand(y, x, post, comb)
    return out, plain_stream_collapse(out, pre)


def update(dtype: torch.dtype, device: torch.device) -> Problem:
    """The stream's single pass: expand after a sublayer, collapse for the next."""
    tokens, copies, dim = (4096, 4, 5120) if device.type == "cuda" else (2048, 4, 1024)
    y = torch.randn(1, tokens, dim, dtype=dtype, device=device)
    x = torch.randn(1, tokens, copies, dim, dtype=dtype, device=device)
    post, pre = torch.rand(1, tokens, copies, device=device), torch.rand(1, tokens, copies, device=device)
    comb = torch.rand(1, tokens, copies, copies, device=device)

    def liger(y, x, post, comb, pre):
        out = liger_mhc_post_res(x, y, post, comb.transpose(-1, -2))
        return out, liger_mhc_pre(out, pre)

    implementations = {"ours": stream_update, "formula": plain_stream_update}
    if liger_mhc_post_res is not None and device.type == "cuda":
        implementations["liger"] = liger
    return Problem(
        shape=f"T={tokens} H={copies} D={dim}",
        implementations=implementations,
        inputs=[tensor.requires_grad_() for tensor in (y, x, post, comb, pre)],
        # y, x -> out, h; then y, x, grad_out, grad_h -> grad_y, grad_x.
        forward_bytes=2 * x.nbytes + 2 * y.nbytes,
        backward_bytes=3 * x.nbytes + 3 * y.nbytes,
        grad_out=(torch.randn_like(x), torch.randn_like(y)),
    )


def plain_gather(
    table: torch.Tensor, row_ids: torch.Tensor, scales: None = None, dtype: None = None, sparse_grad: bool = True
) -> torch.Tensor:
    return F.embedding(row_ids, table, sparse=sparse_grad).flatten(-2)


def draw_row_ids(device: torch.device) -> tuple[torch.Tensor, int, int]:
    """Row ids of one layer, some far more often than others; the number of rows, and of those that are fetched."""
    tokens, columns, rows = (4096, 24, 4_000_000) if device.type == "cuda" else (1024, 24, 200_000)
    row_ids = (torch.rand(1, tokens, columns, device=device).pow(3) * rows).long()
    return row_ids, rows, row_ids.unique().numel()


def gather(dtype: torch.dtype, device: torch.device) -> Problem:
    """Rows of a float table, with sparse gradients, coalesced as optimizers need them."""
    row_ids, rows, distinct = draw_row_ids(device)
    tokens, columns, dim = *row_ids.shape[1:], 256
    table = torch.randn(rows, dim, dtype=dtype, device=device).requires_grad_()
    grad_out = torch.randn(1, tokens, columns * dim, dtype=dtype, device=device)
    fetched = distinct * dim * dtype.itemsize
    return Problem(
        shape=f"T={tokens} C={columns} d={dim}",
        implementations={
            "ours": lambda table: gather_rows(table, row_ids, sparse_grad=True),
            "formula": lambda table: plain_gather(table, row_ids),
        },
        inputs=[table],
        # ids, rows -> out; then ids, grad_out -> gradients of the rows.
        forward_bytes=row_ids.nbytes + fetched + grad_out.nbytes,
        backward_bytes=row_ids.nbytes + grad_out.nbytes + fetched,
        grad_out=grad_out,
    )


def gather_fp8(dtype: torch.dtype, device: torch.device) -> Problem:
    """Rows of a quantised table, which has no gradient, in `dtype`."""
    row_ids, rows, distinct = draw_row_ids(device)
    tokens, columns, dim, block = *row_ids.shape[1:], 256, 32
    table = torch.randint(0, 127, (rows, dim), dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    scales = torch.randint(110, 140, (rows, dim // block), dtype=torch.uint8, device=device)
    scales = scales.view(torch.float8_e8m0fnu)
    return Problem(
        shape=f"T={tokens} C={columns} d={dim}",
        implementations={
            "ours": lambda: gather_rows(table, row_ids, scales, dtype),
            "formula": lambda: gather_rows_reference(table, row_ids, scales, dtype),
        },
        inputs=[],
        forward_bytes=row_ids.nbytes + distinct * (dim + dim // block) + tokens * columns * dim * dtype.itemsize,
        compiles=False,  # Inductor has no code for e8m0.
    )


def step(dtype: torch.dtype, device: torch.device) -> Problem:
    """Forward and backward of a small model, against the same model with the formulas in place of the operations."""
    on_gpu = device.type == "cuda"
    width, layers, tokens, rows = (1024, 8, 4096, 2_000_000) if on_gpu else (256, 4, 512, 50_000)
    config = EngramConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        hc_mult=4,
        engram_layer_ids=[1, layers // 2 + 1],
        engram_vocab_size=rows // 16,
        engram_max_ngram_size=3,
        engram_n_heads=8,
        engram_head_dim=width // 16,
    )
    model = EngramForCausalLM(config).to(device, dtype)
    model.model.engram_memory.sparse_grad = True
    input_ids = (torch.rand(1, tokens, device=device).pow(3) * config.vocab_size).long()

    def loss(*parameters: torch.Tensor) -> torch.Tensor:
        return model(input_ids=input_ids, labels=input_ids, use_cache=False).loss

    def formula(*parameters: torch.Tensor) -> torch.Tensor:
        plain = {
            engram_layer: {"engram_gate": engram_gate_reference},
            engram_table: {"gather_rows": plain_gather},
            hyper_connection: {
                "stream_mixes": plain_stream_mixes,
                "stream_collapse": plain_stream_collapse,
                "stream_expand": plain_stream_expand,
                "stream_update": plain_stream_update,
            },
        }
        with ExitStack() as patches:
            for module, functions in plain.items():
                patches.enter_context(mock.patch.multiple(module, **functions))
            return loss(*parameters)

    loss().backward()
    inputs = [parameter for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    weights = sum(parameter.nbytes for name, parameter in model.named_parameters() if "engram_memory" not in name)
    return Problem(
        shape=f"T={tokens} H=4 D={width} layers={layers}",
        implementations={"ours": loss, "formula": formula},
        inputs=inputs,
        # Of a model's traffic only the weights are certain: read twice, their gradients written.
        forward_bytes=weights,
        backward_bytes=2 * weights,
        compiles=False,
    )


def hasher(device: torch.device) -> tuple[NgramHasher, tuple]:
    """V4.1's two Engram layers of 24 columns, and what an n-gram hash takes beside the token ids."""
    config = EngramConfig(
        vocab_size=129280,
        engram_layer_ids=[1, 14],
        engram_vocab_size=16_000_000,
        engram_max_ngram_size=4,
        engram_n_heads=8,
        num_hidden_layers=15,
    )
    module = NgramHasher(config).to(device)
    module.check()
    return module, (module.token_map, module.pad_id, module.multipliers, module.primes, module.offsets)


def hash_tokens(dtype: torch.dtype, device: torch.device) -> Problem:
    """Row ids of both layers for a whole sequence. On CPU ours are NumPy's memory, not in "peak MB"."""
    tokens = 4096 if device.type == "cuda" else 100_000
    module, constants = hasher(device)
    input_ids = torch.randint(0, module.config.vocab_size, (1, tokens), dtype=dtype, device=device)
    columns = module.primes.numel()
    return Problem(
        shape=f"T={tokens} C={columns}",
        implementations={
            "ours": lambda: ngram_hash(input_ids, *constants),
            "formula": lambda: ngram_hash_reference(input_ids, *constants),
        },
        inputs=[],
        # ids, map -> row ids, encoded tokens.
        forward_bytes=input_ids.nbytes + tokens * (4 + 8 * columns + 8),
    )


def hash_step(dtype: torch.dtype, device: torch.device) -> Problem:
    """One token with a cache, through the model's hasher; the formula goes without the cache's upkeep."""
    module, constants = hasher(device)
    cache, layer_idx = DynamicCache(config=module.config), module.config.engram_layer_ids[0]
    input_ids = torch.randint(0, module.config.vocab_size, (1, 32), dtype=dtype, device=device)

    def hash_cached(tokens: torch.Tensor) -> torch.Tensor:
        hash_ids = module(tokens, cache=cache)
        # The history is checked against the tokens that a cache has keys of.
        keys = torch.zeros(1, 1, tokens.shape[1], 1, device=device)
        for layer in range(layer_idx + 1):
            cache.update(keys, keys, layer)
        return hash_ids

    hash_cached(input_ids)
    history = history_layer(cache, layer_idx).last_window()
    token = input_ids[:, :1].clone()
    return Problem(
        shape=f"T=1 C={module.primes.numel()}",
        implementations={
            "ours": lambda: hash_cached(token),
            "formula": lambda: ngram_hash_reference(token, *constants, history=history),
        },
        inputs=[],
        forward_bytes=token.nbytes + 4 + 8 * module.primes.numel() + 8,
    )


# Their dtype is that of the token ids.
INTEGER_OPERATIONS = {"hash": hash_tokens, "hash_step": hash_step}
OPERATIONS = {
    "gate": gate,
    "mixes": mixes,
    "update": update,
    "gather": gather,
    "gather_fp8": gather_fp8,
    "step": step,
    **INTEGER_OPERATIONS,
}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # About a millisecond, in which launches queue up: a kernel of microseconds would be timed waiting for its own.
    torch.cuda._sleep(2**21)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def peak_bytes(function: Callable[[], object], device: torch.device) -> int:
    """Most that was allocated at one time beyond what was before; counted, not sampled."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = function()
        del result
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = function()
    del result
    held = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def copy_bandwidth(device: torch.device, rounds: int) -> float:
    """Bytes a second, read and written, of a copy too large for any cache."""
    source = torch.empty(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source).fill_(0)
    times = [seconds(lambda: target.copy_(source), device) for _ in range(rounds + 2)][2:]
    return 2 * source.nbytes / statistics.median(times)


def forward_and_backward(problem: Problem, implementation: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
    out = implementation(*problem.inputs)
    grads = torch.autograd.grad(out, problem.inputs, problem.grad_out)
    return (out, *(grad.coalesce() if grad.is_sparse else grad for grad in grads))


def measure(problem: Problem, device: torch.device, rounds: int, compiled: bool, bandwidth: float) -> list[dict]:
    """A row for each implementation and pass."""
    implementations = dict(problem.implementations)
    if compiled and problem.compiles:
        implementations["torch.compile"] = torch.compile(problem.implementations["formula"], fullgraph=True)
    passes = {"forward": (lambda function: function(*problem.inputs), problem.forward_bytes)}
    if problem.backward_bytes:
        passes["forward + backward"] = (
            lambda function: forward_and_backward(problem, function),
            problem.forward_bytes + problem.backward_bytes,
        )
    rows = []
    for pass_name, (run, must_move) in passes.items():
        times = {name: [] for name in implementations}
        for index in range(rounds + 2):
            for name, function in implementations.items():
                elapsed = seconds(lambda run=run, function=function: run(function), device)
                if index >= 2:
                    times[name].append(elapsed)
        for name, function in implementations.items():
            elapsed = statistics.median(times[name])
            rows.append(
                {
                    "shape": problem.shape,
                    "pass": pass_name,
                    "implementation": name,
                    "ms": 1e3 * elapsed,
                    # Of runs next to each other, so that a busy machine slows both.
                    "speedup": statistics.median(a / b for a, b in zip(times["formula"], times[name], strict=True)),
                    "peak_mb": peak_bytes(lambda run=run, function=function: run(function), device) / 1e6,
                    "must_move_mb": must_move / 1e6,
                    "gb_per_s": must_move / elapsed / 1e9,
                    "share_of_copy": must_move / elapsed / bandwidth,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9, help="timed runs of each implementation (default 9)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="also torch.compile (a CPU needs a C++ compiler)")
    parser.add_argument("--json", help="file to write the figures to")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device(args.device)
    bandwidth = copy_bandwidth(device, args.rounds)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rows = []
    problems = [(op, dtype) for op in args.ops for dtype in (["int64"] if op in INTEGER_OPERATIONS else args.dtypes)]
    for op, dtype in tqdm(problems, desc="problems"):
        problem = OPERATIONS[op](getattr(torch, dtype), device)
        for row in measure(problem, device, args.rounds, args.compile, bandwidth):
            rows.append({"op": op, "dtype": dtype, **row})

    print(f"{name}, torch {torch.__version__}; a copy moves {bandwidth / 1e9:.1f} GB/s")
    columns = ["op", "dtype", "pass", "implementation", "ms", "speedup", "peak MB", "must move MB", "GB/s", "of copy"]
    formats = ["{:10}", "{:9}", "{:19}", "{:15}", "{:>9}", "{:>8}", "{:>9}", "{:>13}", "{:>7}", "{:>8}"]
    print(" ".join(form.format(column) for form, column in zip(formats, columns, strict=True)))
    for row in rows:
        cells = [row["op"], row["dtype"], row["pass"], row["implementation"], f"{row['ms']:.3f}"]
        cells += [f"{row['speedup']:.2f}", f"{row['peak_mb']:.1f}", f"{row['must_move_mb']:.1f}"]
        cells += [f"{row['gb_per_s']:.1f}", f"{row['share_of_copy']:.0%}"]
        print(" ".join(form.format(cell) for form, cell in zip(formats, cells, strict=True)))
    if args.json:
        figures = {"device": name, "torch": torch.__version__, "copy_gb_per_s": bandwidth / 1e9, "rows": rows}
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
