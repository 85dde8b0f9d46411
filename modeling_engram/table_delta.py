"""Rows of a model's tables that differ from those of its base: what they are saved as, and when they may be loaded."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import cached_file


TABLE_DELTA_FILE = "engram_table_delta.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"
# In an adapter's file: what is known of the rows, as JSON in bytes.
ABOUT_KEY = "trained_rows"
# What decides which row an n-gram is in, and what a row looks like.
LAYOUT_FIELDS = (
    "engram_layer_ids",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
    "engram_num_embeddings",
)
# What a file says of its rows.
ABOUT = ("layout", "base_sha256", "token_map_sha256", "readers_sha256", "values_sha256")
# Rows are compared as the bits they are: a NaN equals itself, and zero is not minus zero.
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
COMPARED_AT_ONCE = 2**24  # elements
# Of a weight that reads rows: as many elements as tell one model's from another's.
SAMPLED = 4096

# Rows `start` to `stop` of a base's table.
RowReader = Callable[[int, int], torch.Tensor]


def find_memory(model: nn.Module) -> nn.Module:
    """The `EngramMemory` of a model, whatever wraps it and whichever copy of the code it is of.

    Raises:
        ValueError: there is none.
    """
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "engram_memory":
            return module
    raise ValueError(f"`model` ({type(model).__name__}) has no Engram tables.")


def float_tables(memory: nn.Module) -> list[nn.Parameter]:
    """The tables `[rows, engram_head_dim]` of an `EngramMemory`.

    Raises:
        ValueError: one of them is not a float table in memory, or is wrapped by PEFT.
    """
    names = dict(memory.named_parameters())
    if wrapped := sorted(name for name in names if "modules_to_save" in name or "lora_" in name):
        raise ValueError(
            f"The tables are part of the PEFT adapter ({wrapped[0]}): leave `tables` out of `modules_to_save` and "
            "`target_modules`, and call `unfreeze_tables(model)` to train them."
        )
    tables = [getattr(table, "weight", None) for table in memory.tables]
    for index, table in enumerate(tables):
        if not isinstance(table, nn.Parameter) or table.dtype not in BITS:
            kind = getattr(table, "dtype", type(memory.tables[index]).__name__)
            where = "on disk" if getattr(memory.tables[index], "placement", None) == "disk" else f"of {kind}"
            raise ValueError(
                f"Table {index} is {where}: only tables of {', '.join(map(str, BITS))} in memory can be trained, or "
                "take trained rows. Load the model with `engram_placement='device'` or `'cpu'` and float tables, or "
                "leave them as they are (in scripts/train.py: --tables freeze)."
            )
    return tables


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(BITS[values.dtype])


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sha256(*tensors: torch.Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        integers = tensor if not tensor.is_floating_point() else bits(tensor)
        digest.update(integers.contiguous().numpy())
    return digest.hexdigest()


def digests(*values: torch.Tensor) -> dict[str, str]:
    """By dtype, because a base may be loaded in another one than the rows were trained with."""
    return {name_of(dtype): _sha256(*(value.to(dtype) for value in values)) for dtype in BITS}


def layout_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in LAYOUT_FIELDS}


def sampled(weight: torch.Tensor) -> torch.Tensor:
    """At most `SAMPLED` elements, at places that depend on the size alone; on the CPU."""
    flat = weight.detach().flatten()
    step = max(1, len(flat) // SAMPLED)
    return flat[::step][:SAMPLED].cpu()


def reader_weights(memory: nn.Module) -> list[torch.Tensor] | None:
    """Samples of the base's weights that read the rows (those of the Engram layers, without adapters); None where
    they are not known, or not there (offloaded)."""
    if getattr(memory, "base_readers", None) is not None:
        return memory.base_readers
    samples = []
    for layer in getattr(memory, "readers", ()):
        wkv = getattr(layer.wkv, "base_layer", layer.wkv)
        weights = [wkv.weight, layer.q_weight, layer.k_weight]
        if any(weight.is_meta for weight in weights):
            return None
        samples += [sampled(weight) for weight in weights]
    return samples or None


@dataclass
class TableDelta:
    """Rows of a model's tables that differ from another's, its base's.

    Attributes:
        layout: the `LAYOUT_FIELDS` of the model's config.
        rows: for each table int64 `[n]`, ascending.
        values: for each table `[n, engram_head_dim]`, these rows' values in the model.
        base_sha256: for each table and, by name, each dtype, the digest of these rows' values in the base, rounded to
            that dtype.
        token_map_sha256: the digest of the base's token map, if a tokenizer was bound.
        readers_sha256: by dtype, the digest of a sample of the weights that read the rows in the base. It is None in
            files of an older version, as the next one is.
        values_sha256: the digest of `rows` and `values`.
    """

    layout: dict[str, Any]
    rows: list[torch.Tensor]
    values: list[torch.Tensor]
    base_sha256: list[dict[str, str]]
    token_map_sha256: str | None = None
    readers_sha256: dict[str, str] | None = None
    values_sha256: str | None = None

    @classmethod
    def of(
        cls,
        config: Any,
        rows: list[torch.Tensor],
        values: list[torch.Tensor],
        base_rows: list[torch.Tensor],
        readers: list[torch.Tensor] | None,
    ) -> "TableDelta":
        """The delta of these rows, for the base that has `base_rows` in their place and is read by `readers`."""
        return cls(
            layout_of(config),
            rows,
            values,
            [digests(part) for part in base_rows],
            getattr(config, "engram_token_map_sha256", None),
            None if readers is None else digests(*readers),
            _sha256(*rows, *values),
        )

    @classmethod
    @torch.no_grad()
    def between(cls, model: nn.Module, base: nn.Module | str | os.PathLike) -> "TableDelta":
        """The rows of `model` that differ from those of `base` in any bit.

        Args:
            model: the trained model; a PEFT model, too.
            base: what it was trained from: a folder or Hub id, or a model.

        Raises:
            ValueError: `base` has other tables.
        """
        memory = find_memory(model)
        tables, (readers, layers) = float_tables(memory), _base_tables(base)
        if len(readers) != len(tables):
            raise ValueError(f"`base` has {len(readers)} tables, the model has {len(tables)}: it is not its base.")
        rows, values, replaced = [], [], []
        for index, (table, (shape, read)) in enumerate(zip(tables, readers, strict=True)):
            if shape != list(table.shape):
                raise ValueError(
                    f"Table {index} of `base` is {shape}, the model's is {list(table.shape)}: it is not its base."
                )
            step = max(1, COMPARED_AT_ONCE // table.shape[1])
            changed, before = [], []
            for start in range(0, len(table), step):
                part = table[start : start + step].cpu()
                base_part = read(start, start + len(part))
                differ = (bits(part) != bits(base_part.to(part.dtype))).any(1).nonzero().squeeze(1)
                changed.append(differ + start)
                before.append(base_part[differ])
            rows.append(torch.cat(changed))
            values.append(table[rows[-1].to(table.device)].cpu())
            replaced.append(torch.cat(before))
        return cls.of(memory.config, rows, values, replaced, layers)

    # As a file of its own, and in an adapter's.

    @property
    def about(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ABOUT}

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes the delta as one file into `folder` (made if missing), complete or not at all."""
        os.makedirs(folder, exist_ok=True)
        tensors = {f"tables.{i}.rows": rows for i, rows in enumerate(self.rows)}
        tensors |= {f"tables.{i}.values": values.contiguous() for i, values in enumerate(self.values)}
        metadata = {"format": "pt"} | {name: json.dumps(value) for name, value in self.about.items()}
        path = Path(folder) / TABLE_DELTA_FILE
        temporary = path.with_suffix(".tmp")
        try:
            save_file(tensors, temporary, metadata=metadata)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "TableDelta":
        """Reads the delta of a folder or Hub repository: a file of its own, or rows in the adapter's file.

        Raises:
            OSError: there is none.
            ValueError: the file is not a delta, or damaged.
        """
        try:
            path, is_adapter = cached_file(folder, TABLE_DELTA_FILE), False
        except OSError:
            try:
                path, is_adapter = cached_file(folder, ADAPTER_FILE), True
                with safe_open(path, framework="pt") as file:
                    has_rows = any(name.endswith(f".{ABOUT_KEY}") for name in file.keys())
            except OSError:
                has_rows = False
            # The first error says best what is missing.
            if not has_rows:
                raise
        try:
            with safe_open(path, framework="pt") as file:
                if is_adapter:
                    tensors = {name: file.get_tensor(name) for name in file.keys() if ".engram_memory." in f".{name}"}
                    return cls.from_adapter(memory_keys(tensors), path)
                metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{path} is damaged ({error}): download it again, or save the rows again.") from error
        if not {"layout", "base_sha256"} <= metadata.keys():
            raise ValueError(
                f"{path} is not a table delta: its metadata lack `layout` or `base_sha256`. Name a folder that "
                "`save_table_delta` or an adapter's `save_pretrained` wrote."
            )
        about = _about_of(lambda: {key: json.loads(metadata[key]) for key in ABOUT if key in metadata}, path)
        return cls._from_tensors(tensors, about, path, "values")

    def in_adapter(self) -> dict[str, torch.Tensor]:
        """As tensors of an adapter's file. Values have their table's own name, so that a loader that knows no rows
        finds a table of the wrong size, and stops."""
        about = json.dumps(self.about).encode()
        tensors = {ABOUT_KEY: torch.frombuffer(bytearray(about), dtype=torch.uint8)}
        for index, (rows, values) in enumerate(zip(self.rows, self.values, strict=True)):
            tensors |= {f"tables.{index}.rows": rows, f"tables.{index}.weight": values}
        return tensors

    @classmethod
    def from_adapter(cls, tensors: dict[str, torch.Tensor], path: str | os.PathLike) -> "TableDelta":
        """The delta that [`in_adapter`] made these tensors of; `path` is for errors."""
        tensors = {name: tensor.cpu() for name, tensor in tensors.items()}
        about = _about_of(lambda: json.loads(bytes(tensors.pop(ABOUT_KEY).numpy())), path)
        return cls._from_tensors(tensors, about, path, "weight")

    @classmethod
    def _from_tensors(cls, tensors: dict, about: dict[str, Any], path: str | os.PathLike, kind: str) -> "TableDelta":
        n_tables = len(about["base_sha256"])
        expected = {f"tables.{i}.{part}" for i in range(n_tables) for part in ("rows", kind)}
        remedy = "it is damaged. Download it again, or save it again."
        if kind == "weight" and tensors.keys() == {name for name in expected if name.endswith(".rows")}:
            remedy = "load it without `ignore_mismatched_sizes`, which leaves them out, or download it again."
        if tensors.keys() != expected:
            raise ValueError(f"{path} holds {sorted(tensors)} in place of {sorted(expected)}: {remedy}")
        rows = [tensors[f"tables.{i}.rows"] for i in range(n_tables)]
        values = [tensors[f"tables.{i}.{kind}"] for i in range(n_tables)]
        for index, (ids, part) in enumerate(zip(rows, values, strict=True)):
            fits = ids.dtype == torch.int64 and ids.ndim == 1 and part.ndim == 2 and len(ids) == len(part)
            if not fits or part.dtype not in BITS or bool((ids.diff() <= 0).any()):
                raise ValueError(
                    f"{path}: the rows of table {index} ({ids.dtype}, {list(ids.shape)}) are not ascending row ids "
                    f"for its values ({part.dtype}, {list(part.shape)}): {remedy}"
                )
        if about.get("values_sha256") not in (None, _sha256(*rows, *values)):
            raise ValueError(f"{path}: its rows are not those that were saved (their digest differs): {remedy}")
        return cls(rows=rows, values=values, **about)

    # Use.

    def check(self, memory: nn.Module) -> None:
        """Raises ValueError unless the rows were made for a model with this memory."""
        own = layout_of(memory.config)
        for name in LAYOUT_FIELDS:
            if own[name] != self.layout.get(name):
                raise ValueError(
                    f"The delta was made for `{name}` = {self.layout.get(name)}, the model's is {own[name]}: its rows "
                    "stand for other n-grams there. Load it onto the model that it was trained from."
                )
        token_map = getattr(memory.config, "engram_token_map_sha256", None)
        if self.token_map_sha256 is not None and token_map != self.token_map_sha256:
            raise ValueError(
                f"The delta was made with the token map {self.token_map_sha256}, the model's is {token_map}: its rows "
                "stand for other n-grams there. Load it onto the model that it was trained from, with its tokenizer "
                "bound."
            )
        tables = float_tables(memory)
        for index, (table, rows, values) in enumerate(zip(tables, self.rows, self.values, strict=True)):
            fits = values.shape == (len(rows), table.shape[1])
            if not fits or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(table)):
                raise ValueError(
                    f"The delta's rows {list(rows.shape)} and values {list(values.shape)} do not fit table {index}, "
                    f"{list(table.shape)}: the file is damaged. Download it again, or save it again."
                )
        readers = reader_weights(memory)
        if self.readers_sha256 is not None and readers is not None and not self._fits(self.readers_sha256, readers):
            raise ValueError(
                "The weights of the model's Engram layers, which read the rows, are not those that the delta was "
                "trained with: it is another base. Load the delta onto the model that it was trained from"
                + self._in_its_dtype()
            )

    def check_base_rows(self, base_rows: Sequence[torch.Tensor]) -> None:
        """Raises ValueError unless these are the rows that the delta replaces."""
        if not all(self._fits(known, [rows]) for rows, known in zip(base_rows, self.base_sha256, strict=True)):
            raise ValueError(
                "The model's table rows are not those that the delta was made from: it is another base, or another "
                "delta is applied already (apply what `load_table_delta` returned to undo that one first). Load the "
                "delta onto the model that it was trained from" + self._in_its_dtype()
            )

    def _fits(self, known: dict[str, str], values: Iterable[torch.Tensor]) -> bool:
        """In the dtype that they have, or rounded to that of training."""
        values = list(values)
        trained_in = {value.dtype for value in self.values}
        return any(
            known.get(name_of(dtype)) == _sha256(*(value.to(dtype) for value in values))
            for dtype in {value.dtype for value in values} | trained_in
        )

    def _in_its_dtype(self) -> str:
        return f", with `dtype` {' or '.join(sorted(name_of(v.dtype) for v in self.values[:1]))} as in training."

    @torch.no_grad()
    def apply(self, model: nn.Module) -> "TableDelta":
        """Puts the rows into the model, in its dtype. If PEFT has an adapter there, they become part of it.

        Returns:
            the delta that undoes this one.

        Raises:
            ValueError: the model's layout, token map or weights are others, or its rows are not those of the base
                (another base, or another delta on top of it). Nothing was changed.
        """
        memory = find_memory(model)
        self.check(memory)
        tables = float_tables(memory)
        values = [value.to(table.dtype) for table, value in zip(tables, self.values, strict=True)]
        present = [table[rows.to(table.device)].cpu() for table, rows in zip(tables, self.rows, strict=True)]
        in_adapter = getattr(memory, "adapter_in_place", None) is not None
        if in_adapter and all(torch.equal(bits(one), bits(two)) for one, two in zip(present, values, strict=True)):
            # PEFT has loaded the very rows with the adapter.
            base = [memory.base_rows(index, rows) for index, rows in enumerate(self.rows)]
            self.check_base_rows(base)
        else:
            base = present
            self.check_base_rows(base)
            for index, (table, rows, value) in enumerate(zip(tables, self.rows, values, strict=True)):
                if in_adapter:
                    memory.touch(index, rows)
                table[rows.to(table.device)] = value.to(table.device)
        return TableDelta.of(memory.config, self.rows, base, values, reader_weights(memory))


