"""Dtypes and loading: nothing is cast that must not be, and a folder that is not whole does not load."""

import copy
import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_engram import (
    EngramConfig,
    EngramForCausalLM,
    EngramForSequenceClassification,
    EngramForTokenClassification,
    EngramModel,
)


WEIGHTS = "model.safetensors"


def assert_dtypes(model, dtype: torch.dtype) -> None:
    """Stream parameters are fp32, the hash's constants integers, all other parameters `dtype`."""
    assert model.dtype == dtype
    for name, parameter in model.named_parameters():
        in_stream = ".attn_hc." in name or ".mlp_hc." in name
        assert parameter.dtype == (torch.float32 if in_stream else dtype), name
    hasher = model.base_model.engram_hasher
    assert {"token_map", "multipliers", "primes", "offsets"} <= hasher.constants().keys()
    for name, value in hasher.constants().items():
        assert getattr(hasher, name).dtype == value.dtype in (torch.int32, torch.int64), name


def assert_close_to_fp32(model, reference, ids: torch.Tensor) -> None:
    """The same rows, and logits that are near: an error of a dropped scale or a rounded constant is far larger."""
    assert torch.equal(model.compute_hash_ids(ids), reference.compute_hash_ids(ids))
    with torch.no_grad():
        actual, expected = model(ids).logits.float(), reference(ids).logits
    assert torch.isfinite(actual).all()
    assert (actual - expected).norm() / expected.norm() < 0.1


CASTS = {
    "half": (lambda model: model.half(), torch.float16),
    "to_bf16": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16),
    "bf16_and_back": (lambda model: model.to(torch.bfloat16).float(), torch.float32),
}


@pytest.mark.parametrize("cast", CASTS)
def test_cast(model, own_model, draw, generate, cast):
    """`.half()` and `.to(bf16)` rounded the hash's constants or the stream's parameters."""
    function, dtype = CASTS[cast]
    cast_model = function(own_model)
    assert_dtypes(cast_model, dtype)
    for (name, before), (_, after) in zip(model.named_parameters(), cast_model.named_parameters(), strict=True):
        if ".attn_hc." in name or ".mlp_hc." in name:
            assert torch.equal(after, before), name
    assert_close_to_fp32(cast_model, model, draw(2, 7))
    assert generate(cast_model, draw(2, 5), 3).shape == (2, 8)


