"""Rows of the tables that adapters train, as PEFT switches, saves and loads the rest of an adapter.

An adapter's rows are in the tables while it is active, trained in place like any parameter; of the rows that may have
changed, the base's values are kept aside in host memory. When the adapter is switched off, they change places. So
there is never a second table, and the base's rows come back to the bit.

PEFT knows what it should treat so by its class, `ModulesToSaveWrapper`: the memory is one where PEFT is installed, and
`modules_to_save=["engram_memory"]` in an adapter's config says that it has rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .table_delta import ABOUT_KEY, BITS, TableDelta, bits, float_tables, memory_keys, reader_weights
from .watched_steps import version_of, watch_optimizers


try:
    from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
    from peft.utils import constants as peft_constants

    PeftWrapper = ModulesToSaveWrapper if issubclass(ModulesToSaveWrapper, AuxiliaryTrainingWrapper) else nn.Module
except ImportError:
    PeftWrapper, peft_constants = nn.Module, None


LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "wkv"]
# Parts of the keys in an adapter's file, which PEFT would take for an adapter's name.
RESERVED_NAMES = {"engram_memory", "tables", "rows", "weight", ABOUT_KEY}

# So that PEFT finds targets by itself: ours for LoRA and what shares its list, Llama's for the others.
if peft_constants is not None:
    for _name, _targets in vars(peft_constants).items():
        if _name.startswith("TRANSFORMERS_MODELS_TO_") and isinstance(_targets, dict) and "llama" in _targets:
            _ours = LORA_TARGETS if "_LORA_" in _name else _targets["llama"]
            _targets.setdefault("engram", _ours)


class TouchedRows:
    """Of one table, the rows that may have changed, with what they were before; in host memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        # Written to later, which a tensor that was made in inference mode cannot be.
        with torch.inference_mode(False):
            self.mask = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
        self.parts = [(torch.empty(0, dtype=torch.int64), weight.detach()[:0].cpu())]

    @torch.no_grad()
    def add(self, weight: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Keeps the rows as they are now, those that are new; None for all rows."""
        with torch.inference_mode(False):
            self.mask = self.mask.to(weight.device)
        if rows is None:
            new = (~self.mask).nonzero().squeeze(1)
        else:
            rows = rows.to(weight.device)
            new = rows[~self.mask[rows]].unique()
        if len(new):
            self.mask[new] = True
            self.parts.append((new.cpu(), weight[new].cpu()))

    def sorted(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row ids int64 `[n]`, ascending, and values `[n, dim]`."""
        if len(self.parts) > 1:
            rows, values = (torch.cat(part) for part in zip(*self.parts, strict=True))
            order = rows.argsort()
            self.parts = [(rows[order], values[order])]
        return self.parts[0]

    def cast(self, dtype: torch.dtype) -> None:
        self.parts = [(rows, values.to(dtype)) for rows, values in self.parts]


class NamesOfAdapters(dict):
    """In the place of modules by adapter, which PEFT looks into when it makes another adapter of them."""

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            raise ValueError(
                f"The adapter {name!r} has table rows, which cannot be combined with others (`add_weighted_adapter`): "
                "combine adapters that were trained without (`unfreeze_tables`)."
            )
        return False

    def named_parameters(self) -> Any:
        raise ValueError(
            f"The adapters {', '.join(self)} have table rows, which cannot be converted to LoRA: convert one that was "
            "trained without (`unfreeze_tables`)."
        )


class AdapterRows(PeftWrapper):
    """Base class of the memory: what PEFT asks of it.

    Attributes:
        adapter_in_place (`str`, *optional*): the adapter whose rows are in the tables.
        readers (`tuple`): the Engram layers, by whose weights a base is known.
    """

    adapter_layer_names = ()
    other_param_names = ()
    # For tuners that ask whatever they unload.
    weight = None

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.readers: tuple[nn.Module, ...] = ()
        self.adapter_in_place: str | None = None
        self._adapters: set[str] = set()
        # Rows and values of each table, of adapters that are not in place.
        self._parked: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._touched: list[TouchedRows] = []
        # Versions of the tables after the last write that was noticed; None where the next one is to be taken as such.
        self._versions: list[int | None] = []
        # Of the readers' weights, samples from before PEFT merged anything into them, or out of them again.
        self.base_readers: list[torch.Tensor] | None = None
        # The adapter that was in place when the tables got their gradients, if it was taken out since.
        self._grads_of: str | None = None
        # What PEFT has set, whether these adapters have rows or not.
        self._set_adapters: list[str] = []
        self._disable_adapters = False
        self._trains = True
        # The adapter that PEFT loads next.
        self._loading: str | None = None

    # Not PEFT's, which looks for the attributes of a wrapped module.
    __getattr__ = nn.Module.__getattr__

    # What PEFT reads.

    @property
    def modules_to_save(self) -> NamesOfAdapters:
        return NamesOfAdapters.fromkeys(sorted(self._adapters))

    @property
    def active_adapter(self) -> list[str]:
        return self._set_adapters

    @property
    def active_adapters(self) -> list[str]:
        return self._set_adapters

    def _get_available_adapters(self) -> set[str]:
        return set(self._adapters)

    # Switching.

    def writable_tables(self) -> list[nn.Parameter]:
        """The tables, of which rows are kept and put in.

        Raises:
            ValueError: that cannot be done to them, see also `float_tables`.
        """
        tables = float_tables(self)
        if any(hasattr(table, "device_mesh") for table in tables):
            raise ValueError(
                "The tables are sharded over processes (FSDP2), where an adapter's rows cannot be told from the "
                "base's: train adapters with rows on whole tables (DDP), or leave the tables frozen."
            )
        if any(table.is_meta for table in tables):
            raise ValueError(
                "The tables are offloaded, or not loaded yet, so that an adapter's rows have no place: keep "
                "`engram_memory` in memory (`device_map`, or `engram_placement='cpu'`)."
            )
        return tables

    def _with_rows(self, names: str | Sequence[str]) -> list[str]:
        """Of these adapters, the one with rows, if any.

        Raises:
            ValueError: there are several.
        """
        names = [names] if isinstance(names, str) else list(names)
        found = [name for name in names if name in self._adapters]
        if len(found) > 1:
            raise ValueError(
                f"Of the adapters {found} each has table rows of its own, and a table has room for one's: activate "
                "one of them at a time, or train the others without `unfreeze_tables`."
            )
        return found

    def update(self, adapter_name: str, **kwargs: Any) -> None:
        """From now on the adapter has rows; those of the base, to begin with.

        Raises:
            ValueError: the tables cannot be trained, or the adapter's name could not be told from parts of keys.
        """
        if adapter_name in self._adapters:
            return
        if adapter_name.isdigit() or adapter_name in RESERVED_NAMES:
            raise ValueError(
                f"An adapter with table rows cannot be called {adapter_name!r}, which PEFT would cut out of the rows' "
                "own names: choose another name."
            )
        tables = self.writable_tables()
        self._know_readers()
        self._adapters.add(adapter_name)
        try:
            self._with_rows(self._set_adapters)
        except ValueError:
            self._adapters.discard(adapter_name)
            raise
        empty = torch.empty(0, dtype=torch.int64)
        self._parked[adapter_name] = [(empty, table.detach()[:0].cpu()) for table in tables]
        watch_optimizers(self)
        self._sync()

    def _know_readers(self) -> None:
        """At PEFT's first call, which is when the first adapter is made."""
        if self.base_readers is None:
            readers = reader_weights(self)
            self.base_readers = None if readers is None else [sample.clone() for sample in readers]

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        self._know_readers()
        found = self._with_rows(adapter_name)
        self._set_adapters = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        return found[0] if found else None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        self._with_rows(names)
        # PEFT sets none where `check_set_adapter` has found none with rows.
        if names or self._with_rows(self._set_adapters):
            self._set_adapters = names
        self._trains = not inference_mode
        self._sync()

    def enable_adapters(self, enabled: bool) -> None:
        if not enabled and self.adapter_in_place is not None:
            self._trains = any(table.requires_grad for table in self.writable_tables())
        self._disable_adapters = not enabled
        self._sync()

    def set_requires_grad(self, adapter_names: str | Sequence[str], requires_grad: bool = True) -> None:
        if self.adapter_in_place in ([adapter_names] if isinstance(adapter_names, str) else adapter_names):
            self._trains = requires_grad
            self._sync()

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        remaining = [name for name in new_active_adapters or [] if name != adapter_name]
        self._with_rows(remaining)
        if self.adapter_in_place == adapter_name:
            self._take_out(discard=True)
        self._adapters.discard(adapter_name)
        self._parked.pop(adapter_name, None)
        self._set_adapters = remaining
        self._sync()

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> "AdapterRows":
        """The memory itself, with the base's rows or, merged, the adapter's; from now on they are its own."""
        if merge and (merged := self._with_rows(adapter_names or self._set_adapters)):
            self._put_in(merged[0])
            if safe_merge and not all(table.isfinite().all() for table in self.writable_tables()):
                raise ValueError(f"The table rows of the adapter {merged[0]!r} hold infinite numbers or NaN.")
            self.adapter_in_place, self._touched, self._versions = None, [], []
        else:
            self._take_out(discard=True)
        had_rows = bool(self._adapters)
        self._adapters, self._parked, self._set_adapters = set(), {}, []
        self._disable_adapters, self._trains = False, True
        self.base_readers = self._grads_of = None
        if had_rows:
            self.requires_grad_(False)
        return self

    def _sync(self) -> None:
        """Has the tables hold what is to be active, and be trained if that is."""
        wanted = [] if self._disable_adapters else self._with_rows(self._set_adapters)
        if wanted:
            self._put_in(wanted[0])
        else:
            self._take_out()
        for table in self.tables:
            # Not that of a copy, where PEFT has wrapped a table.
            weight = table._parameters.get("weight")
            if weight is not None and weight.dtype in BITS:
                weight.requires_grad_(bool(wanted) and self._trains)

    @torch.no_grad()
    def _put_in(self, name: str) -> None:
        if self.adapter_in_place == name:
            return
        tables = self.writable_tables()
        self._take_out()
        self._touched = [TouchedRows(table) for table in tables]
        for table, touched, (rows, values) in zip(tables, self._touched, self._parked[name], strict=True):
            touched.add(table, rows)
            table[rows.to(table.device)] = values.to(table.device, table.dtype)
        self.adapter_in_place = name
        # In a group of processes, what wraps the model (DDP) writes the first one's values over tables that are equal.
        grouped = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._versions = [None if grouped else version_of(table) for table in tables]

    @torch.no_grad()
    def _take_out(self, discard: bool = False) -> None:
        """The base's rows go back into the tables; the adapter's are kept, unless they are to be discarded."""
        name = self.adapter_in_place
        if name is None:
            return
        self._check_versions()
        if not discard:
            self._parked[name] = [tuple(part[:2]) for part in self._changed()]
        tables = self.writable_tables()
        if self._grads_of is None and any(table.grad is not None for table in tables):
            self._grads_of = name
        for table, touched in zip(tables, self._touched, strict=True):
            rows, values = touched.sorted()
            table[rows.to(table.device)] = values.to(table.device, table.dtype)
        self.adapter_in_place, self._touched, self._versions = None, [], []

    def _changed(self, weights: Sequence[torch.Tensor] | None = None) -> list[tuple[torch.Tensor, ...]]:
        """For each table the rows in which it (or the weight given) differs from the base: ids, values, the base's."""
        self._check_versions()
        found = []
        for weight, touched in zip(weights or self.writable_tables(), self._touched, strict=True):
            rows, before = touched.sorted()
            values = weight.detach()[rows.to(weight.device)].cpu()
            before = before.to(values.dtype)
            differ = (bits(values) != bits(before)).any(1)
            found.append((rows[differ], values[differ], before[differ]))
        return found

    # Which rows have changed.

    def touch(self, index: int, rows: torch.Tensor | None) -> None:
        """To be called before rows of a table are written to, other than by an optimizer of torch: keeps the base's.

        Args:
            index: the table's.
            rows: int64 `[n]`; None for all.
        """
        if self.adapter_in_place is not None:
            self._touched[index].add(self.writable_tables()[index], rows)
            self._versions[index] = None

    def base_rows(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """The base's values `[n, dim]` of rows, whichever adapter is in place; on the CPU."""
        weight = self.writable_tables()[index]
        values = weight.detach()[rows.to(weight.device)].cpu()
        if self.adapter_in_place is not None and len(rows):
            known, before = self._touched[index].sorted()
            at = torch.searchsorted(known, rows).clamp(max=max(0, len(known) - 1))
            is_known = known[at] == rows if len(known) else torch.zeros(len(rows), dtype=torch.bool)
            values[is_known] = before[at[is_known]].to(values.dtype)
        return values

    def _watch(self) -> None:
        """At every forward with an adapter's rows.

        Raises:
            RuntimeError: the tables have gradients of another adapter.
        """
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        tables = self.writable_tables()
        if self._grads_of is not None:
            grads = [table.grad for table in tables if table.grad is not None]
            if self._grads_of != self.adapter_in_place and any(bool((_values_of(grad) != 0).any()) for grad in grads):
                raise RuntimeError(
                    f"The tables have gradients of the adapter {self._grads_of!r}, to which those of "
                    f"{self.adapter_in_place!r} would be added: call the optimizer's `step` or `zero_grad` before "
                    "another adapter with table rows is trained."
                )
            self._grads_of = None
        for index, table in enumerate(tables):
            if self._versions[index] is None:
                self._versions[index] = version_of(table)

    def _check_versions(self) -> None:
        for index, (unnoticed, touched) in enumerate(zip(self._unnoticed(), self._touched, strict=True)):
            # Of a table whose rows are all kept, nothing is lost.
            if unnoticed and not touched.mask.all():
                raise RuntimeError(
                    f"Table {index} was written to since the last step of an optimizer, by something that did not "
                    "say which rows, so that the adapter's rows are not known: call `engram_memory.touch(index, "
                    "rows)` before such a write (`rows=None` for all)."
                )

    def _unnoticed(self) -> list[int | None]:
        """Writes to each table that were not noticed; None where they do not count."""
        return [
            None if version is None else version_of(table.weight) - version
            for table, version in zip(self.tables, self._versions, strict=False)
        ]

    def _set_unnoticed(self, counts: list[int | None]) -> None:
        """For tables that count their writes anew."""
        self._versions = [
            None if count is None else version_of(table.weight) - count
            for table, count in zip(self.tables, counts, strict=False)
        ]

    def _apply(self, fn: Any, recurse: bool = True) -> "AdapterRows":
        unnoticed = self._unnoticed()
        super()._apply(fn, recurse)
        for index, table in enumerate(self.tables if self._adapters else ()):
            dtype = table.weight.dtype
            for touched in self._touched[index : index + 1]:
                touched.cast(dtype)
            for parts in self._parked.values():
                parts[index] = (parts[index][0], parts[index][1].to(dtype))
        self._set_unnoticed(unnoticed)
        return self

    # Copies, by `copy` and `pickle`.

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_versions": self._unnoticed()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_unnoticed(self._versions)
        if self._adapters:
            watch_optimizers(self)

    # In files.

    def delta(self, adapter_name: str, weights: Sequence[torch.Tensor] | None = None) -> TableDelta:
        """The rows in which an adapter differs from the base; `weights`: the tables as they were with it, if not now.

        Raises:
            RuntimeError: a table was written to by something else than an optimizer.
        """
        if self.adapter_in_place == adapter_name:
            rows, values, base = zip(*self._changed(weights), strict=True)
        else:
            rows, values = zip(*self._parked[adapter_name], strict=True)
            base = [self.base_rows(index, ids) for index, ids in enumerate(rows)]
        return TableDelta.of(self.config, list(rows), list(values), list(base), reader_weights(self))

    @torch.no_grad()
    def load_rows(self, adapter_name: str, delta: TableDelta) -> None:
        """Gives an adapter its rows.

        Raises:
            ValueError: they are of another base. Nothing was changed.
        """
        delta.check(self)
        delta.check_base_rows([self.base_rows(index, rows) for index, rows in enumerate(delta.rows)])
        self.update(adapter_name)
        if self.adapter_in_place == adapter_name:
            self._take_out(discard=True)
        tables = self.writable_tables()
        self._parked[adapter_name] = [
            (rows, values.to(table.dtype))
            for table, rows, values in zip(tables, delta.rows, delta.values, strict=True)
        ]
        self._sync()

    def load_adapter_file(self, tensors: dict[str, torch.Tensor], path: str) -> None:
        """Takes the rows out of the tensors of a file, by their names inside of the memory, for the adapter that PEFT
        has named last.

        Raises:
            ValueError: there are none, but the adapter has rows; or they are damaged, or of another base.
        """
        name, self._loading = self._loading, None
        if tensors and name is not None:
            self.load_rows(name, TableDelta.from_adapter(tensors, path))
        elif tensors:
            raise ValueError(
                f"{path} holds table rows, but PEFT has not said for which adapter: it was installed after the "
                "model's code was loaded (restart Python), or is older than 0.19 (update it)."
            )
        elif name in self._adapters:
            raise ValueError(
                f"{path} holds no table rows, but the adapter {name!r} has some (`unfreeze_tables`, or "
                "`modules_to_save=['engram_memory']`): it was saved by an older version, or is another adapter. Load "
                "it into an adapter without them, and its table delta, if it has one, with `load_table_delta`."
            )

    def adapter_state_dict(self, adapter_name: str, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if adapter_name not in self._adapters:
            weights = [table._parameters.get("weight") for table in self.tables]
            if self.adapter_in_place is None and any(
                weight is not None and weight.requires_grad for weight in weights
            ):
                raise ValueError(
                    f"The tables are trained (`requires_grad`), but are no part of the adapter {adapter_name!r}, "
                    "which would be saved without their rows: call `unfreeze_tables(model)` before training to have "
                    "them in the adapter, or freeze them."
                )
            return {}
        weights = [state_dict.get(f"tables.{i}.weight", table.weight) for i, table in enumerate(self.tables)]
        self._touch_differing(weights)
        return self.delta(adapter_name, weights).in_adapter()

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        # Asked before an adapter is loaded. Its keys stay as they are, and are found by `_load_from_state_dict`.
        self._loading = adapter_name
        return {}

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        names = [f"{prefix}tables.{i}.weight" for i in range(len(self.tables))]
        is_adapter = f"{prefix}{ABOUT_KEY}" in state_dict
        if is_adapter:
            own = [key for key in state_dict if key.startswith(prefix)]
            self.load_adapter_file(memory_keys({key: state_dict.pop(key) for key in own}), "The adapter's file")
        elif any(name in state_dict for name in names):
            self._loading = self.base_readers = None
            self._touch_differing([state_dict.get(name) for name in names])
            self._versions = [None] * len(self._versions)
        elif self._loading is not None:
            self.load_adapter_file({}, "The adapter's file")
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.no_grad()
    def _touch_differing(self, weights: list[torch.Tensor | None]) -> None:
        """Of the rows in which whole tables differ from those with an adapter's, keeps the base's."""
        tables = self.writable_tables() if self.adapter_in_place is not None else ()
        for index, (weight, incoming) in enumerate(zip(tables, weights, strict=False)):
            if incoming is None or incoming.shape != weight.shape or incoming.dtype.itemsize < 2:
                continue
            if incoming is weight or (type(incoming) is torch.Tensor and incoming.data_ptr() == weight.data_ptr()):
                continue
            step = max(1, 2**24 // weight.shape[1])
            for start in range(0, len(weight), step):
                part = weight[start : start + step]
                new = incoming[start : start + step].to(part.device, part.dtype)
                self._touched[index].add(weight, (bits(part) != bits(new)).any(1).nonzero().squeeze(1) + start)

    def check_without_rows(self, what: str) -> None:
        """Raises ValueError if adapters have rows: what is done to the tables would lose the base's."""
        if self._adapters:
            raise ValueError(
                f"The tables cannot be {what} while adapters have rows of them ({', '.join(sorted(self._adapters))}): "
                "call `merge_and_unload()` or `unload()` first."
            )

    def check_adapter_names(self, adapter_names: Sequence[str] | None) -> None:
        """Raises ValueError for a batch of several adapters, of which some have rows."""
        if adapter_names is not None and self._adapters:
            raise ValueError(
                f"`adapter_names` mixes adapters in one batch, but {', '.join(sorted(self._adapters))} has table rows "
                "of its own: run a batch for each adapter."
            )


def _values_of(grad: torch.Tensor) -> torch.Tensor:
    return grad._values() if grad.is_sparse else grad
