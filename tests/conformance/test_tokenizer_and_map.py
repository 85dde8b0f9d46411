"""The tokenizer, its token map and the tables' layout: another one is refused, and no id leaves its table."""

import copy
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer
from hf_engram.modeling_engram.ngram_hasher import NgramHasher


TEXTS = ["The for statement, THE FOR STATEMENT", "An", "", "caf\u00e9 \u6df1\u5ea6 \U0001f642 while\n\n  x = [1, 2]"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokenizer_and_model_agree(model, tokenizer, side):
    """The tokenizer's `hash_ids` and the model's own were not the same rows."""
    batch = tokenizer(TEXTS, padding=True, padding_side=side, return_tensors="pt")
    expected = model.compute_hash_ids(batch["input_ids"], attention_mask=batch["attention_mask"])
    live = batch["attention_mask"] != 0
    assert torch.equal(batch["hash_ids"][live], expected[live])
    with torch.no_grad():
        given, computed = model(**batch).logits, model(**{**batch, "hash_ids": None}).logits
    assert torch.equal(given[live], computed[live])


def test_another_tokenizer_of_equal_size(plain_tokenizer, other_plain_tokenizer, wrap, make_model, tmp_path):
    """A tokenizer of the same size with other words was accepted, and every n-gram read a stranger's rows."""
    tokenizer, other = wrap(plain_tokenizer), wrap(other_plain_tokenizer)
    room = max(tokenizer.engram_compressed_vocab_size, other.engram_compressed_vocab_size)
    tokenizer, other = (
        wrap(plain, engram_compressed_vocab_size=room) for plain in (plain_tokenizer, other_plain_tokenizer)
    )
    assert len(other) == len(tokenizer)
    assert other.engram_compressed_vocab_size == tokenizer.engram_compressed_vocab_size
    model = make_model(tokenizer)
    ids = torch.arange(3, 20)[None]
    rows = model.compute_hash_ids(ids)
    with pytest.raises(ValueError, match="sha256"):
        model.bind_tokenizer(other)
    assert torch.equal(model.compute_hash_ids(ids), rows), "refused, but bound"

    # The same through folders: weights of one model, config.json of the other.
    model.save_pretrained(tmp_path / "model")
    make_model(other).save_pretrained(tmp_path / "other")
    (tmp_path / "model" / "config.json").write_bytes((tmp_path / "other" / "config.json").read_bytes())
    with pytest.raises(ValueError, match="sha256"):
        EngramForCausalLM.from_pretrained(tmp_path / "model")


def test_state_dict_of_another_tokenizer(plain_tokenizer, other_plain_tokenizer, wrap, make_model):
    """`load_state_dict` brought another model's token map into a model that had been checked before."""
    room = 2 + max(wrap(plain).engram_compressed_vocab_size for plain in (plain_tokenizer, other_plain_tokenizer))
    model = make_model(wrap(plain_tokenizer, engram_compressed_vocab_size=room))
    other = make_model(wrap(other_plain_tokenizer, engram_compressed_vocab_size=room))
    ids = torch.arange(3, 20)[None]
    model.compute_hash_ids(ids)
    state = copy.deepcopy(model.state_dict())
    with pytest.raises((ValueError, RuntimeError), match="sha256"):
        model.load_state_dict(other.state_dict())
        model.compute_hash_ids(ids)
    model.load_state_dict(state)
    model.compute_hash_ids(ids)


def test_own_tokenizer_is_accepted(own_model, tokenizer):
    """The model's own tokenizer, bound again, changes nothing."""
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    before = own_model.compute_hash_ids(batch["input_ids"])
    own_model.bind_tokenizer(tokenizer)
    assert torch.equal(own_model.compute_hash_ids(batch["input_ids"]), before)
    with pytest.raises(ValueError, match="EngramTokenizer"):
        own_model.bind_tokenizer(object())


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("engram_layer_ids", lambda ids: [i + 1 for i in ids]),
        ("engram_vocab_size", lambda size: size + 50),
        ("engram_max_ngram_size", lambda size: size + 1),
        ("engram_n_heads", lambda heads: heads + 1),
        ("engram_pad_token_id", lambda token_id: token_id + 7),
    ],
)
def test_tokenizer_of_another_layout(own_model, tokenizer, field, change):
    """A tokenizer with the right words and another layout was accepted."""
    fields = {name: value for name, value in tokenizer.engram_fields().items() if "token_map" not in name}
    fields[field] = change(fields[field])
    other = EngramTokenizer.from_tokenizer(tokenizer, **fields)
    with pytest.raises(ValueError, match=field):
        own_model.bind_tokenizer(other)


