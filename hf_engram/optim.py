"""An optimizer for Engram models: row-wise updates for the tables, AdamW or any other optimizer for the rest.

A step touches the rows of the batch and no others, so that neither its time nor its traffic depends on how many rows a
table has. It needs gradients that do the same: `model.model.engram_memory.sparse_grad = True`. Dense gradients of
tables give the same bits, at the cost of reading all of them.

    model.model.engram_memory.sparse_grad = True
    optimizer = EngramOptimizer(model, lr=1e-3)
    ...
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()

**The rule for a row** with gradient `g` of d elements at step t, k steps after the last in which its gradient was not
zero (s = 0 at the start):

    s_t   = beta^k * s_(t-k) + mean(g^2)
    theta = theta - rate * g / (sqrt(s_t) + eps),     rate = lr * lr_multiplier / sqrt(1 - beta)

Multiplied by 1 - beta, s is Adam's second moment, one a row (the mean over it); there is no bias correction. For a row
without a gradient a dense step of this rule multiplies s by beta and leaves theta alone; k of them, exactly, are the
beta^k that is applied when the row is next needed. So rows come out as dense steps, with gradients of zero for rows of
no batch, would leave them, whatever the learning rate did meanwhile.

Bias correction would count the steps of the run, and not those of the row. Without it the very first step of a row has
an rms of `rate`, whenever in training it comes and whatever the size of its gradient; no step is ever longer, since
s_t >= mean(g^2); and a row that is of every step comes down to Adam's lr * lr_multiplier, a tenth of `rate` with beta
at 0.99. A rare n-gram is learned in one step, a frequent one does not shake.

Momentum, if any, is the mean of the gradients that the row has had, weighted by momentum^(age in steps), so that it
does not shorten a first step either. It decays while the row is not used, but a row is moved only when it has a
gradient: here the rule differs from dense steps, which would go on moving rows that nobody has read since. Weight
decay of tables, off by default, is late in the same way: the (1 - lr * lr_multiplier * weight_decay)^k of k steps at
today's learning rate is applied when the row next has a gradient.

State: 8 bytes a row (s in fp32, the step in int32); with momentum 2 bytes an element and 4 a row more.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer

from .optim_clipping import clip_grad_norm_, coalesced, teach_torch_sparse_norms
from .optim_kernels import random_key, update_rows
from .table_shards import (
    check_sharded_by_rows,
    first_row,
    holds_everywhere,
    is_sharded,
    local_part,
    moved_beside,
    zeros_beside,
)


if TYPE_CHECKING:
    from transformers import TrainingArguments


# A table by the name of its parameter, whatever wraps the model (DDP, PEFT, torch.compile).
TABLE_NAME = re.compile(
    r"(?:^|\.)engram_memory\.tables\.\d+\.(?:base_layer\.|original_module\.|modules_to_save\.[^.]+\.)?weight$"
)
# Matrices that are weights of norms, and so, as vectors are, not decayed.
NORM_NAME = re.compile(r"(?:^|\.)engram\.[qk]_weight$")
# Where torch has a fused AdamW.
FUSED_DEVICES = ("cpu", "cuda", "xpu")
TABLE_STATE = {"second_moment": torch.float32, "last_step": torch.int32}
MOMENTUM_STATE = {"momentum": torch.bfloat16, "momentum_weight": torch.float32}


def _check_number(name: str, value: float, low: float, high: float = math.inf, low_allowed: bool = True) -> None:
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not (low <= number if low_allowed else low < number) or not number < high:
        bounds = f"{'at least' if low_allowed else 'above'} {low:g} and below {high:g}"
        raise ValueError(f"`{name}` must be {bounds}, got {value!r}.")


def _split_named(named: Iterable[tuple[str, torch.Tensor]], weight_decay: float) -> list[dict[str, Any]]:
    """Groups of the parameters that require gradients: decayed, not decayed, tables."""
    decayed, plain, tables = [], [], []
    for name, parameter in named:
        if not parameter.requires_grad:
            continue
        if TABLE_NAME.search(name):
            tables.append(parameter)
        else:
            (plain if parameter.ndim < 2 or NORM_NAME.search(name) else decayed).append(parameter)
    groups = [
        {"params": decayed, "table": False, "weight_decay": weight_decay},
        {"params": plain, "table": False, "weight_decay": 0.0},
        {"params": tables, "table": True},
    ]
    return [group for group in groups if group["params"]]


def _named_parameters(model: nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """A model's parameters, unless tables are missing among them that are meant to be trained, or cannot be.

    Raises:
        ValueError: float tables are on disk, while the gates that read them are trained; or tables are sharded, and
            meant to get sparse gradients.
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if getattr(module, "sparse", False) and weight is not None and is_sharded(weight):
            raise ValueError(
                f"{name} is sharded over processes, which no sparse gradient can be: call `backward` with "
                "`model.engram_memory.sparse_grad = False`, and the gradients of all rows are added up and sharded."
            )
    on_disk = [
        name
        for name, module in model.named_modules()
        if getattr(module, "placement", None) == "disk" and not getattr(module, "is_quantised", True)
    ]
    if on_disk and any(p.requires_grad and NORM_NAME.search(name) for name, p in model.named_parameters()):
        raise ValueError(
            f"{', '.join(on_disk)} would not be trained: tables on disk are only read (the model was loaded, or its "
            "config saved, with `engram_placement`). Load it with `engram_placement='device'`, or call "
            "`model.engram_memory.to_placement('device')`. To train all else, pass `model.named_parameters()`."
        )
    return model.named_parameters()


