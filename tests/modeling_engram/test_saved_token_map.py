"""A saved token map is the one that the model was trained with, or the model does not load."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_engram import EngramForCausalLM


MAP = np.arange(90) // 2  # 45 compressed ids
KEY = "model.engram_hasher.token_map"
FIELDS = ("engram_token_map_size", "engram_token_map_sha256")


@pytest.fixture
def folder(tmp_path, tiny_model, stand_in_tokenizer):
    """`folder(kind)`: a saved model, `"plain"` (every id its own), `"bound"`, or `"unbound"`."""

    def make(kind: str):
        model = tiny_model(engram_compressed_vocab_size=None if kind == "plain" else 60)
        tokenizer = stand_in_tokenizer(model.config, MAP)
        if kind == "bound":
            model.bind_tokenizer(tokenizer)
            model.resize_token_embeddings(98, pad_to_multiple_of=4)  # 90 tokens, 6 padding, 2 new, 2 padding
        elif kind == "unbound":
            fields = tokenizer.engram_fields()
            model.config.update({name: fields[name] for name in FIELDS})
        model.save_pretrained(tmp_path)
        return tmp_path

    return make


def change(folder, entries: dict[int, int] | torch.Tensor, without_digest: bool = False) -> None:
    """Puts entries, or another map, into the weights; and takes the digest out of config.json."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    if isinstance(entries, dict):
        for token_id, value in entries.items():
            weights[KEY][token_id] = value
    else:
        weights[KEY] = entries
    save_file(weights, path, metadata={"format": "pt"})
    if without_digest:
        path = folder / "config.json"
        config = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in config.items() if name not in FIELDS}))


@pytest.mark.parametrize("kind", ["plain", "bound", "unbound"])
def test_as_saved(folder, kind, random_ids):
    """Untouched, all three load; the one without a map says what it needs when it is used."""
    model = EngramForCausalLM.from_pretrained(folder(kind))
    if kind == "unbound":
        with pytest.raises(ValueError, match="bind_tokenizer"):
            model.compute_hash_ids(random_ids(1, 4))
    else:
        model.compute_hash_ids(random_ids(1, 4))


CHANGES = {
    "one_entry": {5: 9},
    "swapped": {5: 6, 6: 5},
    "unbound_entry": {5: -1},
    "negative": {5: -7},
    "beyond": {5: 99},
    "last": {-1: 7},
    "unbound_last": {-1: -1},
}


# A map that is not bound holds nothing but -1.
CHANGED = [
    (kind, name)
    for kind in ("plain", "bound", "unbound")
    for name, entries in CHANGES.items()
    if kind != "unbound" or set(entries.values()) != {-1}
]


@pytest.mark.parametrize("without_digest", [False, True])
@pytest.mark.parametrize(("kind", "change_name"), CHANGED)
def test_changed_entries(folder, kind, change_name, without_digest):
    """Any entry, of the tokenizer's tokens or beyond them, and with or without a digest to compare with: refused as
    damaged, and nobody is told to bind a tokenizer over it."""
    path, entries = folder(kind), CHANGES[change_name]
    change(path, entries, without_digest)
    with pytest.raises(ValueError, match="damaged") as error:
        EngramForCausalLM.from_pretrained(path)
    assert "bind_tokenizer" not in str(error.value)
    outside = [(token_id, value) for token_id, value in entries.items() if not 0 <= value < 60]
    for token_id, value in outside if kind != "unbound" else ():
        assert f"compressed id {value}" in str(error.value)
        assert f"token {token_id % {'plain': 96, 'bound': 100}[kind]} " in str(error.value)


@pytest.mark.parametrize("entries", [{90: 45}, {96: 0}, {96: 46, 97: 45}, {99: 3}], ids=str)
def test_beyond_the_tokenizer(folder, entries):
    """Behind its tokens come padding and the new ones of `resize_token_embeddings`, 45 and 46, and nothing else."""
    path = folder("bound")
    change(path, entries)
    with pytest.raises(ValueError, match=r"entries from 90 on.*damaged"):
        EngramForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("without_digest", [False, True])
@pytest.mark.parametrize("kind", ["plain", "bound", "unbound"])
def test_erased(folder, kind, without_digest, random_ids):
    """All entries -1 mean that no tokenizer was bound: an error at the first use, which says so. A plain model never
    needed one, so it is damaged."""
    path = folder(kind)
    change(path, torch.full((100 if kind == "bound" else 96,), -1, dtype=torch.int32), without_digest)
    if kind == "plain":
        with pytest.raises(ValueError, match="damaged"):
            EngramForCausalLM.from_pretrained(path)
    else:
        model = EngramForCausalLM.from_pretrained(path)
        with pytest.raises(ValueError, match="bind_tokenizer"):
            model.compute_hash_ids(random_ids(1, 4))


@pytest.mark.parametrize("kind", ["plain", "bound"])
def test_another_type_or_size(folder, kind):
    """A map of numbers with a fraction, of more bits, or of another length is refused, not cast."""
    size = 100 if kind == "bound" else 96
    for token_map in (torch.zeros(size), torch.zeros(size, dtype=torch.int64), torch.zeros(90, dtype=torch.int32)):
        path = folder(kind)
        change(path, token_map)
        with pytest.raises((ValueError, RuntimeError), match=r"token_map|ignore_mismatched_sizes"):
            EngramForCausalLM.from_pretrained(path)


def test_digest_without_its_map(folder):
    """The digest of a map that was bound, taken out of config.json: there is nothing left to know the map by."""
    path = folder("bound")
    change(path, {}, without_digest=True)
    with pytest.raises(ValueError, match="engram_token_map_sha256"):
        EngramForCausalLM.from_pretrained(path)


def test_digest_of_a_map_bound_to_the_hasher(tiny_model, tmp_path):
    """However a map is bound, the config knows it from then on."""
    model = tiny_model(engram_compressed_vocab_size=45)
    model.model.engram_hasher.bind_token_map(MAP)
    assert model.config.engram_token_map_size == 90
    model.save_pretrained(tmp_path)
    change(tmp_path, {5: 9})
    with pytest.raises(ValueError, match="sha256"):
        EngramForCausalLM.from_pretrained(tmp_path)


def test_damaged_model_is_not_saved(tiny_model, stand_in_tokenizer, tmp_path):
    """What would not load again is not written."""
    model = tiny_model(engram_compressed_vocab_size=45)
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    model.model.engram_hasher.token_map[7] = -1
    with pytest.raises(ValueError, match="token 7 the compressed id -1"):
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