def test_tokens_added_before_the_model(plain_tokenizer, wrap, make_model, tmp_path):
    """Added tokens had no compressed id, or another one after saving and loading."""
    plain = copy.deepcopy(plain_tokenizer)
    plain.add_tokens(["<image>", "ELAN", "elan"])
    tokenizer = wrap(plain)
    assert len(tokenizer) == len(plain_tokenizer) + 3
    token_map = tokenizer.token_map
    elan = tokenizer.convert_tokens_to_ids(["ELAN", "elan"])
    assert token_map[elan[0]] == token_map[elan[1]] != token_map[tokenizer.convert_tokens_to_ids("<image>")]
    model = make_model(tokenizer)
    batch = tokenizer(["an <image> ELAN elan", "<image>"], padding=True, return_tensors="pt")
    live = batch["attention_mask"] != 0
    rows = model.compute_hash_ids(batch["input_ids"], batch["attention_mask"])
    assert torch.equal(batch["hash_ids"][live], rows[live])
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = EngramTokenizer.from_pretrained(tmp_path)
    assert np.array_equal(again.token_map, token_map)
    model = EngramForCausalLM.from_pretrained(tmp_path).bind_tokenizer(again)
    assert torch.equal(model.compute_hash_ids(batch["input_ids"], batch["attention_mask"]), rows)


def test_tokens_added_after_training(plain_tokenizer, wrap, make_model, tmp_path):
    """A token added later changed the rows of all others, or read past the map."""
    plain_size = wrap(plain_tokenizer).engram_compressed_vocab_size
    tokenizer = wrap(plain_tokenizer, engram_compressed_vocab_size=plain_size + 1)
    model = make_model(tokenizer)
    ids = tokenizer(["The for statement"], return_tensors="pt")["input_ids"]
    rows = model.compute_hash_ids(ids)
    tokenizer.save_pretrained(tmp_path)
    grown = EngramTokenizer.from_pretrained(tmp_path)
    grown.add_tokens(["<image>"])
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        copy.deepcopy(model).bind_tokenizer(grown)
    model.resize_token_embeddings(len(grown))
    model.bind_tokenizer(grown)
    assert torch.equal(model.compute_hash_ids(ids), rows)
    batch = grown(["The <image> statement"], return_tensors="pt")
    assert grown.convert_tokens_to_ids("<image>") in batch["input_ids"]
    assert torch.equal(model.compute_hash_ids(batch["input_ids"]), batch["hash_ids"])
    grown.add_tokens(["<video>"])
    with pytest.raises(ValueError, match="engram_compressed_vocab_size"):
        grown(["a <video>"])


def test_vocabulary_padded_to_a_multiple(plain_tokenizer, wrap, make_model):
    """`vocab_size` above `len(tokenizer)` (padded to a multiple of 64): ids that no tokenizer gives had no map."""
    tokenizer = wrap(plain_tokenizer)
    model = make_model(tokenizer, vocab_size=384)
    assert model.config.vocab_size == 384 > len(tokenizer) == model.config.engram_token_map_size
    pad = model.config.engram_pad_token_id
    beyond = torch.tensor([[5, 383, 9, len(tokenizer)]])
    assert torch.equal(model.compute_hash_ids(beyond), model.compute_hash_ids(torch.tensor([[5, pad, 9, pad]])))
    with torch.no_grad():
        assert torch.isfinite(model(beyond).logits).all()


def test_vocabulary_smaller_than_the_tokenizer(plain_tokenizer, wrap, make_model):
    """`vocab_size` below `len(tokenizer)` was accepted, and failed at the first rare word."""
    tokenizer = wrap(plain_tokenizer)
    with pytest.raises(ValueError, match="vocab_size"):
        make_model(tokenizer, vocab_size=len(tokenizer) - 1)


BAD_IDS = {
    "negative": lambda ids, vocab: ids.index_fill(1, torch.tensor([2]), -1),
    "minus_100": lambda ids, vocab: ids.index_fill(1, torch.tensor([0]), -100),
    "vocab_size": lambda ids, vocab: ids.index_fill(1, torch.tensor([3]), vocab),
    "huge": lambda ids, vocab: ids.index_fill(1, torch.tensor([3]), 2**62),
    "float": lambda ids, vocab: ids.float(),
    "bool": lambda ids, vocab: ids.bool(),
    "one_axis": lambda ids, vocab: ids[0],
    "three_axes": lambda ids, vocab: ids[None],
}


@pytest.mark.parametrize("call", ["compute_hash_ids", "forward", "cached", "training"])
@pytest.mark.parametrize("bad", BAD_IDS)
def test_bad_ids_on_cpu(own_model, draw, bad, call):
    """A bad token id read another token's row, or failed with an index error that names nothing."""
    model = own_model
    ids = BAD_IDS[bad](draw(1, 5), model.config.vocab_size)
    calls = {
        "compute_hash_ids": lambda: model.compute_hash_ids(ids),
        "forward": lambda: model(input_ids=ids, use_cache=False),
        "cached": lambda: model(input_ids=ids, use_cache=True),
        "training": lambda: model.train()(input_ids=ids, labels=ids),
    }
    with pytest.raises((ValueError, TypeError), match="input_ids"):
        calls[call]()


