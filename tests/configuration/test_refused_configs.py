"""What config.json may hold in place of what belongs there: refused by name, when the config is made."""

import copy
import json
import time
from dataclasses import fields

import pytest

from hf_engram import EngramConfig


VALUES = {
    "text": "abc",
    "text of an integer": "3",
    "text of a bool": "false",
    "fraction": 2.5,
    "float": 2.0,
    "negative": -1,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "list of texts": ["1"],
    "dictionary": {"a": 1},
    "true": True,
    "null": None,
}
TEXTS = {"text", "text of an integer", "text of a bool"}
# By field, the values that are right, or are as if the field was left out. Of all others none is.
RIGHT = {
    **{name: {"true"} for name in ("use_cache", "tie_word_embeddings", "attention_bias", "use_qk_norm", "mlp_bias")},
    **{name: TEXTS | {"null"} for name in ("backbone_model_type", "backbone_name", "backbone_license")},
    **{name: {"null"} for name in ("num_key_value_heads", "head_dim", "pad_token_id", "bos_token_id", "eos_token_id")},
    **{name: {"null"} for name in ("engram_pad_token_id", "engram_compressed_vocab_size", "engram_num_embeddings")},
    **{name: {"null"} for name in ("engram_token_map_size", "engram_token_map_sha256")},
    "attention_output_bias": {"true", "null"},
    "rope_parameters": {"dictionary", "null"},
}
OWN = [f.name for f in fields(EngramConfig) if f.name in EngramConfig.__annotations__ and f.name != "model_type"]


@pytest.mark.parametrize("name", OWN)
def test_wrong_types_in_config_json(tiny_config, name):
    """Each field by its name, with the value."""
    saved = tiny_config().to_dict()
    for kind, value in VALUES.items():
        changed = json.loads(json.dumps(saved | {name: value}))
        if kind in RIGHT.get(name, set()):
            EngramConfig.from_dict(changed)
            continue
        with pytest.raises(ValueError, match=f"`{name}`") as error:
            EngramConfig.from_dict(changed)
        assert repr(value) in str(error.value)


def test_every_field_is_tried():
    """The list above holds all fields that the class has over Transformers'."""
    assert len(OWN) == len(set(OWN)) > 35 and {"vocab_size", "engram_n_heads", "hc_eps", "mlp_bias"} < set(OWN)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("engram_vocabsize", "engram_vocab_size"),
        ("engram_layers", "engram_layer_ids"),
        ("engram_head_dims", "engram_head_dim"),
        ("hc_mul", "hc_mult"),
        ("hc_sinkhorn_iter", "hc_sinkhorn_iters"),
    ],
)
def test_unknown_fields(tiny_config, tmp_path, name, nearest):
    """A misspelt field of the memory or the stream would silently leave the default."""
    with pytest.raises(ValueError, match=f"no field `{name}`; the nearest are .*`{nearest}`"):
        tiny_config(**{name: 1})
    tiny_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 1}))
    with pytest.raises(ValueError, match=f"no field `{name}`"):
        EngramConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "sha256", ["", "abc", "0" * 63, "0" * 65, "g" * 64, "A" * 64, 5, ["0" * 64]], ids=lambda value: str(value)[:5]
)
def test_digests(tiny_config, sha256):
    with pytest.raises(ValueError, match=r"`engram_token_map_sha256`.*64 hexadecimal digits"):
        tiny_config(engram_token_map_size=96, engram_token_map_sha256=sha256)


HUGE = [
    {"engram_vocab_size": 2**57},
    {"engram_vocab_size": 2**61},
    {"engram_vocab_size": 2**62},
    {"engram_vocab_size": 2**200},
    {"engram_head_dim": 2**60},
    {"engram_vocab_size": 2**30, "engram_head_dim": 2**30},
    {"engram_n_heads": 2**40},
    {"engram_n_heads": 5000},
    {"engram_max_ngram_size": 2**40},
    {"engram_max_ngram_size": 100, "engram_n_heads": 100},
]


@pytest.mark.parametrize("values", HUGE, ids=str)
def test_tables_beyond_int64(tiny_config, values):
    """Rows, or bytes, that no int64 can count, and columns whose primes would take hours to find: refused at once."""
    start = time.process_time()
    with pytest.raises(ValueError) as error:
        tiny_config(**values)
    assert time.process_time() - start < 5
    for name, value in values.items():
        assert f"`{name}`" in str(error.value) and str(value) in str(error.value)


def test_largest_tables(tiny_config):
    """The limit is not in the way of a table that int64 can address, nor are sizes without Engram layers looked at."""
    config = tiny_config(engram_vocab_size=2**52 // 6, engram_head_dim=2**7 - 1)
    assert all(rows * config.engram_head_dim * 8 < 2**63 for rows in config.engram_num_embeddings)
    assert tiny_config(engram_layer_ids=[], engram_vocab_size=2**61).engram_num_embeddings == []
    with pytest.raises(ValueError, match="`vocab_size` must be below 2\\*\\*31"):
        tiny_config(vocab_size=2**31)


# --- layer_types


def test_layer_types_follow(tiny_config):
    """They may be set to what they are, as tools do that cut a config down to fewer layers, and to nothing else."""
    config = tiny_config(engram_layer_ids=[0])
    shorter = copy.deepcopy(config)
    shorter.num_hidden_layers = 1
    shorter.layer_types = config.layer_types[:1]
    assert len(shorter.layer_types) == 1
    shorter.validate()
    assert tiny_config(layer_types=tiny_config().layer_types).layer_types == tiny_config().layer_types
    for wrong in (config.layer_types[:1], ["sliding_attention"] * 3, "full_attention", None, 3):
        for assign in (lambda c, value: setattr(c, "layer_types", value), lambda c, v: c.update({"layer_types": v})):
            with pytest.raises(ValueError, match=r"`layer_types` follows from .*set `num_hidden_layers` first") as e:
                assign(config, wrong)
            assert repr(wrong) in str(e.value)
    assert config.to_dict() == tiny_config(engram_layer_ids=[0]).to_dict()
