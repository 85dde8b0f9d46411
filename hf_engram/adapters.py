"""Adapters of an Engram model with PEFT, and a trained table as only the rows that changed.

PEFT works on an Engram model as on any other. What to hand to its `LoraConfig`:

- `target_modules=LORA_TARGETS`: the projections of attention and MLP, and `wkv`, by which an Engram layer reads its
  rows.
- `modules_to_save=["engram"]` trains the whole Engram layers (`wkv` and the gate's weights) in full instead, which a
  freshly converted model wants: its memory has yet to be learned. `["attn_hc", "mlp_hc"]` does so for the residual
  stream's parameters, of which there are few.
- The tables are frozen by PEFT. [`unfreeze_tables`] lets the optimizer change them in place, so that there is no
  second copy; [`save_table_delta`] then writes the changed rows beside the adapter, and [`load_table_delta`] puts
  them back. In `modules_to_save` (`["tables.0"]`) PEFT would copy a table, and save it in full with every adapter.
  Never make a table a LoRA target: the model reads its rows, it does not call it, so the factors would not learn.

    model = get_peft_model(model, LoraConfig(r=16, target_modules=LORA_TARGETS, task_type="CAUSAL_LM"))
    unfreeze_tables(model)
    ...                                             # train
    model.save_pretrained("adapter")
    save_table_delta(model, "base", "adapter")      # "base": the folder that the model was loaded from

    model = PeftModel.from_pretrained(base_model, "adapter")
    undo = load_table_delta(model, "adapter")
    ...
    undo.apply(model)                               # the base's rows again, to the bit

Rows belong to the model rather than to one of PEFT's adapters: `merge_and_unload()` keeps them, and so does
`disable_adapter()`. To change over to another adapter, undo the one delta before loading the other.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCardData
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.utils import cached_file

from .modeling_engram.model_card import CARD_FILE, mark, training_section, write_card


LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "wkv"]

TABLE_DELTA_FILE = "engram_table_delta.safetensors"
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
# Rows are compared as the bits they are: a NaN equals itself, and zero is not minus zero.
BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}
COMPARED_AT_ONCE = 2**24  # elements

# Rows `start` to `stop` of a base's table.
RowReader = Callable[[int, int], torch.Tensor]


def engram_tables(model: nn.Module) -> list[nn.Parameter]:
    """The tables `[rows, engram_head_dim]` of a model's Engram layers, whatever wraps the model.

    Raises:
        ValueError: there are none, they are in PEFT's `modules_to_save`, or they are quantised.
    """
    memory = next((m for name, m in model.named_modules() if name.rpartition(".")[2] == "engram_memory"), None)
    if memory is None:
        raise ValueError(f"`model` ({type(model).__name__}) has no Engram tables.")
    names = dict(memory.named_parameters())
    if wrapped := sorted(name for name in names if "modules_to_save" in name or "lora_" in name):
        raise ValueError(
            f"The tables are part of the PEFT adapter ({wrapped[0]}): leave `tables` and `engram_memory` out of "
            "`modules_to_save` and `target_modules`, and call `unfreeze_tables(model)` to train them."
        )
    tables = [getattr(table, "weight", None) for table in memory.tables]
    for index, table in enumerate(tables):
        if not isinstance(table, nn.Parameter) or table.dtype not in BITS:
            kind = getattr(table, "dtype", type(memory.tables[index]).__name__)
            where = "on disk" if getattr(memory.tables[index], "placement", None) == "disk" else f"of {kind}"
            raise ValueError(
                f"Table {index} is {where}: only tables of {', '.join(map(str, BITS))} in memory can be trained. Load "
                "the model with `engram_placement='device'` and float tables, or leave them as they are (in "
                "scripts/train.py: --tables freeze)."
            )
    return tables


def unfreeze_tables(model: nn.Module, sparse_grad: bool = True) -> list[nn.Parameter]:
    """Lets the tables be trained in place, beside an adapter that PEFT has frozen everything else for.

    Args:
        model: a PEFT model, or any other with Engram layers.
        sparse_grad: whether they get sparse gradients, as [`optim.EngramOptimizer`] and `torch.optim.SparseAdam` take
            them. For the optimizers that the Trainer makes by itself, pass False.

    Returns:
        the tables.
    """
    tables = engram_tables(model)
    for table in tables:
        table.requires_grad_(True)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "engram_memory":
            module.sparse_grad = sparse_grad
    return tables


@dataclass
class TableDelta:
    """Rows of a model's tables that differ from another's, its base's.

    Attributes:
        layout: the `LAYOUT_FIELDS` of the model's config.
        rows: for each table int64 `[n]`, ascending.
        values: for each table `[n, engram_head_dim]`, these rows' values in the model.
        base_sha256: for each table and, by name, each dtype, the digest of these rows' values in the base, rounded to
            that dtype.
    """

    layout: dict[str, Any]
    rows: list[torch.Tensor]
    values: list[torch.Tensor]
    base_sha256: list[dict[str, str]]

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
        tables, readers = engram_tables(model), _base_tables(base)
        if len(readers) != len(tables):
            raise ValueError(f"`base` has {len(readers)} tables, the model has {len(tables)}: it is not its base.")
        rows, values, digests = [], [], []
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
                differ = (_bits(part) != _bits(base_part.to(part.dtype))).any(1).nonzero().squeeze(1)
                changed.append(differ + start)
                before.append(base_part[differ])
            rows.append(torch.cat(changed))
            values.append(table[rows[-1].to(table.device)].cpu())
            digests.append(_digests(torch.cat(before)))
        return cls(_layout(model), rows, values, digests)

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes the delta as one file into `folder` (made if missing), complete or not at all."""
        os.makedirs(folder, exist_ok=True)
        tensors = {f"tables.{i}.rows": rows for i, rows in enumerate(self.rows)}
        tensors |= {f"tables.{i}.values": values.contiguous() for i, values in enumerate(self.values)}
        metadata = {"format": "pt", "layout": json.dumps(self.layout), "base_sha256": json.dumps(self.base_sha256)}
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
        """Reads the delta of a folder or Hub repository.

        Raises:
            OSError: there is none.
            ValueError: the file is not a delta.
        """
        path = cached_file(folder, TABLE_DELTA_FILE)
        with safe_open(path, framework="pt") as file:
            metadata, names = file.metadata() or {}, set(file.keys())
            if not {"layout", "base_sha256"} <= metadata.keys():
                raise ValueError(f"{path} is not a table delta: its metadata lack `layout` or `base_sha256`.")
            layout, base_sha256 = (json.loads(metadata[name]) for name in ("layout", "base_sha256"))
            expected = {f"tables.{i}.{kind}" for i in range(len(base_sha256)) for kind in ("rows", "values")}
            if names != expected:
                raise ValueError(f"{path} holds {sorted(names)} in place of {sorted(expected)}: it is damaged.")
            rows = [file.get_tensor(f"tables.{i}.rows") for i in range(len(base_sha256))]
            values = [file.get_tensor(f"tables.{i}.values") for i in range(len(base_sha256))]
        return cls(layout, rows, values, base_sha256)

    @torch.no_grad()
    def apply(self, model: nn.Module) -> "TableDelta":
        """Puts the rows into the model, in its dtype.

        Returns:
            the delta that undoes this one.

        Raises:
            ValueError: the model's layout is another, or its rows are not those of the base (another base, or another
                delta on top of it). Nothing was changed.
        """
        tables, layout = engram_tables(model), _layout(model)
        for name in LAYOUT_FIELDS:
            if layout[name] != self.layout[name]:
                raise ValueError(
                    f"The delta was made for `{name}` = {self.layout[name]}, the model's is {layout[name]}: its rows "
                    "stand for other n-grams there. Load it onto the model that it was trained from."
                )
        for index, (table, rows, values) in enumerate(zip(tables, self.rows, self.values, strict=True)):
            fits = values.shape == (len(rows), table.shape[1])
            if not fits or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < len(table)):
                raise ValueError(
                    f"The delta's rows {list(rows.shape)} and values {list(values.shape)} do not fit table {index}, "
                    f"{list(table.shape)}: the file is damaged."
                )
        replaced = [table[rows.to(table.device)].cpu() for table, rows in zip(tables, self.rows, strict=True)]
        if any(_digest(r) != known[_name(r.dtype)] for r, known in zip(replaced, self.base_sha256, strict=True)):
            raise ValueError(
                "The model's table rows are not those that the delta was made from: it is another base, or another "
                "delta is applied already (apply what `load_table_delta` returned to undo that one first)."
            )
        values = [value.to(table.dtype) for table, value in zip(tables, self.values, strict=True)]
        for table, rows, value in zip(tables, self.rows, values, strict=True):
            table[rows.to(table.device)] = value.to(table.device)
        return TableDelta(layout, self.rows, replaced, [_digests(value) for value in values])


