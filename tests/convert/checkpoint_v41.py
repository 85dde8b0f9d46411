"""Writes DeepSeek-V4.1 checkpoints to test with: names, dtypes and shapes of the release, random numbers or none."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from hf_engram.tokenization.ngram_hashing import build_layout


# Small sizes; rows of `wkv`, 5 * 40, fill no whole number of blocks.
SMALL = {
    "vocab_size": 320,
    "hidden_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 3,
    "engram_vocab_size": 50,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
    "engram_pad_token_id": 2,
}
RELEASED = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "rms_norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 16000000,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
    "engram_compressed_vocab_size": 99092,
}
ITEM_BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}


def text_config_of(fields: dict) -> dict:
    """With the number of rows of each table."""
    layout = build_layout(
        len(fields["engram_layer_ids"]),
        fields["engram_vocab_size"],
        fields["engram_max_ngram_size"],
        fields["engram_n_heads"],
    )
    return {**fields, "engram_num_embeddings": list(layout.num_embeddings)}


def tensors_of(config: dict) -> dict[str, tuple[str, list[int]]]:
    """dtype and shape of the memory's tensors."""
    width, copies, dim = config["hidden_size"], config["hc_mult"], config["engram_head_dim"]
    rows, columns = (copies + 1) * width, (config["engram_max_ngram_size"] - 1) * config["engram_n_heads"] * dim
    tensors = {}
    for layer_id, table_rows in zip(config["engram_layer_ids"], config["engram_num_embeddings"], strict=True):
        prefix = f"layers.{layer_id}.engram"
        tensors[f"{prefix}.embed.weight"] = "F8_E4M3", [table_rows, dim]
        tensors[f"{prefix}.embed.scale"] = "F8_E8M0", [table_rows, dim // 32]
        tensors[f"{prefix}.wkv.weight"] = "F8_E4M3", [rows, columns]
        tensors[f"{prefix}.wkv.scale"] = "F8_E8M0", [(rows + 31) // 32, columns // 32]
        tensors[f"{prefix}.q_weight"] = "BF16", [copies, width]
        tensors[f"{prefix}.k_weight"] = "BF16", [copies, width]
    return tensors


def random_bytes(dtype: str, shape: list[int], generator: np.random.Generator) -> bytes:
    """Numbers of a size that weights have."""
    count = int(np.prod(shape))
    if dtype == "F8_E8M0":
        return generator.integers(115, 124, count, dtype=np.uint8).tobytes()
    if dtype == "F8_E4M3":
        # All bytes but the two that are not numbers.
        values = generator.integers(0, 127, count, dtype=np.uint8) | generator.integers(0, 2, count, np.uint8) << 7
        return values.tobytes()
    values = generator.normal(1.0, 0.3, count).astype("<f4")
    return (values.view("<u4") >> 16).astype("<u2").tobytes()


def write_shard(path: Path, tensors: dict[str, tuple[str, list[int]]], contents: dict[str, bytes] | None) -> None:
    """A safetensors file with these bytes, or, for None, a hole in their place."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = int(np.prod(shape)) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in tensors if contents is not None else ():
            file.write(contents[name])
    os.truncate(path, 8 + len(text) + at)


def write_rows(path: Path, name: str, row_ids: Iterable[int], rows: bytes) -> None:
    """Fills rows of a tensor in a shard that is there, `rows` being their bytes one after the other."""
    with open(path, "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        tensor = json.loads(file.read(length))[name]
        size = tensor["shape"][1] * ITEM_BYTES[tensor["dtype"]]
        for number, row_id in enumerate(row_ids):
            file.seek(8 + length + tensor["data_offsets"][0] + row_id * size)
            file.write(rows[number * size : (number + 1) * size])


def write_checkpoint(folder: Path, tokenizer: Path, config: dict, contents: dict[str, bytes] | None) -> None:
    """A checkpoint in which, as in the release, each Engram layer has a shard of its own; the index names two others,
    of the backbone, that are not there.

    Args:
        tokenizer: folder with the tokenizer.
        config: the `text_config`.
        contents: bytes of all tensors; None for sparse files.
    """
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    top = {"model_type": "deepseek_v41", "architectures": ["DeepseekV41ForCausalLM"], "text_config": config}
    (folder / "config.json").write_text(json.dumps(top))
    layer_ids, tensors = config["engram_layer_ids"], tensors_of(config)
    count = 2 + len(layer_ids)
    weight_map = {"embed.weight": f"model-00001-of-{count:05d}.safetensors"}
    weight_map["layers.0.attn.wq_a.weight"] = f"model-00002-of-{count:05d}.safetensors"
    for number, layer_id in enumerate(layer_ids, start=3):
        shard = f"model-{number:05d}-of-{count:05d}.safetensors"
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(f"layers.{layer_id}.")}
        write_shard(folder / shard, own, contents)
        weight_map |= dict.fromkeys(own, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
