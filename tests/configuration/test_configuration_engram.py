"""EngramConfig: what it derives, what it refuses, and its way through config.json."""

import copy
import json
import pickle
import time

import pytest
import torch

from hf_engram import EngramConfig, EngramForCausalLM
from hf_engram.tokenization.ngram_hashing import build_layout


V41 = {
    "vocab_size": 129280,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 2,
    "engram_layer_ids": [1, 14],
    "engram_vocab_size": 16_000_000,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_pad_token_id": 2,
}

# Fields that make a config invalid; then what the message must hold: the field's name and the value.
INVALID = [
    *(
        ({name: value}, [f"`{name}`", repr(value)])
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "hc_mult",
            "hc_sinkhorn_iters",
            "engram_vocab_size",
            "engram_n_heads",
            "engram_head_dim",
            "engram_compressed_vocab_size",
        )
        for value in (0, -3)
    ),
    *(({name: value}, [f"`{name}`", repr(value)]) for name in ("rms_norm_eps", "hc_eps") for value in (-1e-6, 1.5)),
    *(({"rms_norm_eps": value}, ["`rms_norm_eps`", repr(value), "1e-20"]) for value in (0, 0.0, 1e-50)),
    ({"initializer_range": -0.1}, ["`initializer_range`", "-0.1"]),
    ({"attention_dropout": 1.0}, ["`attention_dropout`", "1.0"]),
    ({"attention_dropout": -0.5}, ["`attention_dropout`", "-0.5"]),
    ({"engram_max_ngram_size": 1}, ["`engram_max_ngram_size`", "1"]),
    ({"engram_layer_ids": [3]}, ["`engram_layer_ids`", "[3]", "3"]),
    ({"engram_layer_ids": [-1]}, ["`engram_layer_ids`", "[-1]"]),
    ({"engram_layer_ids": [2, 0]}, ["`engram_layer_ids`", "[2, 0]", "[0, 2]"]),
    ({"engram_layer_ids": [1, 1]}, ["`engram_layer_ids`", "[1, 1]", "[1]"]),
    ({"engram_layer_ids": [True]}, ["`engram_layer_ids`", "[True]"]),
    ({"engram_layer_ids": 1}, ["`engram_layer_ids`", "1"]),
    ({"engram_layer_ids": ["1"]}, ["`engram_layer_ids`", "['1']"]),
    ({"engram_pad_token_id": 96}, ["`engram_pad_token_id`", "96"]),
    ({"engram_pad_token_id": -1}, ["`engram_pad_token_id`", "-1"]),
    ({"engram_compressed_vocab_size": 97}, ["`engram_compressed_vocab_size`", "97", "`vocab_size`", "96"]),
    ({"engram_num_embeddings": [1, 2]}, ["`engram_num_embeddings`", "[1, 2]", "`engram_vocab_size`"]),
    ({"num_attention_heads": 3, "num_key_value_heads": 1}, ["`hidden_size`", "32", "`num_attention_heads`", "3"]),
    ({"num_key_value_heads": 3}, ["`num_attention_heads`", "4", "`num_key_value_heads`", "3"]),
    ({"head_dim": 7}, ["`head_dim`", "7"]),
    ({"hc_mult": 4, "hc_eps": 0.3}, ["`hc_eps`", "0.3", "`hc_mult`", "4"]),
    ({"engram_token_map_size": 97, "engram_token_map_sha256": "0" * 64}, ["`engram_token_map_size`", "97", "96"]),
    ({"engram_token_map_size": 0, "engram_token_map_sha256": "0" * 64}, ["`engram_token_map_size`", "0"]),
    ({"engram_token_map_size": 96}, ["`engram_token_map_size`", "96", "`engram_token_map_sha256`"]),
    ({"engram_token_map_sha256": "abc"}, ["`engram_token_map_sha256`", "abc", "`engram_token_map_size`"]),
    ({"layer_types": ["full_attention"] * 2}, ["`layer_types`", "full_attention"]),
    ({"layer_types": ["hybrid", "full_attention", "full_attention"]}, ["`layer_types`", "hybrid"]),
]


