"""The map from token ids to compressed ids: golden digest, the rule, files."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from hf_engram.tokenization import token_map as module
from hf_engram.tokenization.token_map import (
    build_token_map,
    load_token_map,
    normalize_text,
    save_token_map,
    token_map_sha256,
    token_map_size,
)


def word_level(*tokens: str, **ids: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)} | ids, unk_token=tokens[0]))


def test_deepseek_map_is_the_released_one(deepseek, golden_hashing):
    token_map = deepseek.token_map
    assert token_map.dtype == np.int32 and token_map.shape == (len(deepseek),) == (golden_hashing["vocab_size"],)
    assert token_map[:32].tolist() == golden_hashing["token_map_first_32"]
    assert token_map[-32:].tolist() == golden_hashing["token_map_last_32"]
    assert token_map.max() + 1 == golden_hashing["engram_compressed_vocab_size"]
    assert token_map_sha256(token_map) == golden_hashing["token_map_sha256_int32_le"]


def test_deepseek_short_cut_equals_the_normalizer(deepseek):
    texts = deepseek.backend_tokenizer.decode_batch([[i] for i in range(len(deepseek))], skip_special_tokens=False)
    assert [text for text in texts if normalize_text(text) != module._NORMALIZER.normalize_str(text)] == []


def test_ascii_short_cut_equals_the_normalizer():
    for text in map("".join, itertools.product([chr(i) for i in range(128)], repeat=2)):
        assert normalize_text(text) == module._NORMALIZER.normalize_str(text), repr(text)


@given(st.text(st.sampled_from("aB \t\n\v\x1c\u00a0\u00e9\u0301\ufb01^$"), max_size=6) | st.text(max_size=6))
def test_short_cut_equals_the_normalizer(text):
    assert normalize_text(text) == module._NORMALIZER.normalize_str(text)


def test_the_rule():
    alike = {
        "word": ["the", " The", "THE\n", "\tthe  ", "t\u0301he", "\uff54he"],
        "ligature": ["fi", "\ufb01"],
        "lone space": [" ", "   ", "\t", "\r\n"],
        "inner space": ["a b", "a \n b"],
        "not a word": ["\u4e2d"],
        "control": ["\x00"],
    }
    tokens = [token for group in alike.values() for token in group]
    groups = [i for i, group in enumerate(alike.values()) for _ in group]
    backend = word_level(*tokens)
    assert build_token_map(backend, len(tokens)).tolist() == groups


def test_parts_of_characters_stand_for_themselves(small):
    """Every byte that is no character by itself decodes to U+FFFD, and must not be one with the others."""
    ids = [i for i in range(len(small)) if "\ufffd" in small.decode([i])]
    assert len(ids) > 100 and len(set(small.token_map[ids].tolist())) == len(ids)


def test_tokens_that_normalise_to_nothing_keep_their_text():
    backend = word_level("\u0301", "\u0302", "\u0301\u0301", "")
    assert build_token_map(backend, 4).tolist() == [0, 1, 2, 3]


def test_extending_keeps_what_is_there():
    backend = word_level("b", "a", "c")
    known = build_token_map(backend, 3)
    backend.add_tokens(["A", "d", AddedToken(" D "), "e"])
    extended = build_token_map(backend, 7, known)
    assert extended.tolist() == [0, 1, 2, 1, 3, 3, 4] == build_token_map(backend, 7).tolist()
    # Also where the known map is not what would be built today.
    assert build_token_map(backend, 7, np.array([5, 0, 5], dtype=np.int32)).tolist() == [5, 0, 5, 0, 6, 6, 7]


def test_map_is_read_only(small):
    with pytest.raises(ValueError, match="read-only"):
        small.token_map[0] = 1


def test_ids_that_are_left_out():
    backend = word_level("a", "b", c=5)
    assert backend.get_vocab_size() == 3 and token_map_size(backend) == 6
    assert build_token_map(backend, 6).tolist() == [0, 1, 2, 2, 2, 3]


def test_file_round_trip(tmp_path):
    path = tmp_path / module.TOKEN_MAP_FILE
    token_map = np.array([0, 1, 1, 0, 2], dtype=np.int32)
    save_token_map(path, token_map, 7)
    loaded, compressed_vocab_size = load_token_map(path, token_map_sha256(token_map))
    assert loaded.tolist() == token_map.tolist() and loaded.dtype == np.int32 and not loaded.flags.writeable
    assert compressed_vocab_size == 7


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "other tensor", "no metadata", "other type"])
def test_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / module.TOKEN_MAP_FILE
    token_map = np.arange(100, dtype=np.int32)
    save_token_map(path, token_map, 100)
    content = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(content[:-10])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "flipped":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "other tensor":
        module.save_file({"map": token_map}, path, metadata={module.COMPRESSED_VOCAB_SIZE_KEY: "100"})
    elif damage == "no metadata":
        module.save_file({"token_map": token_map}, path)
    else:
        module.save_file(
            {"token_map": token_map.astype(np.int64)}, path, metadata={module.COMPRESSED_VOCAB_SIZE_KEY: "100"}
        )
    with pytest.raises(ValueError, match=rf"{module.TOKEN_MAP_FILE} .*delete it"):
        load_token_map(path, token_map_sha256(token_map))