def memory_keys(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors by their names inside of the memory, whatever module holds that."""
    return {name.rpartition("engram_memory.")[2]: tensor for name, tensor in tensors.items()}


def _about_of(read: Callable[[], dict[str, Any]], path: str | os.PathLike) -> dict[str, Any]:
    """What a file says of its rows.

    Raises:
        ValueError: it is damaged.
    """
    try:
        about = {name: value for name, value in read().items() if name in ABOUT}
        if not isinstance(about["layout"], dict) or not all(isinstance(item, dict) for item in about["base_sha256"]):
            raise ValueError("`layout` or `base_sha256` has another form")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: what it says of its table rows is damaged ({type(error).__name__}: {error}). Download it again, "
            "or save it again."
        ) from error
    return about


def _base_tables(
    base: nn.Module | str | os.PathLike,
) -> tuple[list[tuple[list[int], RowReader]], list[torch.Tensor] | None]:
    """Shape and reader of each of the base's tables, those of a folder read where they lie; and what reads rows, as
    `reader_weights` has it."""
    if isinstance(base, nn.Module):
        memory = find_memory(base)
        tables = [
            (list(table.shape), lambda start, stop, table=table: table.detach()[start:stop].cpu())
            for table in float_tables(memory)
        ]
        return tables, reader_weights(memory)
    found, readers = {}, {}
    for path in _weight_files(base):
        file = safe_open(path, framework="pt")
        for name in file.keys():
            _, memory, rest = name.rpartition("engram_memory.tables.")
            if memory and rest.endswith(".weight"):
                found[int(rest.removesuffix(".weight"))] = file.get_slice(name)
            layer, engram, weight = name.rpartition(".engram.")
            order = ("wkv.weight", "q_weight", "k_weight")
            if engram and weight in order:
                readers[int(layer.rpartition(".")[2]), order.index(weight)] = sampled(file.get_tensor(name))
    tables = [
        (found[index].get_shape(), lambda start, stop, part=found[index]: part[start:stop]) for index in sorted(found)
    ]
    return tables, [readers[key] for key in sorted(readers)] or None


def _weight_files(base: str | os.PathLike) -> list[str]:
    try:
        index = cached_file(base, "model.safetensors.index.json")
    except OSError:
        return [cached_file(base, "model.safetensors")]
    names = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    return [cached_file(base, name) for name in sorted(set(names))]