@pytest.mark.parametrize(("fields", "parts"), INVALID, ids=lambda value: str(value)[:60])
def test_invalid_field_is_named(tiny_config, fields, parts):
    """An invalid field raises a ValueError that names it and its value."""
    with pytest.raises(ValueError) as error:
        tiny_config(**fields)
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": 32.0},
        {"hidden_size": "32"},
        {"hc_mult": 2.5},
        {"num_hidden_layers": True},
        {"engram_vocab_size": 60.5},
        {"engram_n_heads": None},
        {"engram_max_ngram_size": "3"},
        {"engram_pad_token_id": 1.5},
        {"engram_layer_ids": None},
        {"engram_layer_ids": [0.0]},
        {"rms_norm_eps": "small"},
        {"hc_eps": None},
        {"attention_dropout": "none"},
        {"engram_num_embeddings": 5},
        {"engram_token_map_size": 1.5, "engram_token_map_sha256": "0" * 64},
    ],
    ids=str,
)
def test_wrong_type_is_named(tiny_config, fields):
    """A field of the wrong type is refused under its name, whoever notices first (we or Transformers)."""
    with pytest.raises((ValueError, TypeError)) as error:
        tiny_config(**fields)
    assert next(iter(fields)) in str(error.value)


def test_fields_set_later_are_validated_too(tiny_config, tmp_path):
    """A field made invalid by assignment is noticed when a model is built and when the config is saved; nothing is
    written."""
    config = tiny_config()
    config.engram_vocab_size = 61
    config.engram_vocab_size = 70
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        EngramForCausalLM(config)
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        config.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_defaults():
    """Without arguments a config is complete and consistent."""
    config = EngramConfig()
    assert config.num_key_value_heads == config.num_attention_heads == 8
    assert config.head_dim == 64
    assert config.engram_layer_ids == [1]
    assert config.engram_pad_token_id == 0
    assert config.engram_compressed_vocab_size == config.vocab_size == 32000
    assert config.attention_output_bias is False
    assert (config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps) == (4, 20, 1e-6)
    assert config.rope_parameters["rope_type"] == "default"
    assert config.rope_parameters["rope_theta"] == 10000
    assert config.engram_num_embeddings == list(build_layout(1, 20000, 3, 4).num_embeddings)
    assert config.use_cache


def test_defaults_follow_other_fields(tiny_config):
    """Fields that are left out take their value from others."""
    config = tiny_config(num_key_value_heads=None, pad_token_id=7, attention_bias=True, vocab_size=50)
    assert config.num_key_value_heads == 4
    assert config.engram_pad_token_id == 7
    assert config.attention_output_bias is True
    assert config.engram_compressed_vocab_size == 50
    assert tiny_config(attention_bias=True, attention_output_bias=False).attention_output_bias is False
    assert tiny_config(pad_token_id=7, engram_pad_token_id=9).engram_pad_token_id == 9


def is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@pytest.mark.parametrize(
    ("layer_ids", "size", "ngram", "heads"), [([0], 1, 2, 1), ([0, 2], 60, 4, 2), ([1], 997, 3, 5)]
)
def test_rows_follow_from_the_layout(tiny_config, layer_ids, size, ngram, heads):
    """Tables have as many rows as a run of primes, found here by trial division, adds up to."""
    config = tiny_config(
        engram_layer_ids=layer_ids, engram_vocab_size=size, engram_max_ngram_size=ngram, engram_n_heads=heads
    )
    columns = (ngram - 1) * heads
    primes, candidate = [], size
    while len(primes) < columns * len(layer_ids):
        if is_prime(candidate):
            primes.append(candidate)
        candidate += 1
    expected = [sum(primes[i * columns : (i + 1) * columns]) for i in range(len(layer_ids))]
    assert config.engram_num_embeddings == expected
    assert tiny_config(**{**config.to_dict(), "engram_num_embeddings": None}).engram_num_embeddings == expected


@pytest.mark.parametrize("layer_ids", [[0, 2], [1], [], (1, 2)], ids=str)
def test_layer_types(tiny_config, layer_ids):
    """All decoder layers are of one kind, with and without Engram; caches of every class are made from that."""
    config = tiny_config(engram_layer_ids=layer_ids, layer_types=["full_attention"] * 3)
    assert config.layer_types == ["full_attention"] * 3
    assert config.engram_layer_ids == list(layer_ids)


def test_no_engram_layers(tiny_config):
    """`engram_layer_ids=[]` is a plain model: no tables, no hasher, no Engram layer."""
    config = tiny_config(engram_layer_ids=[])
    assert config.engram_num_embeddings == []
    model = EngramForCausalLM(config)
    assert model.model.engram_memory is None
    assert model.model.engram_hasher is None
    assert not any("engram" in name for name in model.state_dict())


