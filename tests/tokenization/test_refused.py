"""What is refused before anything is computed: tokenizers of nothing, fields and files of the wrong kind."""

import json
import time

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, Qwen3Config

from hf_engram import EngramTokenizer
from hf_engram.configuration.folder_update import TOKEN_MAP_FILE
from hf_engram.tokenization.ngram_hashing import build_layout
from hf_engram.tokenization.token_map import load_token_map, token_map_sha256


def test_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    """Made from one that Transformers has made up, from the folder that it made it up for, or from nothing."""
    Qwen3Config(vocab_size=1000).save_pretrained(tmp_path)
    made_up = AutoTokenizer.from_pretrained(tmp_path)
    assert len(made_up) == 1
    with pytest.raises(ValueError, match=r"has 1 tokens"):
        EngramTokenizer.from_tokenizer(made_up, engram_pad_token_id=0)
    with pytest.raises((ValueError, OSError)):
        EngramTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has 0 tokens"):
        EngramTokenizer(tokenizer_object=Tokenizer(models.BPE()))


def test_tokens_that_are_all_one_are_refused():
    """One compressed id for all means the same rows for all."""
    backend = Tokenizer(models.WordLevel({"yes": 0, "Yes": 1, "YES": 2, " yes ": 3}, unk_token="yes"))
    tokenizer = EngramTokenizer(tokenizer_object=backend, engram_pad_token_id=0)
    for use in (tokenizer.engram_fields, lambda: tokenizer("yes"), lambda: tokenizer.token_map):
        with pytest.raises(ValueError, match=r"All 4 tokens normalise alike"):
            use()


# --- fields

# What tokenizer_config.json may hold in place of an integer.
NO_INTEGERS = ["3", 3.0, 2.5, True, [3], {"a": 3}, float("nan"), float("inf"), -3]


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize(
    "field",
    [
        "engram_vocab_size",
        "engram_max_ngram_size",
        "engram_n_heads",
        "engram_pad_token_id",
        "engram_compressed_vocab_size",
        "engram_layer_ids",
    ],
)
def test_saved_fields_of_a_wrong_type(small, tmp_path, field, value):
    """The error names the field and the value."""
    small.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    value = [value] if field == "engram_layer_ids" else value
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ValueError, match=f"`{field}` must") as error:
        EngramTokenizer.from_pretrained(tmp_path)
    assert str(value[0] if field == "engram_layer_ids" else value) in str(error.value)


@pytest.mark.parametrize("value", ["false", 0, 1, None])
def test_return_hash_ids_is_a_bool(small_plain, value):
    with pytest.raises(ValueError, match=f"`return_hash_ids` must be True or False, got {value!r}"):
        EngramTokenizer.from_tokenizer(small_plain, return_hash_ids=value)


def test_unknown_fields(small_plain, small):
    """A misspelt one would leave the default. All that another tokenizer says is taken, if it has the same map."""
    with pytest.raises(ValueError, match=r"no arguments \['engram_vocab'\].*engram_vocab_size"):
        EngramTokenizer.from_tokenizer(small_plain, engram_vocab=2000)
    fields = small.engram_fields()
    assert EngramTokenizer.from_tokenizer(small_plain, **fields).engram_fields() == fields
    with pytest.raises(ValueError, match="instead of 000"):
        EngramTokenizer.from_tokenizer(small_plain, **{**fields, "engram_token_map_sha256": "0" * 64})


HUGE = [
    {"engram_vocab_size": 2**59},
    {"engram_vocab_size": 2**61},
    {"engram_vocab_size": 2**200},
    {"engram_n_heads": 2**40},
    {"engram_max_ngram_size": 2**40},
    {"engram_max_ngram_size": 129, "engram_n_heads": 128},
]


@pytest.mark.parametrize("fields", HUGE, ids=str)
def test_layouts_beyond_int64(small_plain, fields):
    """Refused when the tokenizer is made, by name, and before a single prime is looked for."""
    start = time.process_time()
    with pytest.raises(ValueError) as error:
        EngramTokenizer.from_tokenizer(small_plain, engram_layer_ids=[0, 1], **fields)
    assert time.process_time() - start < 5
    assert all(f"`{name}` ({value})" in str(error.value) for name, value in fields.items())