@pytest.mark.parametrize("saved_in", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", torch.float16, None], ids=str)
def test_dtype_on_loading(model, own_model, draw, tmp_path, saved_in, dtype):
    """`dtype="auto"` loaded the stream's fp32 parameters in 16 bits, or the whole model in fp32."""
    own_model.to(saved_in).save_pretrained(tmp_path)
    loaded = EngramForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    # No dtype is "auto", since Transformers 5.
    assert_dtypes(loaded, {"auto": saved_in, None: saved_in, "bfloat16": torch.bfloat16}.get(dtype, dtype))
    assert_close_to_fp32(loaded, model, draw(2, 7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_default_dtype(model, saved_folder, draw, dtype):
    """`torch.set_default_dtype` of 16 bits made the constants' arithmetic, or half the parameters, 16 bits."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        built = EngramForCausalLM(copy.deepcopy(model.config))
        rows = model.compute_hash_ids(draw(2, 7))
        with torch.no_grad():
            logits = model(draw(2, 7)).logits
        loaded = EngramForCausalLM.from_pretrained(saved_folder, dtype=torch.float32).eval()
        loaded_rows = loaded.compute_hash_ids(draw(2, 7))
    finally:
        torch.set_default_dtype(before)
    assert built.model.embed_tokens.weight.dtype == dtype
    for name, parameter in built.named_parameters():
        if ".attn_hc." in name or ".mlp_hc." in name:
            assert parameter.dtype == torch.float32, name
    assert torch.equal(rows, model.compute_hash_ids(draw(2, 7)))
    assert torch.equal(loaded_rows, rows)
    with torch.no_grad():
        torch.testing.assert_close(logits, model(draw(2, 7)).logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(loaded(draw(2, 7)).logits, logits, atol=1e-4, rtol=1e-4)


def test_default_device_meta(model, draw, left_padded):
    """Under `torch.set_default_device("meta")` a constant made in forward had no device of its own, hence no value."""
    ids, mask = left_padded([draw(1, 7, 1), draw(1, 3, 2)])
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    rows = model.compute_hash_ids(ids, attention_mask=mask)
    fresh = copy.deepcopy(model)
    fresh.model.engram_hasher.is_checked = False
    positions = torch.arange(7)[None]
    try:
        torch.set_default_device("meta")
        built = EngramForCausalLM(copy.deepcopy(model.config))
        actual_rows = fresh.compute_hash_ids(ids, attention_mask=mask)
        packed_rows = fresh.compute_hash_ids(ids, position_ids=positions)
    finally:
        torch.set_default_device(None)
    assert all(tensor.is_meta for tensor in [*built.parameters(), *built.buffers()])
    assert torch.equal(actual_rows, rows)
    assert torch.equal(packed_rows, model.compute_hash_ids(ids))
    # A skeleton takes the weights, and then is the model.
    built.load_state_dict(model.state_dict(), assign=True)
    built.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    built.tie_weights()
    with torch.no_grad():
        logits = built.eval()(input_ids=ids, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(model, own_model, draw, dtype):
    """Under autocast the fp32 parts (gate, stream) ran in 16 bits, or a table of another dtype stopped the run."""
    ids = draw(2, 7)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        actual = model(ids).logits.float()
        rows = model.compute_hash_ids(ids)
    with torch.no_grad():
        expected = model(ids).logits
    assert torch.equal(rows, model.compute_hash_ids(ids))
    assert (actual - expected).norm() / expected.norm() < 0.1
    with torch.autocast("cpu", dtype=dtype):
        own_model.train()(ids, labels=ids).loss.backward()
    for name, parameter in own_model.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name


@pytest.fixture
def folder(model, tmp_path) -> Path:
    """A folder with the model under test, to be spoilt."""
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit_weights(folder: Path, change) -> None:
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}


def keys_of(model) -> dict[str, str]:
    first = model.config.engram_layer_ids[0]
    return {
        "table": "model.engram_memory.tables.0.weight",
        "wkv": f"model.layers.{first}.engram.wkv.weight",
        "q_weight": f"model.layers.{first}.engram.q_weight",
        "token_map": "model.engram_hasher.token_map",
        "multipliers": "model.engram_hasher.multipliers",
        "primes": "model.engram_hasher.primes",
        "attention": "model.layers.0.self_attn.q_proj.weight",
        "embedding": "model.embed_tokens.weight",
        "norm": "model.norm.weight",
        "fn": "model.layers.1.mlp_hc.fn",
    }


PARTS = ["table", "wkv", "q_weight", "token_map", "multipliers", "primes", "attention", "embedding", "norm", "fn"]


def key_of(model, part: str) -> str:
    """The key of a part of the model; without a stream of several copies, another part stands for its `fn`."""
    if part == "fn" and model.config.hc_mult == 1:
        return "model.layers.1.mlp.up_proj.weight"
    return keys_of(model)[part]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("auto", [False, True], ids=["class", "auto"])
def test_missing_key(model, folder, part, auto):
    """Weights that were not in the file were initialised at random, with a warning that nobody read."""
    key = key_of(model, part)
    edit_weights(folder, lambda state: state.pop(key))
    with pytest.raises((ValueError, RuntimeError)) as raised:
        (AutoModelForCausalLM if auto else EngramForCausalLM).from_pretrained(folder)
    assert key in str(raised.value)


@pytest.mark.parametrize(
    "key",
    [
        "model.engram_memory.tables.3.weight",
        "model.engram_hasher.scales",
        "model.engram_memory.tables.0.scale",
        "model.layers.0.engram.bias",
        "model.layers.9.engram.wkv.weight",
        "model.layers.9.self_attn.q_proj.weight",
        "engram_memory.tables.7.weight",
    ],
)
def test_unexpected_key(folder, key):
    """Weights with no place in the model (a fourth table, a quantised table's scales) were dropped silently."""
    edit_weights(folder, lambda state: state.update({key: torch.ones(3)}))
    with pytest.raises((ValueError, RuntimeError)) as raised:
        EngramForCausalLM.from_pretrained(folder)
    assert key in str(raised.value)


@pytest.mark.parametrize("part", PARTS)
def test_mis_shaped_key(model, folder, part, caplog):
    """A table of another number of rows was replaced by a random one."""
    key = key_of(model, part)
    edit_weights(folder, lambda state: state.update({key: state[key][:-1].clone()}))
    with pytest.raises((ValueError, RuntimeError)) as raised:
        EngramForCausalLM.from_pretrained(folder)
    # Transformers' error points to a report in the log; nothing else but the key may be reported there.
    report = str(raised.value) + caplog.text
    assert key.rpartition(".")[2] in report and key.split(".")[-2] in report
    assert not {"MISSING", "UNEXPECTED"} & set(report.split())


@pytest.mark.parametrize("part", ["table", "attention"])
def test_mis_shaped_key_that_may_be_ignored(model, folder, part):
    """`ignore_mismatched_sizes=True` means what it means for every model: that weight is new, with a warning."""
    key = key_of(model, part)
    edit_weights(folder, lambda state: state.update({key: state[key][:-1].clone()}))
    loaded, report = EngramForCausalLM.from_pretrained(folder, ignore_mismatched_sizes=True, output_loading_info=True)
    assert key in str(report["mismatched_keys"])
    state = loaded.state_dict()
    for name, value in model.state_dict().items():
        assert state[name].shape == value.shape
        assert torch.equal(state[name], value) == (name != key), name


@pytest.mark.parametrize("cls", [EngramForSequenceClassification, EngramForTokenClassification])
def test_new_head(model, saved_folder, cls):
    """A new head on a trained decoder is no missing key: only Transformers' usual warning."""
    loaded, report = cls.from_pretrained(saved_folder, num_labels=3, output_loading_info=True)
    assert report["missing_keys"] and all(key.startswith("score.") for key in report["missing_keys"])
    for name, value in model.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name
    assert torch.isfinite(loaded.score.weight).all()


def test_decoder_without_its_head(model, saved_folder, tmp_path):
    """The decoder alone loads from a model with a head, and a head from the decoder's folder."""
    decoder = EngramModel.from_pretrained(saved_folder)
    for name, value in model.model.state_dict().items():
        assert torch.equal(decoder.state_dict()[name], value), name
    decoder.save_pretrained(tmp_path)
    loaded, report = EngramForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(report["missing_keys"]) == (set() if model.config.tie_word_embeddings else {"lm_head.weight"})
    for name, value in model.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value), name


@pytest.mark.parametrize("left", [0, 4, 200, 0.5, 0.99, -1])
def test_truncated_file(folder, left):
    """A download that broke off loaded as far as it went."""
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: int(left * len(content)) if isinstance(left, float) else left])
    before = digests(folder)
    with pytest.raises(Exception, match=r"(?i)header|metadata|incomplete|safetensors|invalid") as raised:
        EngramForCausalLM.from_pretrained(folder)
    assert not isinstance(raised.value, (AttributeError, KeyError))
    assert digests(folder) == before


@pytest.mark.parametrize("where", ["length", "header", "constants"])
def test_corrupted_file(model, folder, where):
    """Damaged bytes in the header or in the hash's constants went unnoticed, and every lookup was wrong."""
    content = bytearray((folder / WEIGHTS).read_bytes())
    start = {"length": 2, "header": 8}.get(where)
    if start is None:
        header_length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + header_length])
        start = 8 + header_length + header["model.engram_hasher.token_map"]["data_offsets"][0] + 4 * 7
    content[start] ^= 0x01 if where == "constants" else 0xFF
    (folder / WEIGHTS).write_bytes(content)
    before = digests(folder)
    expected = "sha256|token map" if where == "constants" else "(?i)header|metadata|safetensors"
    if where == "constants" and model.config.engram_token_map_sha256 is None:
        pytest.skip("the model was made without a tokenizer, so there is no digest to tell by")
    with pytest.raises(Exception, match=expected):
        EngramForCausalLM.from_pretrained(folder)
    assert digests(folder) == before


