"""What test_sharded_tables.py runs in each of two processes, between which `fully_shard` divides a model.

python sharded_worker.py RANK FOLDER: reads models and batches from FOLDER, writes FOLDER/<case>-<RANK>.pt
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hf_engram import EngramForCausalLM
from hf_engram.optim import EngramOptimizer, clip_grad_norm_


PROCESSES = 2
TIMEOUT = timedelta(seconds=600)
STEPS = 4
CLIP = 0.5


@dataclass(frozen=True)
class Case:
    """One training run: which modules are divided beside the whole, and with what tables and optimizer."""

    name: str
    memory_alone: bool = True  # the memory is a group of its own, or one with all that is not in layers
    momentum: float = 0.0
    table_dtype: torch.dtype = torch.float64


CASES = [
    Case("memory"),
    Case("root", memory_alone=False),
    Case("momentum", momentum=0.9),
    Case("bf16", table_dtype=torch.bfloat16),
]


def load(case: Case, folder: Path) -> EngramForCausalLM:
    model = EngramForCausalLM.from_pretrained(folder / "model", dtype=torch.float64).train()
    model.engram_memory.tables.to(case.table_dtype)
    return model


def shard(case: Case, model: EngramForCausalLM) -> EngramForCausalLM:
    mesh = init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    if case.memory_alone:
        fully_shard(model.engram_memory, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_optimizer(case: Case, model: EngramForCausalLM) -> EngramOptimizer:
    return EngramOptimizer(model, lr=1e-3, seed=7, table_momentum=case.momentum, table_eps=1e-6)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def take_steps(model, optimizer, batches, rank: int = 0, processes: int = 1) -> list[torch.Tensor]:
    """One step a batch, of which each process has its share; returns the gradients' norms."""
    norms = []
    for batch in batches:
        mine = {name: values[rank::processes] for name, values in batch.items()}
        targets = int((batch["labels"][:, 1:] != -100).sum())
        (model(**mine, num_items_in_batch=targets, use_cache=False).loss * processes).backward()
        norms.append(clip_grad_norm_(model, CLIP))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def result(model, optimizer, norms) -> dict:
    """Weights by name, and the tables' state, whole; and how much of that state is here."""
    tables = dict(model.engram_memory.named_parameters())
    states = {name: optimizer.state[table] for name, table in tables.items()}
    return {
        "norms": norms,
        "weights": {name: whole(parameter) for name, parameter in model.named_parameters()},
        "state": {
            f"{name}.{key}": whole(value) if isinstance(value, torch.Tensor) else torch.tensor(value)
            for name, state in states.items()
            for key, value in state.items()
        },
        "rows_here": [
            len(state["second_moment"].to_local() if isinstance(state["second_moment"], DTensor) else
                state["second_moment"]) for state in states.values()
        ],
    }  # fmt: skip


def refusals(case: Case, folder: Path, batches, rank: int) -> dict[str, bool]:
    """What is refused, by all processes, and with nothing changed."""
    model = shard(case, load(case, folder))
    optimizer = make_optimizer(case, model)
    before = [whole(parameter) for parameter in model.parameters()]
    found = {}

    def refuses(name: str, error: type[Exception], words: str, call) -> None:
        try:
            call()
        except error as raised:
            found[name] = words in str(raised)

    share = {name: values[rank::PROCESSES] for name, values in batches[0].items()}
    model(**share, use_cache=False).loss.backward()
    table = model.engram_memory.tables[0].weight
    # A row of the second process alone.
    if rank == 1:
        table.grad.to_local()[0, 0] = torch.inf
    row = str(len(table) - len(table.to_local())) if rank == 1 else "another process holds"
    refuses("infinity", FloatingPointError, row, optimizer.step)
    model.zero_grad()

    model.engram_memory.tables[0].sparse = True
    refuses("sparse", ValueError, "sparse_grad = False", lambda: EngramOptimizer(model))
    model.engram_memory.tables[0].sparse = False

    def make_sparse() -> None:
        model.engram_memory.sparse_grad = True

    refuses("sparse_grad", ValueError, "sparse_grad = False", make_sparse)
    columns = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 4), table.device_mesh, [Shard(1)]))
    refuses("columns", ValueError, "by rows", lambda: EngramOptimizer([{"params": [columns], "table": True}]))
    # As accelerate does: the optimizer is made first, then its parameters are replaced.
    early = EngramOptimizer([{"params": [torch.nn.Parameter(torch.zeros(6, 4))], "table": True}])
    columns.grad, early.param_groups[0]["params"] = torch.ones_like(columns), [columns]
    refuses("columns later", ValueError, "by rows", early.step)
    found["unchanged"] = all(
        torch.equal(one, whole(other)) for one, other in zip(before, model.parameters(), strict=True)
    ) and not any("second_moment" in state for state in optimizer.state.values())
    # On a table that each process has whole, there is nothing to refuse.
    copies = torch.nn.Parameter(distribute_tensor(torch.zeros(6, 4), table.device_mesh, [Replicate()]))
    EngramOptimizer([{"params": [copies], "table": True}])
    return found


