"""Steps of optimizers, watched for tables that hold an adapter's rows: before one, the base's values of the rows that
it will change are kept, and a step that would put one adapter's gradient into other rows is refused.

`memory` is an `AdapterRows` throughout. torch calls the hooks for every optimizer of the process; they return at once
where it has no such tables.
"""

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


WATCHED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()
HANDLES: list[Any] = []
# By optimizer and the table's id, the adapter that it has stepped.
STEPPED: "weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, str]]" = weakref.WeakKeyDictionary()
# torch's optimizers that take sparse gradients: they change the rows of these, or of those that they add up as state.
SPARSE = (torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD)


def watch_optimizers(memory: nn.Module) -> None:
    """From now on, every optimizer of torch says before a step which rows of the tables it will change."""
    if not HANDLES:
        HANDLES.append(register_optimizer_step_pre_hook(_before_step))
        HANDLES.append(register_optimizer_step_post_hook(_after_step))
    WATCHED.add(memory)


def version_of(table: torch.Tensor) -> int:
    """How often a table was written to; those made in inference mode do not count."""
    return 0 if table.is_inference() else table._version


def _watched_tables(optimizer: torch.optim.Optimizer) -> list[tuple[nn.Module, int, torch.Tensor, bool]]:
    """Of an optimizer's parameters, the tables of which adapters have rows, and whether it steps row by row."""
    tables = {
        id(table.weight): (memory, index)
        for memory in WATCHED
        if memory._adapters
        for index, table in enumerate(memory.tables)
    }
    return [
        (*tables[id(parameter)], parameter, group.get("table") is True)
        for group in (optimizer.param_groups if tables else ())
        for parameter in group["params"]
        if id(parameter) in tables
    ]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    has_closure = any(value is not None for value in (*args[1:], *kwargs.values()))
    watched = _watched_tables(optimizer)
    for memory, _, weight, _ in watched:
        if memory.adapter_in_place is not None:
            memory.writable_tables()
        _check_owner(optimizer, memory, weight, has_closure)
    for memory, index, weight, by_row in watched:
        grad = weight.grad
        if memory.adapter_in_place is None:
            continue
        # A closure makes the gradients only now.
        if has_closure:
            memory.touch(index, None)
        elif grad is not None:
            memory.touch(index, _rows_of_step(optimizer, weight, by_row))


def _check_owner(optimizer: torch.optim.Optimizer, memory: nn.Module, weight: torch.Tensor, closure: bool) -> None:
    """Raises RuntimeError unless a step is that of the adapter whose rows are in the tables."""
    active = memory.adapter_in_place
    if weight.grad is not None and (active is None or memory._grads_of not in (None, active)):
        into = "the base's rows, since none of its adapters with rows is active" if active is None else repr(active)
        raise RuntimeError(
            f"A table has a gradient of the adapter {memory._grads_of or '/'.join(sorted(memory._adapters))!r}, which "
            f"this step would put into {into}: step while the adapter is active, or call `zero_grad()` first."
        )
    known = STEPPED.get(optimizer, {}).get(id(weight))
    if (weight.grad is not None or closure) and active is not None and known not in (None, active):
        raise RuntimeError(
            f"The optimizer's state of a table is that of the adapter {known!r}, not of {active!r}, which is active: "
            "use an optimizer of its own for each adapter with table rows."
        )


def _rows_of_step(optimizer: torch.optim.Optimizer, weight: torch.Tensor, by_row: bool) -> torch.Tensor | None:
    """The rows int64 `[n]` of a table that a step may change; None for all."""
    grad = weight.grad
    if grad.is_sparse and (by_row or isinstance(optimizer, SPARSE)):
        state = optimizer.state.get(weight, {}).values()
        sums = [value for value in state if isinstance(value, torch.Tensor) and value.is_sparse]
        return torch.cat([part._indices()[0] for part in (grad, *sums)])
    # Others than ours move rows without a gradient, too (weight decay).
    return (grad != 0).any(1).nonzero().squeeze(1) if by_row and not grad.is_sparse else None


def _after_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    for memory, index, weight, _ in _watched_tables(optimizer):
        if memory.adapter_in_place is not None:
            memory._versions[index] = version_of(weight)
            if optimizer.state.get(weight):
                STEPPED.setdefault(optimizer, {})[id(weight)] = memory.adapter_in_place