def save_table_delta(model: nn.Module, base: nn.Module | str | os.PathLike, folder: str | os.PathLike) -> TableDelta:
    """Saves the table rows in which `model` differs from `base` into `folder`, as `TABLE_DELTA_FILE`.

    Args:
        model: the trained model; a PEFT model, too.
        base: what it was trained from: a folder or Hub id, or a model.
        folder: as a rule the adapter's.

    Returns:
        the delta.

    Raises:
        ValueError: `base` has other tables, or the tables are part of the PEFT adapter.
    """
    delta = TableDelta.between(model, base)
    delta.save(folder)
    return delta


def load_table_delta(model: nn.Module, folder: str | os.PathLike) -> TableDelta:
    """Puts the rows that [`save_table_delta`] wrote into the model's tables, see [`TableDelta.apply`].

    Returns:
        the delta that undoes it: `undo.apply(model)`.
    """
    return TableDelta.load(folder).apply(model)


def _layout(model: nn.Module) -> dict[str, Any]:
    config = model.config
    return {name: getattr(config, name) for name in LAYOUT_FIELDS}


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(BITS[values.dtype])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(_bits(values).numpy()).hexdigest()


def _digests(values: torch.Tensor) -> dict[str, str]:
    """By dtype, because a base may be loaded in another one than the adapter was trained with."""
    return {_name(dtype): _digest(values.to(dtype)) for dtype in BITS}