class EngramOptimizer(Optimizer):
    """Row-wise steps for the tables of an Engram model, and another optimizer for its other parameters.

    One object with one list of parameter groups: learning rate schedulers, accelerate and the Trainer see an ordinary
    optimizer. The rule for tables is in this module's docstring. Parameters without a gradient are left alone, and
    their clocks stand still.

    Tables that are sharded by rows over processes (FSDP2, `fully_shard`) take the same steps: each process updates,
    and keeps the state of, the rows that it holds. They have dense gradients: leave `engram_memory.sparse_grad` off.
    Give the optimizer the model when it is sharded, and save its state as `torch.distributed.checkpoint` does. Tables
    of bf16 are rounded by other random bits than in one process.

    A gradient of a table that is not finite (or whose norm exceeds fp32) raises FloatingPointError before any
    parameter, of a table or not, is changed; `zero_grad()` and go on to skip such a step. Checking this is one
    synchronisation with the device at each step.

    Args:
        params: a model; its `named_parameters()`; or parameter groups, dicts in which `params` are pairs of name and
            parameter, or parameters alone if the dict says what they are: `{"params": [...], "table": True}`. From a
            model and from names, the parameters that require gradients are taken: not fp8 tables, which are frozen,
            nor tables on disk, which are no parameters. A model with float tables on disk, and gate weights that are
            trained, is refused. Groups may set their own `lr` and other options; those of tables are `lr_multiplier`,
            `beta`, `momentum`, `eps`, `weight_decay` and `seed`.
        lr: learning rate.
        weight_decay: of matrices outside the tables (not of norms' weights and other vectors), for a `dense_cls` that
            knows it. In groups with parameters alone, of all.
        table_lr_multiplier: the tables' learning rate is `lr` times this; 5 is the Engram paper's. It is applied in
            the step: schedulers set the same `lr` for all.
        table_beta: decay of a row's second moment, in one step.
        table_momentum: decay of a row's momentum in one step; 0 for none.
        table_eps: added to the root of a row's second moment, which is as small as gradients are: about 1e-6.
        table_weight_decay: decoupled weight decay of rows.
        seed: of the stochastic rounding of tables of bf16.
        dense_cls: optimizer for all other parameters, a class or a function: called as
            `dense_cls(groups, lr=lr, **dense_options)`. None for `torch.optim.AdamW`, fused where torch has that.
        dense_options: for that optimizer, such as AdamW's `betas` and `eps`.
    """

    _built = False

    def __init__(
        self,
        params: nn.Module | Iterable[tuple[str, torch.Tensor]] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.01,
        table_lr_multiplier: float = 5.0,
        table_beta: float = 0.99,
        table_momentum: float = 0.0,
        table_eps: float = 1e-15,
        table_weight_decay: float = 0.0,
        seed: int = 0,
        dense_cls: Callable[..., Optimizer] | None = None,
        **dense_options: Any,
    ) -> None:
        _check_number("lr", lr, 0)
        _check_number("weight_decay", weight_decay, 0)
        self._weight_decay = weight_decay
        self._table_defaults = {
            "lr": lr,
            "lr_multiplier": table_lr_multiplier,
            "beta": table_beta,
            "momentum": table_momentum,
            "eps": table_eps,
            "weight_decay": table_weight_decay,
            "seed": seed,
        }
        self._check_table_group(self._table_defaults, prefix="table_")
        groups = self._groups(params)
        dense_groups = [group for group in groups if not group["table"]]
        self._dense_cls = dense_cls or torch.optim.AdamW
        self._dense_options = {"lr": lr, **dense_options}
        if dense_cls is None:
            self._dense_options.setdefault("weight_decay", weight_decay)
        # The optimizer of what are not tables, or None if there is nothing else. It works on our groups and state.
        self.dense = self._make_dense(dense_groups) if dense_groups else None
        if self.dense is not None:
            dense_groups = self.dense.param_groups
        tables = [group for group in groups if group["table"]]
        super().__init__([*dense_groups, *tables], {"lr": lr, "table": False})
        if self.dense is not None:
            self.state.update(self.dense.state)
        self._built = True
        self._link()
        teach_torch_sparse_norms()

    def _make_dense(self, groups: list[dict[str, Any]]) -> Optimizer:
        options = dict(self._dense_options)
        if self._dense_cls is torch.optim.AdamW and not {"fused", "foreach"} & options.keys():
            parameters = [parameter for group in groups for parameter in group["params"]]
            options["fused"] = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
        dense = self._dense_cls(groups, **options)
        if not isinstance(dense, Optimizer):
            raise TypeError(f"`dense_cls` must give a torch.optim.Optimizer, got {type(dense).__name__}.")
        return dense

    def _link(self) -> None:
        """Has the other optimizer work on our groups and state, whoever replaced them."""
        if self.dense is not None:
            self.dense.state = self.state
            self.dense.param_groups = [group for group in self.param_groups if not group["table"]]

    def _groups(self, params: Any) -> list[dict[str, Any]]:
        """Groups of nothing but tables, or of none."""
        if isinstance(params, nn.Module):
            params = _named_parameters(params)
        if isinstance(params, (torch.Tensor, dict)):
            raise TypeError(
                f"`params` must be a model, names and parameters, or groups, got a {type(params).__name__}."
            )
        params = list(params)
        if params and all(isinstance(entry, dict) for entry in params):
            groups = [part for group in params for part in self._split_group(group)]
        else:
            groups = self._split_group({"params": params})
        if not groups:
            raise ValueError("`params` holds no parameter that requires a gradient.")
        return groups

    def _split_group(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        """One group as given -> groups of one kind, complete if they are tables'."""
        options = {key: value for key, value in group.items() if key not in ("params", "table")}
        if "lr" in options:
            _check_number("lr", options["lr"], 0)
        params = group["params"]
        if isinstance(params, nn.Module):
            params = _named_parameters(params)
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        named = [entry for entry in params if isinstance(entry, tuple)]
        if "table" in group:
            plain = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
            parts = [{"params": plain, "table": bool(group["table"]), **options}] if plain else []
        elif len(named) == len(params):
            # In a group that mixes both, a weight decay is not meant for tables.
            parts = _split_named(named, options.pop("weight_decay", self._weight_decay))
            of_both = {"lr": options["lr"]} if "lr" in options else {}
            parts = [{**(of_both if part["table"] else options), **part} for part in parts]
        else:
            raise ValueError(
                "`params` holds parameters without names, and nothing says which are tables: pass the model, "
                "`model.named_parameters()`, or groups with `table` set to True or False."
            )
        for part in parts:
            if part["table"]:
                unknown = part.keys() - self._table_defaults.keys() - {"params", "table", "initial_lr"}
                if unknown:
                    raise ValueError(f"A group of tables has no options {sorted(unknown)}.")
                for key, value in self._table_defaults.items():
                    part.setdefault(key, value)
                self._check_table_group(part)
        return parts

    @staticmethod
    def _check_table_group(group: dict[str, Any], prefix: str = "") -> None:
        _check_number("lr", group["lr"], 0)
        _check_number(f"{prefix}lr_multiplier", group["lr_multiplier"], 0)
        _check_number(f"{prefix}beta", group["beta"], 0, 1, low_allowed=False)
        _check_number(f"{prefix}momentum", group["momentum"], 0, 1)
        _check_number(f"{prefix}eps", group["eps"], 0)
        _check_number(f"{prefix}weight_decay", group["weight_decay"], 0)
        if not isinstance(group["seed"], int):
            raise TypeError(f"`seed` must be an int, got {group['seed']!r}.")
        for table in group.get("params", ()):
            if table.ndim != 2 or not table.is_floating_point() or table.element_size() < 2:
                raise ValueError(
                    f"A table must be [rows, d] of fp32, bf16, fp16 or fp64, got {list(table.shape)} of {table.dtype}."
                    " Quantised tables are frozen: leave them out."
                )
            check_sharded_by_rows(table)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; `param_group` as in `params` of the constructor. A group of both kinds becomes several."""
        if not self._built:
            return super().add_param_group(param_group)
        for group in self._groups([param_group]):
            if not group["table"] and self.dense is None:
                self.dense = self._make_dense([group])
                group = self.dense.param_groups[0]
            elif not group["table"]:
                self.dense.add_param_group(group)
            super().add_param_group(group)
        self._link()

    @torch.no_grad()
    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """One step of all parameters that have a gradient.

        Args:
            closure: computes the loss again, and its gradients.

        Returns:
            The closure's loss, or None without it.

        Raises:
            FloatingPointError: the gradient of a table is not finite; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updates, number = [], 0
        for group in self.param_groups:
            for table in group["params"] if group["table"] else ():
                if table.grad is not None:
                    check_sharded_by_rows(table)  # accelerate shards what the groups hold
                    updates.append((group, table, number, *_rows_of(local_part(table.grad))))
                number += 1
        self._check_finite(updates)
        if self.dense is not None:
            self._link()
            self.dense.step()
        for group, table, number, rows, grads in updates:
            self._step_table(group, table, number, rows, grads)
        return loss

    @staticmethod
    def _check_finite(updates: list[tuple]) -> None:
        norms = []
        for *_, grads in updates:
            dtype = torch.promote_types(grads.dtype, torch.float32)
            norms.append(torch.linalg.vector_norm(grads, dtype=dtype))
        finite = not norms or bool(torch.stack([norm.to(norms[0]) for norm in norms]).isfinite().all())
        if holds_everywhere(finite, (table for _, table, *_ in updates)):
            return
        remedy = (
            "No parameter was changed. To skip this step call `zero_grad()` and go on; to prevent it, lower `lr`, or "
            "clip gradients."
        )
        if finite:
            raise FloatingPointError(
                f"The gradient of a table, of rows that another process holds, is not finite. {remedy}"
            )
        wrong = next(index for index, norm in enumerate(norms) if not norm.isfinite())
        _, table, number, rows, grads = updates[wrong]
        bad = rows[~grads.float().square().sum(1).isfinite()] + first_row(table)
        raise FloatingPointError(
            f"The gradient of table {number} ({list(table.shape)}) is not finite, or its norm exceeds fp32: rows "
            f"{bad[:5].tolist()}{' and others' if len(bad) > 5 else ''}. {remedy}"
        )

    def _step_table(
        self, group: dict[str, Any], table: torch.Tensor, number: int, rows: torch.Tensor, grads: torch.Tensor
    ) -> None:
        state = self.state[table]
        if not state:
            state["step"] = 0
        used = {**TABLE_STATE, **(MOMENTUM_STATE if group["momentum"] else {})}
        for name, dtype in used.items():
            if name not in state:
                shape = table.shape if name == "momentum" else table.shape[:1]
                state[name] = zeros_beside(table, shape, dtype)
        state["step"] += 1
        lr, beta = float(group["lr"]) * group["lr_multiplier"], group["beta"]
        update_rows(
            local_part(table),
            rows,
            grads,
            {name: local_part(state[name]) for name in used},
            step=state["step"],
            rate=lr / math.sqrt(1 - beta),
            beta=beta,
            momentum=group["momentum"],
            eps=group["eps"],
            decay=1 - lr * group["weight_decay"],
            # Parts of a table differ in their random bits.
            key=random_key(group["seed"], number + (first_row(table) << 16), state["step"]),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's; the tables' state keeps its own dtypes, whatever the tables' is."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        ours = [group["table"] for group in self.param_groups]
        theirs = [group.get("table", False) for group in state_dict["param_groups"]]
        if ours != theirs:
            raise ValueError(
                f"`state_dict` does not fit: its groups are tables' (True) or not as in {theirs}, this optimizer's as "
                f"in {ours}. It was saved by another optimizer, or one of other parameters."
            )
        tables = {id(table) for group in self.param_groups if group["table"] for table in group["params"]}
        saved = {}
        for number, parameter in zip(numbers, parameters, strict=False):
            if id(parameter) in tables and number in state_dict["state"]:
                saved[parameter] = self._load_table(parameter, state_dict["state"][number])
        # torch would cast these to the dtype of their parameter.
        table_numbers = {n for group in state_dict["param_groups"] if group["table"] for n in group["params"]}
        rest = {number: state for number, state in state_dict["state"].items() if number not in table_numbers}
        super().load_state_dict({**state_dict, "state": rest})
        self.state.update(saved)

    @staticmethod
    def _load_table(table: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        state = {"step": int(saved["step"])}
        for name, dtype in {**TABLE_STATE, **(MOMENTUM_STATE if "momentum" in saved else {})}.items():
            shape = table.shape if name == "momentum" else table.shape[:1]
            if saved[name].shape != shape:
                raise ValueError(
                    f"`state_dict` holds `{name}` of {list(saved[name].shape)} for a table of {list(table.shape)}, "
                    f"which needs {list(shape)}: it belongs to a model of other tables."
                )
            state[name] = moved_beside(saved[name], table, dtype)
        return state

    def __getstate__(self) -> dict[str, Any]:
        ours = ("dense", "_weight_decay", "_table_defaults", "_dense_cls", "_dense_options", "_built")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in ours}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._link()
        if self.dense is not None:
            # Completes groups that an older release of torch has saved.
            self.dense.__setstate__({"state": self.state, "param_groups": self.dense.param_groups})


def _rows_of(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a table's gradient: the rows int64 [n] that have one, and theirs [n, d]."""
    if grad.is_sparse:
        grad = coalesced(grad)
        return grad.indices()[0], grad.values()
    rows = (grad != 0).any(1).nonzero().squeeze(1)
    return rows, grad.index_select(0, rows)


def _trainer_factory() -> type[EngramOptimizer]:
    return EngramOptimizer


def trainer_optimizer(args: TrainingArguments, **options: Any) -> tuple[Callable[[], type[EngramOptimizer]], dict]:
    """What the Trainer's `optimizer_cls_and_kwargs` takes, with the learning rate, weight decay and AdamW's settings
    of its arguments:

        Trainer(model, args, ..., optimizer_cls_and_kwargs=trainer_optimizer(args))

    The Trainer calls a class with parameters that have no names, but what is not a class with its model.

    Args:
        args: the Trainer's.
        options: others of [`EngramOptimizer`], or in place of those from `args`.
    """
    settings = {"lr": args.learning_rate, "weight_decay": args.weight_decay}
    if options.get("dense_cls") is None:
        settings |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    return _trainer_factory, {**settings, **options}


__all__ = ["EngramOptimizer", "clip_grad_norm_", "trainer_optimizer"]
