"""The model card of a saved folder: what the model is, what it takes to run it, how to load it, how it was trained.

A card that was written here ends with a comment that holds the digest of all the rest. By this it is known later: one
that nobody has changed is brought up to date, any other card is somebody's and stays as it is.
"""

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData


CARD_FILE = "README.md"
# By class: the Hub's task, the Auto class, and what the example does with `inputs`.
KINDS = {
    "EngramForCausalLM": (
        "text-generation",
        "AutoModelForCausalLM",
        "output_ids = model.generate(**inputs, max_new_tokens=40)\n"
        "print(tokenizer.decode(output_ids[0], skip_special_tokens=True))",
    ),
    "EngramForSequenceClassification": (
        "text-classification",
        "AutoModelForSequenceClassification",
        "print(model(**inputs).logits.softmax(-1))",
    ),
    "EngramForTokenClassification": (
        "token-classification",
        "AutoModelForTokenClassification",
        "print(model(**inputs).logits.argmax(-1))",
    ),
    "EngramForQuestionAnswering": (
        "question-answering",
        "AutoModelForQuestionAnswering",
        "outputs = model(**inputs)\nprint(outputs.start_logits.argmax(-1), outputs.end_logits.argmax(-1))",
    ),
    "EngramModel": ("feature-extraction", "AutoModel", "print(model(**inputs).last_hidden_state.shape)"),
}

CARD = """
# {name}

{kind} with Engram conditional memory (hashed n-gram tables, as in DeepSeek-V4.1) for 🤗 Transformers.{origin}

## Load

The folder holds its own code:

```python
from transformers import {auto_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = {auto_class}.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
{use}
```

## Architecture

| | |
|---|---|
{architecture}
{memory}{training}
## Licence

{licence} The code in this folder is under the Apache License 2.0.
"""

MEMORY = """
## Where the tables live

`from_pretrained(..., engram_placement=...)` decides; the outputs are the same bit for bit.

| `engram_placement` | weights beside the model | tables in host memory | choose it |
|---|---|---|---|
| `"device"` | {all} | none | where it fits |
| `"cpu"` | {rest} | {tables} | where the accelerator is too small |
| `"disk"` | {rest} | none; the system caches what is read often, up to {tables} | where host memory is too small |

Keys and values take another {cache} for each token of context. Without an accelerator, "beside the model" is
host memory, too.
"""

# Appended to a card; the digest is of all but this.
MARK = "<!-- Written by hf-engram for {name}, digest {digest}. Once changed, it is yours, and stays as it is. -->"
MARKED = re.compile(r"\n?<!-- Written by hf-engram for (.+), digest ([0-9a-f]{64})\. Once changed, .* -->\s*\Z")
# The one line that Transformers fills in, in the template that it puts over a pushed folder's card.
TRANSFORMERS_LINE = (
    "This is the model card of a 🤗 transformers model that has been pushed on the Hub. "
    "This model card has been automatically generated."
)