CHANGES = {
    "engram_layer_ids": lambda config: [(i + 1) % config["num_hidden_layers"] for i in config["engram_layer_ids"]],
    "engram_max_ngram_size": lambda config: config["engram_max_ngram_size"] + 1,
    "engram_vocab_size": lambda config: 2 * config["engram_vocab_size"],
    "engram_n_heads": lambda config: config["engram_n_heads"] + 1,
    "engram_compressed_vocab_size": lambda config: config["engram_compressed_vocab_size"] - 1,
    "engram_token_map_sha256": lambda config: "0" * 64,
    "engram_pad_token_id": lambda config: config["engram_pad_token_id"] + 5,
}


@pytest.mark.parametrize("field", CHANGES)
def test_config_with_another_layout(folder, field, caplog):
    """A layout field edited in config.json gave a model whose every lookup reads a stranger's row."""
    config = json.loads((folder / "config.json").read_text())
    if field == "engram_token_map_sha256" and config.get(field) is None:
        pytest.skip("the model was made without a tokenizer, so there is no digest to tell by")
    config[field] = sorted(CHANGES[field](config)) if field == "engram_layer_ids" else CHANGES[field](config)
    config.pop("engram_num_embeddings")
    (folder / "config.json").write_text(json.dumps(config))
    before = digests(folder)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        EngramForCausalLM.from_pretrained(folder)
    assert "engram" in str(raised.value) + caplog.text
    assert digests(folder) == before