def test_largest_layouts():
    """Just below the limits the sums still fit, to the last row."""
    layout = build_layout(2, 2**59 // 24 - 1, 4, 8)
    assert all(0 < rows < 2**63 // 8 for rows in layout.num_embeddings)
    assert (layout.offsets >= 0).all() and (layout.primes > 0).all()
    for i, rows in enumerate(layout.num_embeddings):
        assert sum(map(int, layout.primes[i].flatten())) == rows
    assert build_layout(2, 1, 2, 2**13).num_embeddings[1] < 2**63


# --- token map files


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int64", "float32", "int16"])
def test_map_files_of_another_type(tmp_path, dtype):
    """Also where the numbers, and so the digest, are the right ones: whoever wrote it is not this package."""
    token_map = np.arange(90) // 2
    save_file(
        {"token_map": token_map.astype(dtype)}, tmp_path / TOKEN_MAP_FILE, {"engram_compressed_vocab_size": "45"}
    )
    with pytest.raises(ValueError, match=f"{dtype}.*Fetch or save the folder again"):
        load_token_map(tmp_path / TOKEN_MAP_FILE, token_map_sha256(token_map))


@pytest.mark.parametrize(
    ("token_map", "size"), [([0, 1, 2], "2"), ([0, -1, 2], "3"), ([0, 1, 2], "-3"), ([], "1"), ([0, 1, 2], "three")]
)
def test_map_files_that_contradict_themselves(tmp_path, token_map, size):
    """Ids beyond the number of compressed ids would overflow the hash."""
    token_map = np.array(token_map, dtype=np.int32)
    save_file({"token_map": token_map}, tmp_path / TOKEN_MAP_FILE, {"engram_compressed_vocab_size": size})
    with pytest.raises(ValueError, match=r"outside \[0, |not a readable"):
        load_token_map(tmp_path / TOKEN_MAP_FILE, token_map_sha256(token_map))


# --- ids of unusual types

UNSIGNED = [np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("dtype", UNSIGNED, ids=lambda dtype: dtype.__name__)
def test_any_integers(small, dtype, as_tensor):
    """Ids, masks and positions of few bits or without a sign hash as int64 ones, and positions do not wrap."""
    convert = torch.from_numpy if as_tensor else np.asarray
    rng = np.random.default_rng(0)
    ids, mask = rng.integers(0, 120, (2, 300)), rng.integers(0, 2, (2, 300))
    length = min(np.iinfo(dtype).max + 1, 300)
    positions = np.arange(300) % length  # a document ends at the type's last number
    expected = small.compute_hash_ids(ids, mask, positions[None])
    found = small.compute_hash_ids(*(convert(values.astype(dtype)) for values in (ids, mask, positions[None])))
    assert found.dtype == np.int64 and np.array_equal(found, expected)


def test_pad_takes_any_integers(small):
    """And gives what it gives for int64, on both sides, up to a multiple."""
    ids = [[1, 5, 6, 7, 8], [1, 9]]
    for side in ("left", "right"):
        arguments = {"padding_side": side, "pad_to_multiple_of": 4, "return_tensors": "pt"}
        expected = small.pad([{"input_ids": row} for row in ids], **arguments)
        assert expected["hash_ids"].shape[:2] == (2, 8)
        for dtype in UNSIGNED:
            found = small.pad([{"input_ids": np.array(row, dtype=dtype)} for row in ids], **arguments)
            assert torch.equal(found["hash_ids"], expected["hash_ids"])
            assert torch.equal(found["input_ids"], expected["input_ids"])


@pytest.mark.parametrize("name", ["input_ids", "position_ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_what_is_no_integer(small, name, dtype):
    arguments = {"input_ids": torch.tensor([[1, 0, 1]]), "position_ids": torch.tensor([[0, 1, 2]])}
    arguments[name] = arguments[name].to(dtype)
    with pytest.raises(TypeError, match=f"`{name}` must hold integers"):
        small.compute_hash_ids(**arguments)
