"""The memory of a DeepSeek-V4.1 checkpoint: its tables left where they are, its Engram layers, its tokenizer.

A checkpoint holds, for each layer i of `engram_layer_ids`, in safetensors shards,

    layers.{i}.engram.embed.weight   F8_E4M3 [rows, d]
    layers.{i}.engram.embed.scale    F8_E8M0 [rows, d / 32]
    layers.{i}.engram.wkv.weight     F8_E4M3 [(H + 1) * D, C * d]
    layers.{i}.engram.wkv.scale      F8_E8M0 [(H + 1) * D / 32, C * d / 32]
    layers.{i}.engram.q_weight       BF16 [H, D]
    layers.{i}.engram.k_weight       BF16 [H, D]

and the fields that lay out the tables under `text_config` of config.json. [`import_memory`] makes a small folder of
it, which [`load_memory`] loads. Of the backbone nothing is read: its layers are not those of [`EngramForCausalLM`], so
the memory comes alone.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn

from .configuration.configuration_engram import EngramConfig
from .modeling_engram.engram_layer import EngramLayer
from .modeling_engram.engram_memory import EngramMemory
from .modeling_engram.ops.gather_rows import gather_rows
from .modeling_engram.table_saving import nbytes, write_tensors
from .modeling_engram.table_storage import (
    INDEX_FILE,
    SINGLE_FILE,
    MappedTensor,
    TensorEntry,
    open_table,
    read_header,
)
from .tokenization.tokenization_engram import EngramTokenizer


# Of the folder that `import_memory` makes: the Engram layers' weights, and where the tables are.
LAYERS_FILE, TABLES_FILE = "engram_layers.safetensors", "engram_tables.json"
# Rows and columns of a weight, and columns of a table, that share one scale.
BLOCK = 32
# Rows of a weight that are dequantised at a time, so that little memory is needed.
ROWS_AT_A_TIME = 512
# Fields of `text_config` without which nothing can be computed, and others that `EngramConfig` has under their names.
REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "hc_mult",
    "engram_layer_ids",
    "engram_max_ngram_size",
    "engram_vocab_size",
    "engram_n_heads",
    "engram_head_dim",
    "engram_pad_token_id",
    "engram_compressed_vocab_size",
    "engram_num_embeddings",
)
OTHER_FIELDS = (
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "hc_sinkhorn_iters",
    "hc_eps",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
TOKENIZER_FIELDS = ("layer_ids", "vocab_size", "max_ngram_size", "n_heads", "pad_token_id")
# Tokenizer, code and configuration, generously.
OTHER_FILES_BYTES = 64 * 2**20


class ReleasedMemory(nn.Module):
    """A checkpoint's memory, as [`load_memory`] gives it: everything that Engram is between token ids and the stream.

    Its parameters are those of `layers`, frozen, in bf16; `.float()`, `.to(device)` and the like do with them as with
    any module, and leave the tables on disk.

    Attributes:
        config ([`EngramConfig`]): layout of the tables, and sizes of the layers. Fields of a backbone are only there
            because the class has them.
        tokenizer ([`EngramTokenizer`]): the checkpoint's, which hashes what it encodes.
        engram_memory ([`EngramMemory`]): the tables, in the order of `config.engram_layer_ids`.
        layers (`nn.ModuleList` of [`EngramLayer`]): in the same order.
    """

    def __init__(self, config: EngramConfig, tokenizer: EngramTokenizer) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.engram_memory = EngramMemory(config)
        # Weights are mapped from their file: they come with `load_state_dict(assign=True)`.
        with torch.device("meta"):
            self.layers = nn.ModuleList(EngramLayer(config) for _ in config.engram_layer_ids)

    def forward(self, hash_ids: torch.Tensor) -> list[torch.Tensor]:
        """Looks up the rows of every Engram layer.

        Args:
            hash_ids: int64 `[B, L, n_engram_layers, C]`, as the tokenizer gives them.

        Returns:
            list of `[B, L, C * engram_head_dim]`, one per Engram layer, in the dtype of the layers and on the device
            of `hash_ids`: what `layers[i]` and `layers[i].read` take.

        Raises:
            IndexError: an id beyond the last row. RuntimeError: a table's file was changed since it was opened.
        """
        return self.engram_memory(hash_ids, dtype=self.layers[0].wkv.weight.dtype)


class DequantisedWeight:
    """A weight in fp8 with a scale per block of 32 x 32, as bf16 `[rows, columns]`, to be written block by block.

    weight[r, c] * 2^(scale[r // 32, c // 32] - 127) has the four significant bits of e4m3. bf16 has eight and the
    range of fp32, so it holds the product exactly, unless that is below its smallest number; then `chunks` raises.

    Args:
        weight ([`MappedTensor`]): float8_e4m3fn `[rows, columns]`, columns a multiple of 32.
        scale ([`MappedTensor`]): float8_e8m0fnu `[ceil(rows / 32), columns / 32]`.
    """

    dtype = torch.bfloat16

    def __init__(self, weight: MappedTensor, scale: MappedTensor) -> None:
        self.weight, self.scale, self.shape = weight, scale, weight.shape

    def chunks(self) -> Iterator[torch.Tensor]:
        scales, row = torch.cat(list(self.scale.chunks())).view(torch.uint8), 0
        for block in self.weight.chunks():
            for part in block.split(ROWS_AT_A_TIME):
                rows = torch.arange(len(part))
                scale = scales[(row + rows) // BLOCK]
                row += len(part)
                yield self._dequantised(part, rows.unsqueeze(-1), scale.view(self.scale.dtype))

    def _dequantised(self, weight: torch.Tensor, row_ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        values = gather_rows(weight, row_ids, scale, self.dtype)
        # Magnitudes of e4m3 go from 2^-9 to 448, those of bf16 from 2^-133 to below 2^128. 0x7F and 0xFF are NaN.
        powers = scale.view(torch.uint8)
        is_exact = powers.min() >= 3 and powers.max() <= 246 and (weight.view(torch.uint8) & 0x7F).max() < 0x7F
        if not is_exact:
            exact = gather_rows(weight, row_ids, scale, torch.float32)
            is_exact = torch.isfinite(exact).all() and torch.equal(values.float(), exact)
        if not is_exact:
            entry = self.weight.entry
            raise ValueError(
                f"{entry.name} in {entry.path} times its scales has values that are not finite or too small for bf16, "
                "as no weight has: fetch the file again."
            )
        return values


def import_memory(checkpoint: str | os.PathLike, output: str | os.PathLike) -> EngramConfig:
    """Makes a folder with which the memory of a DeepSeek-V4.1 checkpoint can be used.

    It holds config.json, the tokenizer with its map to compressed ids, the Engram layers' weights in bf16 (which is
    exact), and the place of the shards that hold the tables. Those are read where they are, so they must stay there,
    unchanged; shards that hold nothing of the memory need not be there at all. The folder appears when it is complete,
    or not at all.

    Args:
        checkpoint: folder with config.json, tokenizer.json, and model.safetensors.index.json with its shards, or
            model.safetensors.
        output: folder to make, outside the checkpoint; must not exist, or be empty.

    Returns:
        [`EngramConfig`]: the memory's.

    Raises:
        FileNotFoundError: a file is missing, or a shard that the index names for a tensor of the memory.
        ValueError: `output` cannot be written to; or the configuration, a tensor's dtype or shape (such as a table's
            number of rows) or the tokenizer's map does not fit; or a weight is not finite. OSError: no room.
    """
    checkpoint = Path(checkpoint).resolve()
    output = _check_output(Path(output), checkpoint)
    fields, expected_map = _read_fields(checkpoint / "config.json")
    config = _checked(checkpoint / "config.json", EngramConfig, **fields)
    entries = _find_tensors(checkpoint, config)
    weights = _layer_weights(config, entries)
    tokenizer = _load_tokenizer(checkpoint, config, expected_map)
    config = EngramConfig(**{**fields, **tokenizer.engram_fields()})

    parent = next(folder for folder in output.parents if folder.is_dir())
    needed, free = sum(map(nbytes, weights.values())) + OTHER_FILES_BYTES, shutil.disk_usage(parent).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"The folder takes about {needed:,} bytes, {free:,} are free; nothing was written",
            str(parent),
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    staged = output.parent / f".{output.name}.importing-{os.getpid()}-{secrets.token_hex(4)}"
    staged.mkdir()
    try:
        config.save_pretrained(staged)
        _save_tokenizer(tokenizer, checkpoint, staged)
        write_tensors(staged / LAYERS_FILE, weights)
        text = json.dumps(_reference(checkpoint, config, entries), indent=2) + "\n"
        (staged / TABLES_FILE).write_text(text, encoding="utf-8")
        if output.exists():
            output.rmdir()
        os.rename(staged, output)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return config


def load_memory(folder: str | os.PathLike) -> ReleasedMemory:
    """Loads what [`import_memory`] made: within a few seconds and, whatever the tables' size, little memory, since
    tables and weights are mapped and read when they are used.

    Raises:
        FileNotFoundError: not such a folder, or a shard with tables is gone.
        ValueError: a shard was changed since it was imported, or the folder's files do not belong together.
    """
    folder = Path(folder)
    if not (folder / TABLES_FILE).is_file():
        raise FileNotFoundError(
            f"{folder} has no {TABLES_FILE}: make a folder from a DeepSeek-V4.1 checkpoint with "
            "`scripts/import_deepseek_v41.py` first."
        )
    config = EngramConfig.from_pretrained(folder, engram_placement="disk")
    entries = _referenced_tables(folder / TABLES_FILE, config)
    tokenizer = EngramTokenizer.from_pretrained(folder)
    for name, value in tokenizer.engram_fields().items():
        if value != getattr(config, name):
            raise ValueError(
                f"The tokenizer in {folder} has `{name}` {value!r}, config.json has {getattr(config, name)!r}: they "
                "are not of one import, and every hash would be wrong. Import the checkpoint again."
            )
    memory = ReleasedMemory(config, tokenizer)
    for layer_id, table in zip(config.engram_layer_ids, memory.engram_memory.tables, strict=True):
        table.open(open_table(entries, *_table_names(layer_id)))
    try:
        with safe_open(folder / LAYERS_FILE, framework="pt") as file:
            for layer_id, layer in zip(config.engram_layer_ids, memory.layers, strict=True):
                state = {name: file.get_tensor(f"layers.{layer_id}.engram.{name}") for name in layer.state_dict()}
                layer.load_state_dict(state, assign=True)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"{folder / LAYERS_FILE} does not hold the weights of config.json ({error}): import again."
        ) from error
    return memory.requires_grad_(False).eval()


def _table_names(layer_id: int) -> tuple[str, str]:
    return f"layers.{layer_id}.engram.embed.weight", f"layers.{layer_id}.engram.embed.scale"


def _check_output(output: Path, checkpoint: Path) -> Path:
    if output.exists() and not output.is_dir():
        raise ValueError(f"`output` ({output}) is a file: name a folder to make.")
    output = output.resolve()
    if output == checkpoint or checkpoint in output.parents:
        raise ValueError(f"`output` ({output}) lies in the checkpoint, which is only read: name a folder elsewhere.")
    if output.is_dir() and any(output.iterdir()):
        raise ValueError(f"`output` ({output}) holds files, which would be overwritten: name another folder.")
    return output


def _read_json(path: Path, **kinds: type) -> list[Any]:
    """What a JSON file holds under these names, each of its kind."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: `checkpoint` must be the folder of a DeepSeek-V4.1 checkpoint.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch or import it again.") from error
    for name, kind in kinds.items():
        if not isinstance(content, dict) or not isinstance(content.get(name), kind):
            raise ValueError(f"{path} has no `{name}` ({kind.__name__}), as that of a DeepSeek-V4.1 checkpoint has.")
    return [content[name] for name in kinds]