@pytest.mark.parametrize("bad", ["negative", "minus_100", "vocab_size", "huge"])
def test_bad_ids_asserted_on_the_device(model, draw, bad, monkeypatch):
    """On an accelerator ids are checked where they are: the check that runs there, run on CPU."""
    ids = BAD_IDS[bad](draw(1, 5), model.config.vocab_size)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(RuntimeError, match=r"`input_ids` holds an id outside"):
        model.compute_hash_ids(ids)
    assert model.compute_hash_ids(draw(1, 5)).shape[:2] == (1, 5)


@pytest.mark.parametrize("bad", ["float", "bool", "one_axis", "three_axes"])
@pytest.mark.parametrize("call", ["compute_hash_ids", "forward"])
def test_ill_formed_ids_on_the_meta_device(model, bad, call):
    """Shape and dtype are checked on every device, also where no value can be read."""
    meta = copy.deepcopy(model)
    meta.compute_hash_ids(torch.zeros(1, 2, dtype=torch.long))
    meta = meta.to("meta")
    ids = BAD_IDS[bad](torch.zeros(1, 5, dtype=torch.long), meta.config.vocab_size).to("meta")
    with pytest.raises((ValueError, TypeError), match="input_ids"):
        meta.compute_hash_ids(ids) if call == "compute_hash_ids" else meta(input_ids=ids)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_bad_ids_when_compiled(own_model, draw, backend):
    """The check was optimised away by `torch.compile`."""
    torch._dynamo.reset()
    model = own_model
    model.compute_hash_ids(draw(1, 5))
    compiled = torch.compile(model.compute_hash_ids, fullgraph=True, backend=backend)
    assert torch.equal(compiled(draw(1, 5, 1)), model.compute_hash_ids(draw(1, 5, 1)))
    for bad in ("negative", "vocab_size"):
        with pytest.raises(RuntimeError, match=r"input_ids|out of bounds|index"):
            compiled(BAD_IDS[bad](draw(1, 5), model.config.vocab_size))


@pytest.mark.gpu
@pytest.mark.parametrize("bad", ["float", "bool", "one_axis", "three_axes"])
def test_ill_formed_ids_on_a_gpu(own_model, draw, bad):
    """As on CPU. (Bad values are asserted there: a test of them would end the process's CUDA context.)"""
    ids = BAD_IDS[bad](draw(1, 5), own_model.config.vocab_size).to("cuda")
    with pytest.raises((ValueError, TypeError), match="input_ids"):
        own_model.to("cuda")(input_ids=ids)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", ["negative", "vocab_size"])
def test_bad_ids_on_a_gpu(saved_folder, bad):
    """A bad id on a GPU read a stranger's row: it is asserted, in a process of its own since the context dies."""
    script = (
        "import sys, torch\nfrom hf_engram import EngramForCausalLM\n"
        "model = EngramForCausalLM.from_pretrained(sys.argv[1]).to('cuda')\n"
        "bad = -1 if sys.argv[2] == 'negative' else model.config.vocab_size\n"
        "model.compute_hash_ids(torch.tensor([[3, bad]], device='cuda')); torch.cuda.synchronize()\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(saved_folder), bad], capture_output=True, text=True, cwd=saved_folder
    )
    assert run.returncode != 0
    assert "assert" in run.stderr


@st.composite
def layouts(draw) -> EngramConfig:
    n_layers = draw(st.integers(1, 6))
    vocab_size = draw(st.integers(1, 500))
    compressed = draw(st.integers(1, vocab_size))
    return EngramConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        num_attention_heads=1,
        num_hidden_layers=n_layers,
        engram_layer_ids=sorted(draw(st.sets(st.integers(0, n_layers - 1), min_size=1))),
        engram_max_ngram_size=draw(st.integers(2, 6)),
        engram_n_heads=draw(st.integers(1, 5)),
        engram_vocab_size=draw(st.sampled_from([1, 2, 3, 50, 997, 20_000, 16_000_000])),
        engram_pad_token_id=draw(st.integers(0, vocab_size - 1)),
        engram_compressed_vocab_size=compressed,
    )


def bound_hasher(config: EngramConfig, seed: int) -> NgramHasher:
    hasher = NgramHasher(config)
    size = config.vocab_size
    hasher.bind_token_map(np.random.default_rng(seed).integers(0, config.engram_compressed_vocab_size, size))
    return hasher