def _digest(data: dict[str, Any], text: str) -> str:
    """Of what a card says, however its metadata are laid out and its lines end."""
    lines = [line.rstrip() for line in text.strip().splitlines()]
    content = json.dumps([data, lines], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def mark(data: ModelCardData, text: str, name: str) -> str:
    """A card's content, marked as written here.

    Args:
        data: the metadata.
        text: the rest.
        name: what the model is loaded by, as the text says it.
    """
    digest = _digest(data.to_dict(), text)
    return f"---\n{data.to_yaml()}\n---\n{text.rstrip()}\n\n{MARK.format(name=name, digest=digest)}\n"


def _own_card(content: str) -> tuple[ModelCard, str] | None:
    """A card that was marked and not changed since, without the mark, and the name it was written for."""
    if (match := MARKED.search(content)) is None:
        return None
    try:
        card = ModelCard(content[: match.start()])
    except (TypeError, ValueError, yaml.YAMLError):
        return None
    return (card, match[1]) if _digest(card.data.to_dict(), card.text) == match[2] else None


def _is_template(content: str) -> bool:
    """Whether a card is the one without content that Transformers pushes, with nothing filled in since."""
    if TRANSFORMERS_LINE not in content:
        return False
    try:
        card = ModelCard(content)
        if set(card.data.to_dict()) - {"library_name", "tags"}:
            return False
        template = ModelCard.from_template(card.data, model_description=TRANSFORMERS_LINE)
    except (ImportError, TypeError, ValueError, yaml.YAMLError):
        return False
    return template.text.split() == card.text.split()


def is_generated(content: str) -> bool:
    """Whether a card may be replaced: written here or by Transformers, and not changed by anyone since."""
    return _own_card(content) is not None or _is_template(content)


def is_somebodys(path: str | os.PathLike) -> bool:
    """Whether a file is there and is a card that must not be replaced."""
    path = Path(path)
    return path.exists() and not is_generated(path.read_text(encoding="utf-8", errors="replace"))


def renamed(content: str, name: str, base: tuple[str, str] | None = None) -> str:
    """A card under the name by which the model is loaded from now on; one that was not written here as it is.

    Args:
        content: the card.
        name: the new name.
        base: of an adapter, what its base was called, and the id by which others load that. It is put into any card.
    """
    own = _own_card(content)
    card, old = own or (ModelCard(content, ignore_metadata_errors=True), name)
    if base is not None:
        card = ModelCard(card.content.replace(*base), ignore_metadata_errors=True)
        card.data.base_model = base[1]
    if own is None:
        return content if base is None else card.content
    call = re.compile(rf'from_pretrained\((model, )?"{re.escape(old)}"')
    text = call.sub(lambda match: f'from_pretrained({match[1] or ""}"{name}"', card.text)
    text = text.replace(f"\n# {old}\n", f"\n# {name}\n", 1)
    return mark(card.data, text, name)


def size(n_bytes: int) -> str:
    """Bytes, as a person reads them."""
    power = min(4, int(math.log2(n_bytes) // 10)) if n_bytes else 0
    return f"{n_bytes / 2 ** (10 * power):.4g} {['B', 'KiB', 'MiB', 'GiB', 'TiB'][power]}"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _tables(model: Any) -> list[tuple[int, int, int, str]]:
    """Of each table: rows, elements, bytes with scales, dtype; wherever it lives."""
    memory, found = model.base_model.engram_memory, []
    for table in memory.tables if memory is not None else ():
        parts = [p for p in (table.weight, table.scale) if p is not None] or list(table.disk.tensors)
        n_bytes = sum(math.prod(part.shape) * part.dtype.itemsize for part in parts)
        found.append((parts[0].shape[0], math.prod(parts[0].shape), n_bytes, _dtype(parts[0].dtype)))
    return found


def _architecture(model: Any, tables: list, dense: int, dense_bytes: int, dtype: str) -> dict[str, str]:
    config = model.config
    rows = {
        "parameters outside the tables": f"{dense:,} ({dtype}, {size(dense_bytes)})",
        "decoder layers, width": f"{config.num_hidden_layers}, {config.hidden_size}",
        "attention heads, key/value heads, width of a head": (
            f"{config.num_attention_heads}, {config.num_key_value_heads}, {config.head_dim}"
        ),
        "vocabulary, longest sequence": f"{config.vocab_size:,}, {config.max_position_embeddings:,}",
        "copies of the residual stream": f"{config.hc_mult}",
        "Engram layers": ", ".join(map(str, config.engram_layer_ids)) or "none",
    }
    if not tables:
        return rows
    elements, n_bytes = (sum(table[i] for table in tables) for i in (1, 2))
    kinds = ", ".join(sorted({table[3] for table in tables}))
    rows |= {
        "n-gram sizes, hashes of each, width of a row": (
            f"2 to {config.engram_max_ngram_size}, {config.engram_n_heads}, {config.engram_head_dim}"
        ),
        "table rows": ", ".join(f"{table[0]:,}" for table in tables),
        "parameters in the tables": f"{elements:,} ({kinds}, {size(n_bytes)}: {n_bytes:,} bytes)",
        "share of the parameters in the tables": f"{elements / (elements + dense):.1%}",
        "compressed token ids": f"{config.engram_compressed_vocab_size:,}",
    }
    digest = config.engram_token_map_sha256
    rows["tokenizer's map to them"] = f"sha256 `{digest}`" if digest else "no tokenizer is bound yet"
    return rows


def table_of(rows: dict[str, str]) -> str:
    """Rows of a table in Markdown."""
    cells = ([part.replace("\n", " ").replace("|", "\\|") for part in row] for row in rows.items())
    return "\n".join(f"| {name} | {value} |" for name, value in cells)


def training_section(record: dict[str, Any] | None) -> str:
    """What a trainer has recorded, as a section; nothing if it has not.

    Args:
        record: names and values of what is to be shown, in this order. `datasets`, a list of Hub ids, is for the
            metadata.
    """
    if not record:
        return ""
    record = {key: value for key, value in record.items() if key != "datasets"}
    rows = {
        name: f"{value:,}" if type(value) is int else f"{value:.6g}" if isinstance(value, float) else f"{value}"
        for name, value in record.items()
    }
    return f"\n## Training\n\n| | |\n|---|---|\n{table_of(rows)}\n"


def model_card(model: Any, name: str) -> str:
    """A model's card.

    Args:
        model ([`EngramPreTrainedModel`]): what the card describes. Its attribute `training_record`, where a trainer
            has set it, is the section on training, see `training_section`.
        name: what the model is loaded by.
    """
    config = model.config
    class_name = next(cls.__name__ for cls in type(model).__mro__ if cls.__name__ in KINDS)
    task, auto_class, use = KINDS[class_name]
    memory, tables = model.base_model.engram_memory, _tables(model)
    in_tables = {id(parameter) for parameter in memory.parameters()} if memory is not None else set()
    rest = [parameter for parameter in model.parameters() if id(parameter) not in in_tables]
    dtype = max({p.dtype for p in rest}, key=lambda dtype: sum(p.numel() for p in rest if p.dtype == dtype))
    dense, dense_bytes = sum(p.numel() for p in rest), sum(p.nbytes for p in (*rest, *model.buffers()))
    table_bytes = sum(table[2] for table in tables)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    record = getattr(model, "training_record", None)
    base, licence = config.backbone_name, config.backbone_license

    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        tags=list(dict.fromkeys(["engram", "custom_code", *(model.model_tags or [])])),
        base_model=base,
        license=licence,
        datasets=(record or {}).get("datasets"),
    )
    text = CARD.format(
        name=name,
        kind="A causal language model" if task == "text-generation" else f"A model for {task.replace('-', ' ')}",
        origin=f" The decoder was converted from `{base}`." if base else "",
        auto_class=auto_class,
        use=use,
        architecture=table_of(_architecture(model, tables, dense, dense_bytes, _dtype(dtype))),
        memory=MEMORY.format(
            all=size(dense_bytes + table_bytes),
            rest=size(dense_bytes),
            tables=size(table_bytes),
            cache=size(per_token),
        )
        if tables
        else "",
        training=training_section(record),
        licence=f"The decoder that the model was converted from is under `{licence}`."
        if licence
        else "Nobody has stated one for the weights: add `license` to the metadata above.",
    )
    return mark(data, text, name)


def write_card(path: Path, content: str) -> None:
    """Writes a card, whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, path)


def write_model_card(model: Any, save_directory: str | os.PathLike, name: str | None = None) -> None:
    """Writes README.md into a saved model's folder, unless it has one that somebody wrote or changed.

    Args:
        model ([`EngramPreTrainedModel`]): what the card describes.
        save_directory: the folder.
        name: what the model is loaded by; the folder's name if not given.
    """
    path = Path(save_directory) / CARD_FILE
    if not is_somebodys(path):
        write_card(path, model_card(model, name or Path(save_directory).resolve().name))