def _base_tables(base: nn.Module | str | os.PathLike) -> list[tuple[list[int], RowReader]]:
    """Shape and reader of each of the base's tables; those of a folder are read where they lie."""
    if isinstance(base, nn.Module):
        return [
            (list(table.shape), lambda start, stop, table=table: table.detach()[start:stop].cpu())
            for table in engram_tables(base)
        ]
    found = {}
    for path in _weight_files(base):
        file = safe_open(path, framework="pt")
        for name in file.keys():
            _, memory, rest = name.rpartition("engram_memory.tables.")
            if memory and rest.endswith(".weight"):
                found[int(rest.removesuffix(".weight"))] = file.get_slice(name)
    return [
        (found[index].get_shape(), lambda start, stop, part=found[index]: part[start:stop]) for index in sorted(found)
    ]


def _weight_files(base: str | os.PathLike) -> list[str]:
    try:
        index = cached_file(base, "model.safetensors.index.json")
    except OSError:
        return [cached_file(base, "model.safetensors")]
    names = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    return [cached_file(base, name) for name in sorted(set(names))]


__all__ = [
    "LORA_TARGETS",
    "TABLE_DELTA_FILE",
    "TableDelta",
    "engram_tables",
    "load_table_delta",
    "save_table_delta",
    "unfreeze_tables",
]


ADAPTER_CARD = """
# {name}

A LoRA adapter for `{base}`, and, in engram_table_delta.safetensors, the rows of its Engram tables that
training changed: PEFT loads the first alone. Needs the package hf-engram.

```python
from peft import PeftModel
from hf_engram import EngramForCausalLM
from hf_engram.adapters import load_table_delta

model = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained("{base}"), "{name}")
load_table_delta(model, "{name}")  # not after --tables freeze
model = model.merge_and_unload()  # a model like any other, to save as a whole
```
{training}"""


def write_adapter_card(
    folder: str | os.PathLike, name: str, base: str | os.PathLike, record: dict[str, Any] | None = None
) -> None:
    """Writes README.md into an adapter's folder, in place of PEFT's: how to load the rows that changed, too.

    Args:
        folder: holds the adapter and, if tables were trained, the file of `save_table_delta`.
        name: what the adapter is loaded by.
        base: what the model is loaded by that it was trained on.
        record: what is known of the training, see [`training_section`].
    """
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["engram", "lora"],
        base_model=None if os.path.exists(base) else str(base),
        datasets=(record or {}).get("datasets"),
    )
    text = ADAPTER_CARD.format(name=name, base=base, training=training_section(record))
    write_card(Path(folder) / CARD_FILE, mark(data, text, name))