@settings(max_examples=120, deadline=None, derandomize=True)
@given(config=layouts(), seed=st.integers(0, 2**32 - 1), length=st.integers(0, 12), batch=st.integers(1, 3))
def test_hash_ids_are_rows_of_their_table(config, seed, length, batch):
    """A hash left its table, by a negative product or a wrong offset: any ids, masks, positions and layouts."""
    rng = np.random.default_rng(seed)
    hasher = bound_hasher(config, seed)
    # Ids from both ends of the vocabulary more often than from its middle.
    size = config.vocab_size
    ids = torch.from_numpy(
        np.where(rng.random((batch, length)) < 0.3, size - 1, rng.integers(0, size, (batch, length)))
    )
    dead = torch.from_numpy(rng.random((batch, length)) < rng.choice([0, 0.3, 1]))
    # Documents of any lengths, one after the other.
    places = np.broadcast_to(np.arange(length), (batch, length))
    begins = np.where(rng.random((batch, length)) < 0.4, places, 0)
    positions = torch.from_numpy(places - np.maximum.accumulate(begins, axis=1))
    for kwargs in ({}, {"dead": dead}, {"position_ids": positions}, {"dead": dead, "position_ids": positions}):
        hash_ids = hasher(ids, **kwargs)
        columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        assert hash_ids.shape == (batch, length, len(config.engram_layer_ids), columns)
        assert (hash_ids >= 0).all()
        assert (hash_ids < torch.tensor(config.engram_num_embeddings)[:, None]).all()
        offsets, primes = hasher.offsets.flatten(1), hasher.primes.flatten(1)
        assert ((hash_ids >= offsets) & (hash_ids < offsets + primes)).all()


@settings(max_examples=120, deadline=None, derandomize=True)
@given(config=layouts())
def test_layouts_are_disjoint(config):
    """Two heads, sizes or layers shared a prime or a bucket range, so they collided on the same n-grams."""
    layout = config.layout()
    primes, offsets = layout.primes, layout.offsets
    assert len(set(primes.flatten().tolist())) == primes.size
    assert primes.min() >= config.engram_vocab_size
    for layer, rows in enumerate(config.engram_num_embeddings):
        ranges = sorted(zip(offsets[layer].flatten().tolist(), primes[layer].flatten().tolist(), strict=True))
        end = 0
        for offset, prime in ranges:
            assert offset == end
            end += prime
        assert end == rows
    multipliers = NgramHasher(config).multipliers
    assert len({tuple(row) for row in multipliers.tolist()}) == len(multipliers)
    assert (multipliers % 2 == 1).all()
    # No product of a compressed id overflows.
    assert (config.engram_compressed_vocab_size - 1) * int(multipliers.max()) < 2**63


def test_tables_have_the_layouts_rows(model):
    """A table had fewer rows than its hash can ask for."""
    layout = model.config.layout()
    tables = model.model.engram_memory.tables
    assert len(tables) == len(model.config.engram_layer_ids)
    for table, rows, primes in zip(tables, layout.num_embeddings, layout.primes, strict=True):
        assert table.weight.shape == (rows, model.config.engram_head_dim)
        assert rows == primes.sum()


LAYOUT_SCRIPT = """
import json, sys
from hf_engram import EngramConfig
from hf_engram.modeling_engram.ngram_hasher import NgramHasher

for fields in json.loads(sys.argv[1]):
    constants = NgramHasher(EngramConfig(**fields)).constants()
    print(json.dumps({name: value.tolist() for name, value in constants.items()}))
"""


def test_layout_does_not_depend_on_the_process(tmp_path):
    """Primes handed out from a list that the process kept: the layout depended on the models built before."""
    sizes = {"vocab_size": 300, "num_hidden_layers": 6, "hidden_size": 8, "num_attention_heads": 1}
    layouts = [
        {"engram_layer_ids": [1, 4], "engram_vocab_size": 20_000, "engram_max_ngram_size": 3, "engram_n_heads": 4},
        {"engram_layer_ids": [0, 1, 5], "engram_vocab_size": 64, "engram_max_ngram_size": 5, "engram_n_heads": 2},
        {"engram_layer_ids": [4], "engram_vocab_size": 20_000, "engram_max_ngram_size": 2, "engram_n_heads": 8},
    ]
    layouts = [sizes | layout for layout in layouts]
    outputs = []
    for order, seed in (([0, 1, 2], "1"), ([2, 1, 0], "2")):
        run = subprocess.run(
            [sys.executable, "-c", LAYOUT_SCRIPT, json.dumps([layouts[i] for i in order])],
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        printed = [json.loads(line) for line in run.stdout.strip().splitlines()[-3:]]
        outputs.append([printed[order.index(i)] for i in range(3)])
    here = [
        {name: value.tolist() for name, value in NgramHasher(EngramConfig(**layout)).constants().items()}
        for layout in layouts
    ]
    assert outputs[0] == outputs[1] == here