@pytest.mark.parametrize("field", [name for name in CHANGES if name != "engram_token_map_sha256"])
def test_saving_with_another_layout(own_model, folder, field):
    """A layout field set on a living model's config overwrote a good folder with one that does not load."""
    config = own_model.config
    own_model.compute_hash_ids(torch.zeros(1, 2, dtype=torch.long))
    fields = config.to_dict()
    value = sorted(CHANGES[field](fields)) if field == "engram_layer_ids" else CHANGES[field](fields)
    changed = EngramConfig.from_dict({**fields, field: value, "engram_num_embeddings": None})
    setattr(config, field, value)
    config.engram_num_embeddings = changed.engram_num_embeddings
    before = digests(folder)
    with pytest.raises(ValueError, match=r"engram_|hash constant"):
        own_model.save_pretrained(folder)
    assert digests(folder) == before


LOADERS = {
    "plain": {},
    "low_cpu_mem_usage": {"low_cpu_mem_usage": True},
    "device_map": {"device_map": "cpu"},
    "device_map_dict": {"device_map": {"": "cpu"}},
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("cls", [EngramForCausalLM, EngramModel, EngramForSequenceClassification])
def test_no_buffer_is_left_uninitialised(model, saved_folder, plain_greedy, draw, loader, cls):
    """A buffer that is not in the file came from the meta device as whatever was in memory."""
    loaded = cls.from_pretrained(saved_folder, **LOADERS[loader]).eval()
    fresh = cls(EngramConfig.from_pretrained(saved_folder))
    buffers, expected = dict(loaded.named_buffers()), dict(fresh.named_buffers())
    assert buffers.keys() == expected.keys()
    assert any("inv_freq" in name for name in buffers)
    for name, buffer in buffers.items():
        assert not buffer.is_meta and buffer.dtype == expected[name].dtype, name
        if name.endswith("token_map"):
            assert torch.equal(buffer, model.model.engram_hasher.token_map)
        else:
            assert torch.equal(buffer, expected[name]), name
    assert not any(parameter.is_meta for parameter in loaded.parameters())
    with torch.no_grad():
        assert torch.equal(loaded.base_model(draw(2, 6)).last_hidden_state, model.model(draw(2, 6)).last_hidden_state)


def test_fresh_model_from_the_meta_device(model):
    """`to_empty` and `_init_weights`, as FSDP does: the constants are those of the config again."""
    with torch.device("meta"):
        built = EngramForCausalLM(copy.deepcopy(model.config))
    built.to_empty(device="cpu")
    for parameter in [*built.parameters(), *built.buffers()]:
        parameter.data.fill_(7)
    built.init_weights() if hasattr(built, "init_weights") else built.post_init()
    for name, value in model.model.engram_hasher.constants().items():
        assert torch.equal(getattr(built.model.engram_hasher, name), value), name


def test_sharded_folder(model, draw, tmp_path):
    """With several weight files, a tied weight or the constants were lost, or one file more than needed was read."""
    size = sum(value.numel() * value.element_size() for value in model.state_dict().values())
    model.save_pretrained(tmp_path, max_shard_size="1MB")
    shards = list(tmp_path.glob("model-*.safetensors"))
    assert bool(shards) == (size > 1_000_000)
    loaded, report = EngramForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
    with torch.no_grad():
        assert torch.equal(loaded.eval()(draw(2, 6)).logits, model(draw(2, 6)).logits)


def test_missing_shard(model, tmp_path):
    """One of several weight files was not downloaded."""
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    shards[1].unlink()
    with pytest.raises((OSError, ValueError, RuntimeError)):
        EngramForCausalLM.from_pretrained(tmp_path)