def _read_fields(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of config.json, the fields of an `EngramConfig`; and what it says of the token map, which a release may not."""
    (text_config,) = _read_json(path, text_config=dict)
    missing = [name for name in REQUIRED_FIELDS if text_config.get(name) is None]
    if missing:
        raise ValueError(f"The `text_config` of {path} lacks {missing}: it is not a DeepSeek-V4.1 checkpoint's.")
    if not text_config["engram_layer_ids"]:
        raise ValueError(f"`engram_layer_ids` in the `text_config` of {path} is empty: there is no memory to import.")
    names = [name for name in (*REQUIRED_FIELDS, *OTHER_FIELDS) if text_config.get(name) is not None]
    fields = {name: text_config[name] for name in names}
    fields |= {"engram_scale_block_size": BLOCK, "engram_placement": "disk", "dtype": "bfloat16"}
    map_fields = ("engram_token_map_size", "engram_token_map_sha256")
    return fields, {name: text_config[name] for name in map_fields if text_config.get(name) is not None}


def _checked(path: Path, make: Any, *args: Any, **kwargs: Any) -> Any:
    try:
        return make(*args, **kwargs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _expected_tensors(config: EngramConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of every tensor of the memory."""
    dim, copies, width = config.engram_head_dim, config.hc_mult, config.hidden_size
    rows, columns = (copies + 1) * width, (config.engram_max_ngram_size - 1) * config.engram_n_heads * dim
    expected = {}
    for layer_id, table_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
        weight, scale = _table_names(layer_id)
        expected |= {
            weight: ("F8_E4M3", (table_rows, dim)),
            scale: ("F8_E8M0", (table_rows, dim // BLOCK)),
            f"layers.{layer_id}.engram.wkv.weight": ("F8_E4M3", (rows, columns)),
            f"layers.{layer_id}.engram.wkv.scale": ("F8_E8M0", (-(-rows // BLOCK), columns // BLOCK)),
            f"layers.{layer_id}.engram.q_weight": ("BF16", (copies, width)),
            f"layers.{layer_id}.engram.k_weight": ("BF16", (copies, width)),
        }
    return expected


def _find_tensors(checkpoint: Path, config: EngramConfig) -> dict[str, TensorEntry]:
    """Where the memory's tensors are, all of the right dtype and shape. Reads only headers, of the shards that hold
    them: the others may be missing."""
    if config.engram_head_dim % BLOCK:
        raise ValueError(
            f"`engram_head_dim` in {checkpoint / 'config.json'} is {config.engram_head_dim}, not a multiple of the "
            f"{BLOCK} columns that share a scale: it is not a DeepSeek-V4.1 checkpoint's."
        )
    expected = _expected_tensors(config)
    if (checkpoint / SINGLE_FILE).is_file():
        entries = read_header(checkpoint / SINGLE_FILE)
    else:
        (weight_map,) = _read_json(checkpoint / INDEX_FILE, weight_map=dict)
        named = [weight_map[name] for name in expected if name in weight_map]
        for name in named:
            if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(
                    f"{checkpoint / INDEX_FILE} places tensors of the memory in {name!r}, which is no file in the "
                    "folder: fetch the index again."
                )
        shards = sorted(set(named))
        if absent := [name for name in shards if not (checkpoint / name).is_file()]:
            raise FileNotFoundError(
                f"{checkpoint} lacks {absent}, in which {INDEX_FILE} places tensors of the memory: fetch them."
            )
        entries = {}
        for name in shards:
            entries |= read_header(checkpoint / name)
    problems = []
    for name, (dtype, shape) in expected.items():
        entry = entries.get(name)
        if entry is None:
            problems.append(f"{name} is missing")
        elif (entry.dtype, entry.shape) != (dtype, shape):
            problems.append(f"{name} is {entry.dtype} {list(entry.shape)}, not {dtype} {list(shape)}")
    if problems:
        raise ValueError(
            f"The tensors in {checkpoint} are not those that its config.json asks for: {'; '.join(problems)}. Fetch "
            "the checkpoint again, or restore its config.json."
        )
    return {name: entries[name] for name in expected}


def _layer_weights(config: EngramConfig, entries: dict[str, TensorEntry]) -> dict[str, Any]:
    """What is written for the Engram layers. Opens every tensor of the memory, which finds damaged files."""
    weights = {}
    for layer_id in config.engram_layer_ids:
        open_table(entries, *_table_names(layer_id))
        prefix = f"layers.{layer_id}.engram"
        wkv = (MappedTensor(entries[f"{prefix}.wkv.{part}"]) for part in ("weight", "scale"))
        weights[f"{prefix}.wkv.weight"] = DequantisedWeight(*wkv)
        for name in ("q_weight", "k_weight"):
            entry = entries[f"{prefix}.{name}"]
            weights[entry.name] = MappedTensor(entry)
            if not all(torch.isfinite(part).all() for part in weights[entry.name].chunks()):
                raise ValueError(f"{entry.name} in {entry.path} has values that are not finite: fetch the file again.")
    return weights


def _load_tokenizer(checkpoint: Path, config: EngramConfig, expected_map: dict[str, Any]) -> EngramTokenizer:
    """The checkpoint's tokenizer with the layout of the tables; builds its map, and compares it."""
    if not (checkpoint / "tokenizer.json").is_file():
        raise FileNotFoundError(f"{checkpoint} has no tokenizer.json: fetch the checkpoint's tokenizer, too.")
    layout = {f"engram_{name}": getattr(config, f"engram_{name}") for name in TOKENIZER_FIELDS}
    try:
        tokenizer = EngramTokenizer.from_pretrained(checkpoint, **layout)
    except Exception as error:  # the tokenizers library raises no narrower one
        raise ValueError(f"The tokenizer in {checkpoint} cannot be loaded ({error}): fetch it again.") from error
    fields = tokenizer.engram_fields()
    if fields["engram_token_map_size"] > config.vocab_size:
        raise ValueError(
            f"The tokenizer in {checkpoint} has {fields['engram_token_map_size']} ids, config.json a `vocab_size` of "
            f"{config.vocab_size}: it is another model's tokenizer."
        )
    expected = {"engram_compressed_vocab_size": config.engram_compressed_vocab_size, **expected_map}
    for name, value in expected.items():
        if fields[name] != value:
            raise ValueError(
                f"The tokenizer in {checkpoint} has `{name}` {fields[name]!r}, config.json has {value!r}: it is not "
                "the tokenizer that the tables were made with, and every hash would be wrong. Fetch that one."
            )
    return tokenizer


def _save_tokenizer(tokenizer: EngramTokenizer, checkpoint: Path, folder: Path) -> None:
    """Saves it with the checkpoint's own tokenizer.json, if that is all of it: older files list merges in a form that
    the tokenizers library loads within much less memory than what it writes."""
    tokenizer.save_pretrained(folder)
    own = checkpoint / "tokenizer.json"
    if Tokenizer.from_file(str(own)).to_str() == tokenizer.backend_tokenizer.to_str():
        shutil.copyfile(own, folder / own.name)


def _reference(checkpoint: Path, config: EngramConfig, entries: dict[str, TensorEntry]) -> dict[str, Any]:
    """Where the tables are, and by what a file that was changed since is known.

    A path, not a link to the file: a link would make every copy or upload of the folder one of the tables.
    """
    names = [name for layer_id in config.engram_layer_ids for name in _table_names(layer_id)]
    files = {}
    for path in sorted({entries[name].path for name in names}):
        stat = path.stat()
        files[str(path.relative_to(checkpoint))] = {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns}
    tensors = {name: str(entries[name].path.relative_to(checkpoint)) for name in names}
    return {"checkpoint": str(checkpoint), "files": files, "tensors": tensors}


def _referenced_tables(path: Path, config: EngramConfig) -> dict[str, TensorEntry]:
    """The tables that `_reference` noted, if their files are as they were."""
    checkpoint, files, tensors = _read_json(path, checkpoint=str, files=dict, tensors=dict)
    remedy = "Bring it back, or import the checkpoint again from where it is now."
    entries: dict[str, TensorEntry] = {}
    for name, known in files.items():
        file = Path(checkpoint) / name
        try:
            stat = file.stat()
        except OSError as error:
            raise FileNotFoundError(
                f"{file}, in which {path} places tables, cannot be found ({error.strerror}). {remedy}"
            ) from error
        if {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns} != known:
            raise ValueError(f"{file}, in which {path} places tables, was changed since the import. {remedy}")
        entries |= read_header(file)
    names = {name for layer_id in config.engram_layer_ids for name in _table_names(layer_id)}
    if names != set(tensors) or not names <= set(entries):
        raise ValueError(f"{path} does not name the tables of config.json: import the checkpoint again.")
    return {name: entries[name] for name in names}


__all__ = ["ReleasedMemory", "import_memory", "load_memory"]