def resumed(case: Case, folder: Path, batches, rank: int, how: str) -> dict:
    """Half of the steps, then the other half with an optimizer that was given the first one's state."""
    model = shard(case, load(case, folder))
    optimizer = make_optimizer(case, model)
    norms = take_steps(model, optimizer, batches[:2], rank, PROCESSES)
    again = make_optimizer(case, model)
    if how == "own":
        path = folder / f"{case.name}-{rank}-state.pt"
        torch.save(optimizer.state_dict(), path)
        again.load_state_dict(torch.load(path, weights_only=False))
    else:
        options = StateDictOptions(full_state_dict=how == "full")
        state = get_optimizer_state_dict(model, optimizer, options=options)
        set_optimizer_state_dict(model, again, state, options=options)
    norms += take_steps(model, again, batches[2:], rank, PROCESSES)
    return result(model, again, norms)


def whole_state(case: Case, folder: Path, batches, rank: int) -> dict:
    """The first half of the steps in one process, the other half in two, with the state of the first."""
    one = load(case, folder)
    optimizer = make_optimizer(case, one)
    norms = take_steps(one, optimizer, batches[:2])
    state = optimizer.state_dict()
    model = shard(case, one)
    again = make_optimizer(case, model)
    numbers = {name: i for i, name in enumerate(n for n, _ in one.named_parameters())}
    assert len(numbers) == sum(len(group["params"]) for group in state["param_groups"])
    tables = {n for group in state["param_groups"] if group["table"] for n in group["params"]}
    # Of the dense part, torch has its own way; here, as it is for the tables.
    state["state"] = {
        n: values if n in tables else {
            key: distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            if value.ndim else value for key, value in values.items()
        }
        for (n, values), parameter in zip(
            sorted(state["state"].items()), [p for g in again.param_groups for p in g["params"]], strict=True
        )
    }  # fmt: skip
    again.load_state_dict(state)
    norms += take_steps(model, again, batches[2:], rank, PROCESSES)
    return result(model, again, norms)


def main() -> None:
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(PROCESSES), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(str(folder / "store"), PROCESSES)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=PROCESSES, timeout=TIMEOUT)
    batches = torch.load(folder / "batches.pt", weights_only=True)
    for case in CASES:
        model = shard(case, load(case, folder))
        optimizer = make_optimizer(case, model)
        norms = take_steps(model, optimizer, batches, rank, PROCESSES)
        torch.save(result(model, optimizer, norms), folder / f"{case.name}-{rank}.pt")
    case = next(case for case in CASES if case.momentum)
    for how in ("own", "sharded", "full"):
        torch.save(resumed(case, folder, batches, rank, how), folder / f"resumed-{how}-{rank}.pt")
    torch.save(whole_state(case, folder, batches, rank), folder / f"resumed-whole-{rank}.pt")
    torch.save(refusals(CASES[0], folder, batches, rank), folder / f"refusals-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
