"""What test_data_parallel.py trains, in its own process and, run as a script, in each of two that exchange gradients.

python data_parallel_worker.py RANK FOLDER: reads cases and models from FOLDER, writes FOLDER/<case>-<RANK>.pt
"""

import gc
import os
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_engram import EngramForCausalLM
from hf_engram.optim import EngramOptimizer, clip_grad_norm_


PROCESSES = 2
# Nobody waits longer than this for the other process.
TIMEOUT = timedelta(seconds=600)
STEPS, DEAD_STEP = 4, 2
CLIP = 0.5


@dataclass(frozen=True)
class Case:
    """One training run: how gradients are exchanged, in how many parts a step's batch comes, and with what model."""

    name: str
    hc_mult: int = 4
    dtype: torch.dtype = torch.float64
    table_dtype: torch.dtype = torch.float64
    sparse: bool = True
    parts: int = 1
    accelerate: bool = False


CASES = [
    Case("plain"),
    Case("plain-hc1", hc_mult=1),
    Case("no_sync", parts=2),
    Case("dense", sparse=False),
    Case("fp32", dtype=torch.float32, table_dtype=torch.float32),
    Case("bf16-tables", dtype=torch.float32, table_dtype=torch.bfloat16),
    Case("bf16-tables-hc1", hc_mult=1, dtype=torch.float32, table_dtype=torch.bfloat16),
    Case("accelerate-hc1", accelerate=True, hc_mult=1),
    Case("accumulate", accelerate=True, parts=2),
]


def make(case: Case, folder: Path) -> tuple[EngramForCausalLM, EngramOptimizer]:
    model = EngramForCausalLM.from_pretrained(folder / f"model-{case.hc_mult}", dtype=case.dtype).train()
    memory = model.model.engram_memory
    memory.tables.to(case.table_dtype)
    memory.sparse_grad = case.sparse
    # Where rounding is all that a gradient is, steps of a fixed length would make it large: with these, a step differs
    # by no more than its gradient does, lr / eps = 1. (In a model of fp64, too, norms, the softmax and the stream's
    # parameters are fp32.)
    return model, EngramOptimizer(model, lr=1e-3, seed=7, eps=1e-3, table_eps=5e-2)


def tables(model: torch.nn.Module) -> list[torch.Tensor]:
    return [table.weight for table in getattr(model, "module", model).model.engram_memory.tables]


def train(case: Case, model, optimizer, batches: list[dict[str, torch.Tensor]], rank=0, processes=1, accelerator=None):
    """Steps on the rank's share of every batch, `[B / processes, L]`, and what they left.

    The loss is the sum over a part's tokens, divided by the number of all of the step's.

    Returns:
        dict: `norms`, one a step; `rows`, for each step those of every table's gradient; `layouts` of these gradients;
        `weights` by name, and `state`, the optimizer's by parameter.
    """
    norms, rows, layouts = [], [], []

    def take_step() -> None:
        grads = [table.grad for table in tables(model)]
        layouts.append({str(grad.layout) for grad in grads})
        rows.append(
            [grad.coalesce().indices()[0] if grad.is_sparse else grad.any(1).nonzero()[:, 0] for grad in grads]
        )
        norms.append(clip_grad_norm_(model, CLIP))
        optimizer.step()
        optimizer.zero_grad()

    for batch in batches:
        targets = int((batch["labels"][:, 1:] != -100).sum())
        mine = {name: values[rank::processes].chunk(case.parts) for name, values in batch.items()}
        for part in range(case.parts):
            inputs = {name: chunks[part] for name, chunks in mine.items()}
            last = part == case.parts - 1
            if accelerator is not None:
                with accelerator.accumulate(model):
                    loss = model(**inputs, num_items_in_batch=targets, use_cache=False).loss
                    # accelerate divides by the number of parts, and DDP by that of processes.
                    accelerator.backward(loss * processes * case.parts)
                    assert accelerator.sync_gradients == last
                    if last:
                        take_step()
                continue
            with nullcontext() if last or processes == 1 else model.no_sync():
                (model(**inputs, num_items_in_batch=targets, use_cache=False).loss * processes).backward()
            if last:
                take_step()
    weights = {name.removeprefix("module."): value.detach().clone() for name, value in model.named_parameters()}
    state = optimizer.state_dict()["state"]
    return {"norms": norms, "rows": rows, "layouts": layouts, "weights": weights, "state": state}


def refuses_infinity(model, optimizer, batch: dict[str, torch.Tensor], rank: int) -> bool:
    """Whether a gradient that is not finite, in the first process alone, is refused, and nothing changed."""
    before = [parameter.detach().clone() for parameter in model.parameters()]
    loss = model(**{name: values[rank::PROCESSES] for name, values in batch.items()}, use_cache=False).loss
    (loss * (torch.inf if rank == 0 else 1.0)).backward()
    try:
        optimizer.step()
    except FloatingPointError:
        return all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    return False


def run(case: Case, folder: Path, rank: int) -> dict:
    model, optimizer = make(case, folder)
    batches = torch.load(folder / "batches.pt", weights_only=True)
    if case.accelerate:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.parts)
        assert (accelerator.num_processes, accelerator.process_index) == (PROCESSES, rank)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(model, DistributedDataParallel)
        return train(case, model, optimizer, batches, rank, PROCESSES, accelerator)
    model = DistributedDataParallel(model)
    result = train(case, model, optimizer, batches, rank, PROCESSES)
    return {**result, "refuses_infinity": refuses_infinity(model, optimizer, batches[0], rank)}


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
    os.environ |= {name: str(number) for name, number in numbers.items()}  # as accelerate reads them
    # They find each other by a file: no port is taken.
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=TIMEOUT)
    for case in CASES:
        torch.save(run(case, folder, rank), folder / f"{case.name}-{rank}.pt")
    # A DDP model that is the last to let go of the process group waits, with the GIL, for a thread that needs the GIL.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
