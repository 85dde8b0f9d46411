"""Speed of the operations in modeling_engram/ops: time, peak extra memory, and bandwidth against a plain copy's.

Every operation, shape and dtype is measured in one run, its implementations taken in turn: "ours" (what `backend=None`
chooses: Triton kernels on a GPU, eager blocks on a CPU), "formula" (the plain PyTorch that it replaces) and, with
`--compile`, torch.compile of that formula. "must move" counts each input read once and each output written once.
Run: `python benchmarks/ops.py`, `--help` for more. An operation is added as a function in OPERATIONS.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field


# Threads that wait for each other sleep: while they spin, on a machine that is not idle, the others cannot run.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from tqdm import tqdm

from hf_engram.modeling_engram.ops.engram_gate import engram_gate, engram_gate_reference
from hf_engram.modeling_engram.ops.residual_stream import stream_mixes, stream_update
from hf_engram.modeling_engram.ops.stream_mixes import plain_stream_mixes
from hf_engram.modeling_engram.ops.stream_update import plain_stream_collapse, plain_stream_expand


@dataclass
class Problem:
    """One operation on given tensors.

    Args:
        shape: to print.
        implementations: by name, functions of `inputs`; the first is ours, "formula" what it is compared with.
        inputs: leaves; those that require gradients get them.
        forward_bytes, backward_bytes: what must move; without a backward, 0.
    """

    shape: str
    implementations: dict[str, Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]]
    inputs: list[torch.Tensor]
    forward_bytes: int
    backward_bytes: int = 0
    grad_out: torch.Tensor | tuple[torch.Tensor, ...] | None = field(default=None)


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


def update(dtype: torch.dtype, device: torch.device) -> Problem:
    """The stream's single pass: expand after a sublayer, collapse for the next."""
    tokens, copies, dim = (4096, 4, 5120) if device.type == "cuda" else (2048, 4, 1024)
    y = torch.randn(1, tokens, dim, dtype=dtype, device=device)
    x = torch.randn(1, tokens, copies, dim, dtype=dtype, device=device)
    post, pre = torch.rand(1, tokens, copies, device=device), torch.rand(1, tokens, copies, device=device)
    comb = torch.rand(1, tokens, copies, copies, device=device)

    def formula(y, x, post, comb, pre):
        out = plain_stream_expand(y, x, post, comb)
        return out, plain_stream_collapse(out, pre)

    return Problem(
        shape=f"T={tokens} H={copies} D={dim}",
        implementations={"ours": stream_update, "formula": formula},
        inputs=[tensor.requires_grad_() for tensor in (y, x, post, comb, pre)],
        # y, x -> out, h; then y, x, grad_out, grad_h -> grad_y, grad_x.
        forward_bytes=2 * x.nbytes + 2 * y.nbytes,
        backward_bytes=3 * x.nbytes + 3 * y.nbytes,
        grad_out=(torch.randn_like(x), torch.randn_like(y)),
    )


OPERATIONS = {"gate": gate, "mixes": mixes, "update": update}


def seconds(function: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
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
    return (out, *torch.autograd.grad(out, problem.inputs, problem.grad_out))


def measure(problem: Problem, device: torch.device, rounds: int, compiled: bool, bandwidth: float) -> list[dict]:
    """A row for each implementation and pass."""
    implementations = dict(problem.implementations)
    if compiled:
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
    for op, dtype in tqdm([(op, dtype) for op in args.ops for dtype in args.dtypes], desc="problems"):
        problem = OPERATIONS[op](getattr(torch, dtype), device)
        for row in measure(problem, device, args.rounds, args.compile, bandwidth):
            rows.append({"op": op, "dtype": dtype, **row})

    print(f"{name}, torch {torch.__version__}; a copy moves {bandwidth / 1e9:.1f} GB/s")
    columns = ["op", "dtype", "pass", "implementation", "ms", "speedup", "peak MB", "must move MB", "GB/s", "of copy"]
    formats = ["{:6}", "{:9}", "{:19}", "{:15}", "{:>9}", "{:>8}", "{:>9}", "{:>13}", "{:>7}", "{:>8}"]
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
