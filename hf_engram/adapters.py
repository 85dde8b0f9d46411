"""Adapters of an Engram model with PEFT; trained table rows are part of an adapter.

PEFT works on an Engram model as on any other. What to hand to its `LoraConfig`:

- `target_modules=LORA_TARGETS`, which PEFT takes by itself when none are given: the projections of attention and MLP,
  and `wkv`, by which an Engram layer reads its rows.
- `modules_to_save=["engram"]` trains the whole Engram layers (`wkv` and the gate's weights) in full instead, which a
  freshly converted model wants: its memory has yet to be learned. `["attn_hc", "mlp_hc"]` does so for the residual
  stream's parameters, of which there are few.
- The tables are frozen by PEFT. [`unfreeze_tables`] has the optimizer change their rows in place, so that there is no
  second copy, and makes the rows that change a part of the active adapter. Never make a table a LoRA target: the model
  reads its rows, it does not call it, so the factors would not learn.

    model = get_peft_model(model, LoraConfig(r=16, task_type="CAUSAL_LM"))
    unfreeze_tables(model)
    ...                                             # train
    model.save_pretrained("adapter")                # the Trainer's checkpoints and push_to_hub likewise

    model = PeftModel.from_pretrained(base_model, "adapter")

What PEFT does with an adapter it does with its rows: `set_adapter`, `disable_adapter`, `delete_adapter` and `unload`
bring the base's rows back to the bit, `merge_and_unload` makes the adapter's the model's own. One adapter with rows
can be active at a time.

A model that was trained without PEFT can be shared as rows, too: [`save_table_delta`] writes those that differ from
its base's, [`load_table_delta`] puts them into the base.
"""

import os
import re
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from torch import nn

from .modeling_engram.adapter_rows import LORA_TARGETS
from .modeling_engram.model_card import CARD_FILE, mark, training_section, write_card
from .modeling_engram.table_delta import TABLE_DELTA_FILE, TableDelta, find_memory, float_tables


# As PEFT's config says that an adapter has table rows.
ROWS_MODULE = "engram_memory"
# A folder of huggingface_hub's cache.
CACHED_REPO = re.compile(r"(?:^|[/\\])models--([^/\\]+?)--([^/\\]+)[/\\]snapshots[/\\][^/\\]+[/\\]?$")


def engram_tables(model: nn.Module) -> list[nn.Parameter]:
    """The tables `[rows, engram_head_dim]` of a model's Engram layers, whatever wraps the model.

    Raises:
        ValueError: there are none, they are in PEFT's `modules_to_save`, or they are quantised.
    """
    return float_tables(find_memory(model))


def unfreeze_tables(model: nn.Module, sparse_grad: bool = True) -> list[nn.Parameter]:
    """Lets the tables be trained in place. With PEFT, the rows that change become part of the active adapter.

    Args:
        model: a PEFT model, or any other with Engram layers.
        sparse_grad: whether they get sparse gradients, as [`optim.EngramOptimizer`] and `torch.optim.SparseAdam` take
            them. For the optimizers that the Trainer makes by itself, pass False: with these, PEFT models keep a copy
            of the base's tables in host memory.

    Returns:
        the tables.

    Raises:
        ValueError: the tables cannot be trained, or several adapters are active.
    """
    memory = find_memory(model)
    tables = float_tables(memory)
    configs = next((c for m in model.modules() if isinstance(c := getattr(m, "peft_config", None), dict)), None)
    if configs:
        _make_rows_part_of_adapter(memory, configs)
    for table in tables:
        table.requires_grad_(True)
    memory.sparse_grad = sparse_grad
    return tables


def _make_rows_part_of_adapter(memory: nn.Module, configs: dict[str, Any]) -> None:
    if not hasattr(memory, "adapter_in_place"):
        raise ValueError(
            "The model's code is of a version that knows no adapters with table rows: load its base with the package "
            "(without `trust_remote_code`), and save it again to bring its folder up to date."
        )
    active = list(memory.active_adapters)
    if len(active) != 1 or active[0] not in configs:
        raise ValueError(
            f"`model` has the active adapters {active}, of which one alone can have table rows: call "
            "`model.set_adapter(name)` first."
        )
    memory.update(active[0])
    config = configs[active[0]]
    # Not every method's config has a place for it; an adapter's file says it, too.
    if ROWS_MODULE not in (getattr(config, "modules_to_save", [ROWS_MODULE]) or ()):
        config.modules_to_save = [*(config.modules_to_save or ()), ROWS_MODULE]


def save_table_delta(model: nn.Module, base: nn.Module | str | os.PathLike, folder: str | os.PathLike) -> TableDelta:
    """Saves the table rows in which `model` differs from `base` into `folder`, as `TABLE_DELTA_FILE`.

    A PEFT adapter needs none: it is saved with its rows.

    Args:
        model: the trained model; a PEFT model, too.
        base: what it was trained from: a folder or Hub id, or a model.
        folder: where to.

    Returns:
        the delta.

    Raises:
        ValueError: `base` has other tables, or a table is wrapped by PEFT.
    """
    delta = TableDelta.between(model, base)
    delta.save(folder)
    return delta


def load_table_delta(model: nn.Module, folder: str | os.PathLike) -> TableDelta:
    """Puts the rows of a folder into the model's tables, see [`TableDelta.apply`]: those that [`save_table_delta`]
    wrote, or those of an adapter. In a PEFT model, they become part of the active adapter.

    Returns:
        the delta that undoes it: `undo.apply(model)`.

    Raises:
        OSError: the folder holds no rows. ValueError: they are damaged, or of another base; nothing was changed.
    """
    delta = TableDelta.load(folder)
    memory = find_memory(model)
    configs = next((c for m in model.modules() if isinstance(c := getattr(m, "peft_config", None), dict)), None)
    if configs and getattr(memory, "adapter_in_place", "") is None:
        delta.check(memory)
        delta.check_base_rows([memory.base_rows(index, rows) for index, rows in enumerate(delta.rows)])
        trained = [table.requires_grad for table in memory.tables.parameters()]
        _make_rows_part_of_adapter(memory, configs)
        for table, value in zip(memory.tables.parameters(), trained, strict=True):
            table.requires_grad_(value)
    return delta.apply(model)


def hub_id(source: str | os.PathLike) -> str:
    """What a model is loaded by, as others can: a folder of the Hub's cache by its id, anything else as it is."""
    found = CACHED_REPO.search(os.fspath(source))
    return "/".join(found.groups()) if found else os.fspath(source)


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

A LoRA adapter for `{base}`. The rows of its Engram tables that training changed are part of it.

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{base}", trust_remote_code=True)
model = PeftModel.from_pretrained(model, "{name}")
model = model.merge_and_unload()  # a model like any other, to save as a whole
```
{training}"""


def write_adapter_card(
    folder: str | os.PathLike, name: str, base: str | os.PathLike, record: dict[str, Any] | None = None
) -> None:
    """Writes README.md into an adapter's folder, in place of PEFT's.

    Args:
        folder: holds the adapter.
        name: what the adapter is loaded by.
        base: what the model is loaded by that it was trained on.
        record: what is known of the training, see [`training_section`].
    """
    base = hub_id(base)
    data = ModelCardData(
        library_name="peft",
        pipeline_tag="text-generation",
        tags=["engram", "lora"],
        base_model=None if os.path.exists(base) else base,
        datasets=(record or {}).get("datasets"),
    )
    text = ADAPTER_CARD.format(name=name, base=base, training=training_section(record))
    write_card(Path(folder) / CARD_FILE, mark(data, text, name))
