"""A saved folder loads as the same tokenizer, keeps its compressed ids for good, and says what is wrong with it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from hf_engram import EngramTokenizer
from hf_engram.configuration.folder_update import TOKEN_MAP_FILE


BUILD = "hf_engram.tokenization.tokenization_engram.build_token_map"


@pytest.fixture
def saved(small, tmp_path) -> Path:
    folder = tmp_path / "saved"
    small.save_pretrained(folder)
    return folder


def read_config(folder: Path) -> dict:
    return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))


def write_config(folder: Path, **values) -> None:
    config = {name: value for name, value in (read_config(folder) | values).items() if value is not ...}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def test_folder(small, saved):
    config = read_config(saved)
    fields = small.engram_fields()
    assert config["tokenizer_class"] == "EngramTokenizer"
    assert config["auto_map"] == {"AutoTokenizer": [None, "tokenization_engram.EngramTokenizer"]}
    assert fields.pop("engram_token_map_size") == 600
    assert {name: config[name] for name in fields} == fields and config["return_hash_ids"] is True
    for name in ("tokenizer.json", "chat_template.jinja", TOKEN_MAP_FILE, "tokenization_engram.py", "token_map.py"):
        assert (saved / name).is_file(), name
    assert str(saved.parent) not in (saved / "tokenizer_config.json").read_text(encoding="utf-8")


def test_files_are_named(small, tmp_path):
    files = small.save_pretrained(tmp_path)
    assert {Path(file).name for file in files} == {file.name for file in tmp_path.iterdir()}
    assert any(
        Path(file).name == "x-" + TOKEN_MAP_FILE for file in small.save_pretrained(tmp_path, filename_prefix="x")
    )


def test_loads_as_it_was_without_building_the_map(small, saved, texts, monkeypatch):
    monkeypatch.setattr(BUILD, None)
    loaded = EngramTokenizer.from_pretrained(saved)
    assert loaded.engram_fields() == small.engram_fields()
    assert np.array_equal(loaded.token_map, small.token_map)
    assert dict(loaded(texts)) == dict(small(texts))
    assert loaded.chat_template == small.chat_template
    assert type(AutoTokenizer.from_pretrained(saved, trust_remote_code=False)) is EngramTokenizer


def test_saved_again_and_again(small, saved, texts, tmp_path):
    folder = saved
    for i in range(3):
        loaded = EngramTokenizer.from_pretrained(folder)
        assert dict(loaded(texts)) == dict(small(texts))
        following = tmp_path / str(i)
        loaded.save_pretrained(following)
        first, second = read_config(folder), read_config(following)
        assert first["engram_token_map_sha256"] == second["engram_token_map_sha256"]
        assert (folder / TOKEN_MAP_FILE).read_bytes() == (following / TOKEN_MAP_FILE).read_bytes()
        assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in following.iterdir())
        assert str(tmp_path) not in (following / "tokenizer_config.json").read_text(encoding="utf-8")
        shutil.rmtree(folder)
        folder = following


def test_saving_in_place(saved, small, texts):
    EngramTokenizer.from_pretrained(saved).save_pretrained(saved)
    assert dict(EngramTokenizer.from_pretrained(saved)(texts)) == dict(small(texts))


def test_hash_ids_stay_off(small_plain, tmp_path):
    EngramTokenizer.from_tokenizer(small_plain, return_hash_ids=False).save_pretrained(tmp_path)
    loaded = EngramTokenizer.from_pretrained(tmp_path)
    assert "hash_ids" not in loaded("a") and "hash_ids" in loaded("a", return_hash_ids=True)
    assert "hash_ids" in EngramTokenizer.from_pretrained(tmp_path, return_hash_ids=True)("a")


def test_default_pad_token_is_saved(small_backend, tmp_path):
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(tokenizer_object=small_backend, eos_token="</s>")
    EngramTokenizer.from_tokenizer(plain).save_pretrained(tmp_path)
    loaded = EngramTokenizer.from_pretrained(tmp_path)
    loaded.add_special_tokens({"pad_token": "<pad>"})
    assert loaded.engram_fields()["engram_pad_token_id"] == 2


def test_nothing_is_written_if_the_fields_are_wrong(small_plain, tmp_path):
    tokenizer = EngramTokenizer.from_tokenizer(small_plain, engram_compressed_vocab_size=5)
    with pytest.raises(ValueError, match="engram_compressed_vocab_size"):
        tokenizer.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_given_fields_win(saved, small, expected_hash_ids):
    loaded = EngramTokenizer.from_pretrained(saved, engram_max_ngram_size=4, engram_pad_token_id=7)
    assert loaded.engram_fields() == small.engram_fields() | {"engram_max_ngram_size": 4, "engram_pad_token_id": 7}
    encoding = loaded("one two")
    assert np.array_equal(encoding["hash_ids"], expected_hash_ids(loaded, encoding["input_ids"]))


def test_size_is_tied_to_the_map(saved, small):
    size = small.engram_compressed_vocab_size
    assert EngramTokenizer.from_pretrained(saved, engram_compressed_vocab_size=size).engram_fields()
    with pytest.raises(ValueError, match=f"`engram_compressed_vocab_size` is {size + 5}, but .* {size}"):
        EngramTokenizer.from_pretrained(saved, engram_compressed_vocab_size=size + 5)
    with pytest.raises(ValueError, match="holds another token map"):
        EngramTokenizer.from_pretrained(saved, engram_token_map_sha256="0" * 64)


# --- tokens added to a tokenizer that was loaded


def test_added_token_of_a_known_class(saved):
    loaded = EngramTokenizer.from_pretrained(saved)
    fields = loaded.engram_fields()
    loaded.add_tokens([" THE", "\u0120THE"])
    assert loaded.token_map[600] == loaded.token_map[loaded.convert_tokens_to_ids("\u0120the")]
    assert loaded.engram_fields()["engram_compressed_vocab_size"] == fields["engram_compressed_vocab_size"]


def test_added_token_of_a_new_class_is_refused(saved, small, tmp_path):
    loaded = EngramTokenizer.from_pretrained(saved)
    loaded.add_tokens(["THE", "zebra"])
    size = small.engram_compressed_vocab_size
    message = rf"Token 'zebra' \(id 601\) needs the compressed id {size}, but `engram_compressed_vocab_size` is {size}"
    for use in (lambda: loaded("a"), lambda: loaded.save_pretrained(tmp_path / "new"), loaded.engram_fields):
        with pytest.raises(ValueError, match=message):
            use()
    assert loaded("a", return_hash_ids=False)["input_ids"]
    at_load = EngramTokenizer.from_pretrained(saved, pad_token="<new pad>")
    with pytest.raises(ValueError, match="'<new pad>'"):
        at_load("a")


def test_added_token_takes_a_free_id(small_plain, texts, tmp_path):
    size = EngramTokenizer.from_tokenizer(small_plain).engram_compressed_vocab_size
    tokenizer = EngramTokenizer.from_tokenizer(small_plain, engram_compressed_vocab_size=size + 2)
    expected = tokenizer(texts)["hash_ids"]
    tokenizer.save_pretrained(tmp_path / "first")
    loaded = EngramTokenizer.from_pretrained(tmp_path / "first")
    loaded.add_tokens(["zebra"])
    assert loaded.token_map[600] == size and loaded(texts)["hash_ids"] == expected
    loaded.save_pretrained(tmp_path / "second")
    again = EngramTokenizer.from_pretrained(tmp_path / "second")
    assert again.engram_fields() == loaded.engram_fields() and again.engram_compressed_vocab_size == size + 2
    again.add_tokens(["gnu"])
    assert again.token_map[601] == size + 1 and again(texts)["hash_ids"] == expected
    again.add_tokens(["emu"])
    with pytest.raises(ValueError, match="'emu'"):
        again("a")


# --- folders with something wrong


def test_missing_map_is_built_again(saved, small):
    (saved / TOKEN_MAP_FILE).unlink()
    loaded = EngramTokenizer.from_pretrained(saved)
    assert loaded.engram_fields() == small.engram_fields()
    write_config(saved, engram_token_map_sha256="0" * 64)
    with pytest.raises(ValueError, match=f"{TOKEN_MAP_FILE} is missing, .* instead of 0000"):
        EngramTokenizer.from_pretrained(saved)


def test_damaged_map_is_refused(saved):
    content = (saved / TOKEN_MAP_FILE).read_bytes()
    for damaged in (content[:-4], content[:-1] + b"\xff", b"version https://git-lfs.github.com/spec/v1"):
        (saved / TOKEN_MAP_FILE).write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{TOKEN_MAP_FILE} (is not a readable|holds another|is the) token map"):
            EngramTokenizer.from_pretrained(saved)


def test_map_of_a_larger_tokenizer_is_refused(small, saved, tmp_path):
    small.add_tokens(["THE"])
    small.save_pretrained(tmp_path / "larger")
    shutil.copy(saved / "tokenizer.json", tmp_path / "larger" / "tokenizer.json")
    with pytest.raises(ValueError, match=r"maps 601 ids, but tokenizer\.json has 600"):
        EngramTokenizer.from_pretrained(tmp_path / "larger")


def test_map_of_another_vocabulary_of_the_same_size_is_refused(saved):
    """Two tokens that have changed places, and a map that no digest tells from the right one."""
    path = saved / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ValueError, match=r"another vocabulary than tokenizer\.json"):
        EngramTokenizer.from_pretrained(saved)


def test_stray_map_file_beside_a_plain_tokenizer_is_not_used(small, saved):
    write_config(saved, engram_token_map_sha256=..., engram_compressed_vocab_size=...)
    loaded = EngramTokenizer.from_pretrained(saved)
    loaded.add_tokens(["zebra"])
    assert (
        loaded("a zebra")["hash_ids"] and loaded.engram_compressed_vocab_size == small.engram_compressed_vocab_size + 1
    )