ROUND_TRIP_FIELDS = [
    {},
    {"engram_layer_ids": []},
    {"engram_layer_ids": [], "hc_mult": 1},
    {"engram_layer_ids": (1,), "num_key_value_heads": None, "tie_word_embeddings": True, "eos_token_id": [1, 2]},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
    {"engram_compressed_vocab_size": 80, "engram_token_map_size": 90, "engram_token_map_sha256": "ab" * 32},
    {"num_labels": 5, "attention_bias": True, "attention_output_bias": False, "use_qk_norm": True, "mlp_bias": True},
]


def by_file(config, folder):
    config.save_pretrained(folder)
    return EngramConfig.from_pretrained(folder)


@pytest.mark.parametrize(
    "round_trip",
    [
        by_file,
        lambda config, folder: EngramConfig.from_dict(config.to_dict()),
        lambda config, folder: EngramConfig.from_dict(json.loads(config.to_json_string())),
        lambda config, folder: EngramConfig.from_dict(json.loads(config.to_json_string(use_diff=False))),
        lambda config, folder: EngramConfig(**config.to_dict()),
        lambda config, folder: copy.deepcopy(config),
        lambda config, folder: pickle.loads(pickle.dumps(config)),
    ],
    ids=["file", "dict", "json", "full_json", "arguments", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("fields", ROUND_TRIP_FIELDS, ids=str)
def test_round_trip(tiny_config, fields, round_trip, tmp_path):
    """A config comes back equal from each way of copying it."""
    config = tiny_config(**fields)
    again = round_trip(config, tmp_path)

    def comparable(c):
        return {k: v for k, v in c.to_dict().items() if k not in ("auto_map", "transformers_version")}

    assert type(again) is EngramConfig
    assert comparable(again) == comparable(config)
    assert again.layer_types == config.layer_types
    again.validate()


def test_saved_json_holds_the_derived_fields(tiny_config, tmp_path):
    """config.json names the table sizes, the model's type and where its classes are."""
    config = tiny_config()
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "engram"
    assert saved["engram_num_embeddings"] == config.engram_num_embeddings
    assert saved["engram_layer_ids"] == [0, 2]
    assert saved["auto_map"]["AutoConfig"] == "configuration_engram.EngramConfig"
    assert saved["auto_map"]["AutoModelForCausalLM"] == "modeling_engram.EngramForCausalLM"


@pytest.mark.parametrize(
    "change",
    [
        {"engram_layer_ids": [0]},
        {"engram_vocab_size": 200},
        {"engram_max_ngram_size": 3},
        {"engram_n_heads": 3},
        {"engram_num_embeddings": [400, 500]},
    ],
    ids=str,
)
def test_changed_layout_in_json_is_refused(tiny_config, change, tmp_path):
    """A layout field edited in config.json does not load: the tables were made with another."""
    tiny_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match="engram_num_embeddings"):
        EngramConfig.from_pretrained(tmp_path)


def test_save_refuses_a_file(tiny_config, tmp_path):
    """Saving to a path that is a file raises, and leaves the file."""
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(ValueError, match="save_directory"):
        tiny_config().save_pretrained(path)
    assert path.read_text() == "kept"


def test_unknown_field_is_kept(tiny_config, tmp_path):
    """Fields that Transformers or others add travel along."""
    config = tiny_config(my_note="hello", id2label={0: "no", 1: "yes"})
    config.save_pretrained(tmp_path)
    again = EngramConfig.from_pretrained(tmp_path)
    assert again.my_note == "hello"
    assert again.id2label == {0: "no", 1: "yes"}


def test_v41_layout():
    """V4.1's two tables have the released row counts, and laying them out takes well under 5 s of a processor."""
    build_layout.cache_clear()
    start = time.process_time()
    config = EngramConfig(**V41)
    assert time.process_time() - start < 5
    assert config.engram_num_embeddings == [384_006_168, 384_016_682]


def test_v41_model_on_meta():
    """A model with V4.1's tables is built on the meta device, without their memory."""
    with torch.device("meta"):
        model = EngramForCausalLM(EngramConfig(**V41))
    tables = model.model.engram_memory.tables
    assert [tuple(table.weight.shape) for table in tables] == [(384_006_168, 256), (384_016_682, 256)]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert all(buffer.is_meta for buffer in model.model.engram_hasher.buffers())


@pytest.mark.parametrize(("field", "value"), [("hidden_act", "nope"), ("pad_token_id", 96), ("pad_token_id", -1)])
def test_fields_that_torch_would_stumble_over(tiny_config, field, value):
    """They are named before a layer is built."""
    with pytest.raises(ValueError, match=f"`{field}`.*{value}"):
        tiny_config(**{field: value})
