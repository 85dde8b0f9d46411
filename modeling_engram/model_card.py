"""The model card that a saved folder starts with."""

import os
from pathlib import Path


CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- engram
---

# {name}

A causal language model with Engram conditional memory (hashed n-gram tables, as in DeepSeek-V4.1) for 🤗 Transformers.
The folder holds its own code:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

| | |
|---|---|
| layers, width, copies of the residual stream | {layers}, {width}, {copies} |
| Engram layers | {engram_layers} |
| n-gram sizes, heads per size, width of a row | 2 to {max_ngram}, {heads}, {head_dim} |
| table rows | {rows} |
| parameters outside tables, in tables | {dense:,}, {table:,} |
"""


# By this, the card that Transformers puts over a pushed folder's own is known.
GENERATED_CARD = "This model card has been automatically generated."


def write_model_card(model, save_directory: str | os.PathLike, name: str | None = None) -> None:
    """Writes README.md into a saved model's folder, unless it has one that somebody wrote.

    Args:
        model ([`EngramPreTrainedModel`]): what the card describes.
        save_directory: the folder.
        name: what the model is loaded by; the folder's name if not given.
    """
    path = Path(save_directory) / "README.md"
    if path.exists() and GENERATED_CARD not in path.read_text(encoding="utf-8"):
        return
    config = model.config
    memory = model.base_model.engram_memory
    in_memory = sum(weight.numel() for weight in memory.parameters()) if memory is not None else 0
    card = CARD.format(
        name=name or Path(save_directory).resolve().name,
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        copies=config.hc_mult,
        engram_layers=", ".join(map(str, config.engram_layer_ids)) or "none",
        max_ngram=config.engram_max_ngram_size,
        heads=config.engram_n_heads,
        head_dim=config.engram_head_dim,
        rows=", ".join(f"{rows:,}" for rows in config.engram_num_embeddings) or "none",
        dense=sum(weight.numel() for weight in model.parameters()) - in_memory,
        table=sum(rows * config.engram_head_dim for rows in config.engram_num_embeddings),
    )
    path.write_text(card, encoding="utf-8")
