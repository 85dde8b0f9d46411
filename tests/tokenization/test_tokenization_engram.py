"""Every public way to an encoding holds the right `hash_ids`, and is otherwise what the plain tokenizer gives."""

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
)

from hf_engram import EngramTokenizer


CHAT = [{"role": "user", "content": "What is a word?"}, {"role": "assistant", "content": "A unit."}]


def to_lists(encoding) -> dict:
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in encoding.items()}


def without_hash_ids(encoding) -> dict:
    return {name: value for name, value in to_lists(encoding).items() if name != "hash_ids"}


@pytest.fixture
def check(expected_hash_ids):
    """`check(tokenizer, encoding)`: the hash ids of every row are the expected ones, pads counted as dead."""

    def compare(tokenizer: EngramTokenizer, encoding, masks=None) -> None:
        ids, hash_ids = encoding["input_ids"], encoding["hash_ids"]
        masks = encoding["attention_mask"] if masks is None else masks
        if len(ids) == 0 or np.ndim(ids[0]) == 0:
            ids, hash_ids, masks = [ids], [hash_ids], [masks]
        assert len(ids) == len(hash_ids) == len(masks)
        for row, row_hash_ids, mask in zip(ids, hash_ids, masks, strict=True):
            expected = expected_hash_ids(tokenizer, [int(i) for i in row], [int(i) for i in mask])
            assert len(row_hash_ids) == len(row)
            assert np.array_equal(np.asarray(row_hash_ids).reshape(expected.shape), expected)

    return compare


# --- golden


@pytest.mark.parametrize("index", [0, 1])
def test_golden_rows(deepseek_folder, golden_hashing, index):
    case = golden_hashing["cases"][index]
    tokenizer = EngramTokenizer.from_pretrained(deepseek_folder, **case["config"])
    fields = tokenizer.engram_fields()
    assert fields == case["config"] | {
        "engram_compressed_vocab_size": golden_hashing["engram_compressed_vocab_size"],
        "engram_token_map_size": golden_hashing["vocab_size"],
        "engram_token_map_sha256": golden_hashing["token_map_sha256_int32_le"],
    }
    texts = [row for row in case["rows"] if row["text"] is not None]
    for row in case["rows"]:
        mask = row.get("token_mask")
        assert tokenizer.compute_hash_ids(row["input_ids"], mask).tolist() == row["hash_ids"]
        assert tokenizer.compute_hash_ids(torch.tensor([row["input_ids"]]), mask)[0].tolist() == row["hash_ids"]
    for row in texts:
        encoding = tokenizer(row["text"])
        assert encoding["input_ids"] == row["input_ids"] and encoding["hash_ids"] == row["hash_ids"]
    batch = tokenizer([row["text"] for row in texts], padding=True, padding_side="left", return_tensors="pt")
    for row, hash_ids, mask in zip(texts, batch["hash_ids"], batch["attention_mask"], strict=True):
        assert hash_ids[mask.bool()].tolist() == row["hash_ids"]


# --- as the plain tokenizer


def test_encodes_as_the_deepseek_tokenizer(deepseek, deepseek_folder, corpus):
    plain = AutoTokenizer.from_pretrained(deepseek_folder)
    special = "".join(plain.added_tokens_decoder[i].content + " x" for i in list(plain.added_tokens_decoder)[:40])
    texts = [*corpus[:10], special, " \n\t caf\u00e9 \u6df1\u5ea6"]
    assert without_hash_ids(deepseek(texts)) == dict(plain(texts))
    assert deepseek.batch_decode(plain(texts)["input_ids"]) == plain.batch_decode(plain(texts)["input_ids"])
    assert len(deepseek) == len(plain) and deepseek.special_tokens_map == plain.special_tokens_map


def test_from_tokenizer_takes_everything_over(small_plain, texts):
    plain = copy.deepcopy(small_plain)
    plain.padding_side, plain.truncation_side = "left", "left"
    plain.add_special_tokens({"extra_special_tokens": ["<tool>"]})
    plain.add_tokens(["zebra"])
    tokenizer = EngramTokenizer.from_tokenizer(plain)
    for name in ("special_tokens_map", "extra_special_tokens", "chat_template", "padding_side", "truncation_side"):
        assert getattr(tokenizer, name) == getattr(plain, name), name
    assert tokenizer.model_max_length == 512 and tokenizer.get_vocab() == plain.get_vocab()
    texts = [*texts, "a zebra<tool> ran</s>"]
    arguments = {"padding": True, "truncation": True, "max_length": 30}
    assert without_hash_ids(tokenizer(texts, **arguments)) == dict(plain(texts, **arguments))
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == plain.apply_chat_template(CHAT, tokenize=False)
    tokenizer.add_tokens(["gnu"])
    assert len(tokenizer) == len(plain) + 1
    assert EngramTokenizer.from_tokenizer(plain, padding_side="right").padding_side == "right"


def test_from_pretrained_of_a_single_file(small_folder, small):
    tokenizer = EngramTokenizer.from_pretrained(small_folder / "tokenizer.json", eos_token="</s>")
    assert tokenizer("a word")["input_ids"] == small("a word")["input_ids"]


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_folders_of_other_classes_load_and_encode_alike(name, small_backend, corpus, texts, tmp_path):
    """These classes rebuild their backend in Python; what they save is all in tokenizer.json."""
    import json

    from transformers import GPT2Tokenizer, LlamaTokenizer, Qwen2Tokenizer

    cls = {"gpt2": GPT2Tokenizer, "llama": LlamaTokenizer, "qwen2": Qwen2Tokenizer}[name]
    model = json.loads(small_backend.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    extra = {"add_bos_token": True, "unk_token": "<pad>"} if name == "llama" else {}
    cls(vocab=model["vocab"], merges=merges, **extra).save_pretrained(tmp_path)
    plain = AutoTokenizer.from_pretrained(tmp_path)
    assert type(plain) is cls
    for tokenizer in (EngramTokenizer.from_pretrained(tmp_path), EngramTokenizer.from_tokenizer(plain)):
        texts = [*texts, *corpus[:3]]
        assert tokenizer(texts)["input_ids"] == plain(texts)["input_ids"]
        assert tokenizer.special_tokens_map == plain.special_tokens_map


# --- calls


def test_one_text_and_a_batch(small, texts, check):
    for encoding in (small(texts[0]), small(texts), small([texts[0]]), small("")):
        check(small, encoding)
    assert isinstance(small(texts)["hash_ids"][0][0][0][0], int)
    assert np.array(small(texts[0])["hash_ids"]).shape == (len(small(texts[0])["input_ids"]), 2, 8)


@pytest.mark.parametrize("return_tensors", [None, "np", "pt"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"padding": "longest"},
        {"padding": "longest", "pad_to_multiple_of": 16},
        {"padding": "max_length", "truncation": True, "max_length": 12},
        {"padding": "max_length", "truncation": True, "max_length": 8, "return_overflowing_tokens": True, "stride": 2},
    ],
)
def test_padding_and_truncation(small, small_plain, texts, check, side, arguments, return_tensors):
    arguments = {**arguments, "padding_side": side, "return_tensors": return_tensors}
    encoding = small(texts, **arguments)
    check(small, encoding)
    assert without_hash_ids(encoding) == to_lists(small_plain(texts, **arguments))
    bare = small(texts, **arguments, return_attention_mask=False)
    assert "attention_mask" not in bare
    check(small, bare, masks=encoding["attention_mask"])


def test_tensors(small, texts):
    encoding = small(texts, padding=True, return_tensors="pt")
    assert encoding["hash_ids"].dtype == torch.int64
    assert encoding["hash_ids"].shape == (*encoding["input_ids"].shape, 2, 8)
    assert list(encoding) == ["input_ids", "attention_mask", "hash_ids"]
    encoding["hash_ids"] += 1  # the tensor may be written to
    array = small(texts, padding=True, return_tensors="np")["hash_ids"]
    assert array.dtype == np.int64 and array.tolist() == (encoding["hash_ids"] - 1).tolist()
    assert small("", add_special_tokens=False, return_tensors="pt")["hash_ids"].shape == (1, 0, 2, 8)


def test_ragged_numpy_batch(small, small_plain, texts, check):
    encoding = small(texts, return_tensors="np")
    assert encoding["hash_ids"].dtype == object
    check(small, encoding)


def test_pairs_and_words(small, small_plain, texts, check):
    pairs = {"text": texts, "text_pair": texts[::-1]}
    check(small, small(**pairs, padding=True, return_tensors="pt"))
    assert without_hash_ids(small(**pairs)) == dict(small_plain(**pairs))
    check(small, small("one", "two"))
    check(small, small(["some", "words"], is_split_into_words=True))
    check(small, small([["some", "words"], ["more"]], is_split_into_words=True, padding=True, return_tensors="np"))


def test_targets_are_labels(small, small_plain):
    encoding = small("one", text_target="two")
    assert encoding["labels"] == small_plain("two")["input_ids"]
    assert without_hash_ids(encoding) == dict(small_plain("one", text_target="two"))


def test_ids_alone(small, small_plain, texts):
    assert small.encode(texts[0]) == small_plain.encode(texts[0])
    assert small.encode(texts[0], return_tensors="pt").tolist() == [small_plain.encode(texts[0])]
    assert small.tokenize(texts[0]) == small_plain.tokenize(texts[0])
    assert small.decode(small(texts[0])["input_ids"]) == small_plain.decode(small_plain(texts[0])["input_ids"])


def test_chat(small, small_plain, check):
    for arguments in (
        {},
        {"return_tensors": "pt"},
        {"return_assistant_tokens_mask": True},
        {"return_assistant_tokens_mask": True, "return_tensors": "pt"},
    ):
        encoding = small.apply_chat_template(CHAT, tokenize=True, return_dict=True, **arguments)
        check(small, encoding)
        plain = small_plain.apply_chat_template(CHAT, tokenize=True, return_dict=True, **arguments)
        assert without_hash_ids(encoding) == to_lists(plain)
    batch = small.apply_chat_template(
        [CHAT, CHAT[:1]], tokenize=True, return_dict=True, padding=True, return_tensors="pt"
    )
    check(small, batch)
    ids = small.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    assert ids == small_plain.apply_chat_template(CHAT, tokenize=True, return_dict=False)
    off = small.apply_chat_template(CHAT, return_dict=True, tokenizer_kwargs={"return_hash_ids": False})
    assert "hash_ids" not in off


def test_sanitised_chat(small_plain, check):
    import inspect

    if "sanitize_control_tokens" not in inspect.signature(small_plain.apply_chat_template).parameters:
        pytest.skip("this version of Transformers has no sanitize_control_tokens")
    plain = copy.deepcopy(small_plain)
    plain.backend_tokenizer.post_processor = None
    tokenizer = EngramTokenizer.from_tokenizer(plain)
    chats = [[{"role": "user", "content": "</s> is text"}], CHAT]
    arguments = {"return_dict": True, "sanitize_control_tokens": True, "padding": True, "return_tensors": "pt"}
    encoding = tokenizer.apply_chat_template(chats, **arguments)
    check(tokenizer, encoding)
    assert without_hash_ids(encoding) == to_lists(plain.apply_chat_template(chats, **arguments))
    off = tokenizer.apply_chat_template(chats, **arguments, tokenizer_kwargs={"return_hash_ids": False})
    assert "hash_ids" not in off


def test_turning_it_off(small, small_plain, texts, check):
    assert dict(small(texts, return_hash_ids=False)) == dict(small_plain(texts))
    off = EngramTokenizer.from_tokenizer(small_plain, return_hash_ids=False)
    assert dict(off(texts)) == dict(small_plain(texts)) and off.model_input_names == ["input_ids", "attention_mask"]
    check(off, off(texts, return_hash_ids=True))
    assert not off.return_hash_ids and small.return_hash_ids
    no_layers = EngramTokenizer.from_tokenizer(small_plain, engram_layer_ids=[])
    assert dict(no_layers(texts, return_hash_ids=True)) == dict(small_plain(texts))
    assert no_layers.compute_hash_ids([[1, 2]]).shape == (1, 2, 0, 8)
    # As for any other name in Transformers.
    small.model_input_names = ["input_ids"]
    assert list(small("a")) == ["input_ids"]


def test_named_inputs_of_a_config_do_not_turn_it_off(small_backend):
    names = ["input_ids", "attention_mask"]
    plain = PreTrainedTokenizerFast(tokenizer_object=small_backend, eos_token="</s>", model_input_names=names)
    tokenizer = EngramTokenizer.from_tokenizer(plain)
    assert "hash_ids" in tokenizer("a") and plain.model_input_names == names


# --- pad and collators


def test_pad(small, small_plain, texts, check):
    encodings = [small(text) for text in texts]
    for side in ("left", "right"):
        for return_tensors in (None, "np", "pt"):
            arguments = {"padding_side": side, "return_tensors": return_tensors, "pad_to_multiple_of": 4}
            padded = small.pad(encodings, **arguments)
            check(small, padded)
            assert padded["hash_ids"] is not None and without_hash_ids(padded) == to_lists(
                small_plain.pad([small_plain(text) for text in texts], **arguments)
            )
    batch = small(texts)
    check(small, small.pad(batch, return_tensors="pt"))
    assert len(batch["hash_ids"][0]) == len(batch["input_ids"][0])  # the given encodings stay as they were
    check(small, small.pad(small(texts[0]), padding="max_length", max_length=20))
    check(small, small.pad({"input_ids": [[1, 5, 6], [1]]}))
    check(small, small.pad(encodings, padding=False))
    bare = small.pad([{"input_ids": [1, 5, 6]}, {"input_ids": [1]}], return_attention_mask=False, padding_side="left")
    assert set(bare) == {"input_ids", "hash_ids"}
    check(small, bare, masks=[[1, 1, 1], [0, 0, 1]])
    assert "hash_ids" not in small.pad(encodings, return_hash_ids=False)
    assert "hash_ids" not in small.pad([{"input_ids": [1, 5], "position_ids": [0, 0]}])
    square = {"input_ids": [1, 5], "attention_mask": np.tri(2, dtype=np.int64)[None]}
    assert "hash_ids" not in small.pad([square], return_tensors="pt")


def test_pad_drops_hash_ids_that_are_off(small, small_plain):
    off = EngramTokenizer.from_tokenizer(small_plain, return_hash_ids=False)
    assert "hash_ids" not in off.pad([small("one two"), small("a")], return_tensors="pt")


def test_collators(small, texts, check):
    examples = [dict(small(text)) for text in texts]
    check(small, DataCollatorWithPadding(small)(copy.deepcopy(examples)))
    check(small, DataCollatorForLanguageModeling(small, mlm=False)(copy.deepcopy(examples)))
    labelled = [example | {"labels": example["input_ids"]} for example in examples]
    batch = DataCollatorForSeq2Seq(small)(copy.deepcopy(labelled))
    check(small, batch)
    assert batch["labels"].shape == batch["input_ids"].shape
    # Packed into one row, an n-gram may not cross from one example to the next: left to the model's position_ids.
    packed = DataCollatorWithFlattening()(copy.deepcopy(examples))
    assert "hash_ids" not in packed
    hash_ids = small.compute_hash_ids(packed["input_ids"], position_ids=packed["position_ids"])
    assert hash_ids[0].tolist() == [row for example in examples for row in example["hash_ids"]]


# --- datasets, processes, copies


@pytest.mark.parametrize("batched", [False, True])
def test_datasets_map(small, texts, check, batched):
    dataset = Dataset.from_dict({"text": texts}).map(
        lambda example: small(example["text"]), batched=batched, num_proc=2, remove_columns=["text"]
    )
    check(small, dataset[:])
    dataset.set_format("torch")
    check(small, DataCollatorWithPadding(small)([dataset[i] for i in range(len(dataset))]))


def test_forked_process(small):
    """Hashed by NumPy: PyTorch's thread pool does not survive a fork."""
    expected = small("a word", return_tensors="pt")["hash_ids"].tolist()
    torch.ones(512, 512) @ torch.ones(512, 512)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("fork")) as pool:
        encoding = pool.submit(small, "a word", return_tensors="pt").result(timeout=600)
    assert encoding["hash_ids"].tolist() == expected


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))], ids=["copy", "pickle"])
def test_copies(small, duplicate, monkeypatch):
    with monkeypatch.context() as patch:
        copied = duplicate(small)
        patch.setattr("hf_engram.tokenization.tokenization_engram.build_token_map", None)  # a copy has it already
        assert copied("a word")["hash_ids"] == small("a word")["hash_ids"]
    copied.add_tokens(["zebra"])
    assert len(copied.token_map) == len(small.token_map) + 1


# --- compute_hash_ids


@pytest.fixture(scope="module")
def tokenizers_by_size(small_plain) -> dict[int, EngramTokenizer]:
    fields = {"engram_layer_ids": [0, 2], "engram_vocab_size": 11, "engram_n_heads": 3}
    return {n: EngramTokenizer.from_tokenizer(small_plain, engram_max_ngram_size=n, **fields) for n in range(2, 6)}


@settings(deadline=None)
@given(st.data())
def test_compute_hash_ids_for_any_ids_and_masks(tokenizers_by_size, expected_hash_ids, data):
    max_ngram_size = data.draw(st.integers(2, 5))
    tokenizer = tokenizers_by_size[max_ngram_size]
    n_rows, length = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 8))

    def draw_rows(element: st.SearchStrategy) -> list:
        row = st.lists(element, min_size=length, max_size=length)
        return data.draw(st.lists(row, min_size=n_rows, max_size=n_rows))

    ids, mask = draw_rows(st.integers(0, 599)), draw_rows(st.integers(0, 1))
    hash_ids = tokenizer.compute_hash_ids(ids, mask)
    assert hash_ids.dtype == np.int64 and hash_ids.shape == (n_rows, length, 2, (max_ngram_size - 1) * 3)
    for row_hash_ids, row, row_mask in zip(hash_ids, ids, mask, strict=True):
        assert np.array_equal(row_hash_ids, expected_hash_ids(tokenizer, row, row_mask))
        assert np.array_equal(row_hash_ids, tokenizer.compute_hash_ids(row, row_mask))
    in_numpy = tokenizer.compute_hash_ids(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool))
    in_torch = tokenizer.compute_hash_ids(torch.tensor(ids, dtype=torch.int64), torch.tensor(mask))
    assert np.array_equal(in_numpy, hash_ids) and np.array_equal(in_torch, hash_ids)


def test_pad_token_is_seen_where_the_mask_says_so(small):
    pad_id = small.pad_token_id
    alive, padded = small.compute_hash_ids([[7, pad_id, 9]]), small.compute_hash_ids([[7, pad_id, 9]], [[1, 0, 1]])
    assert not np.array_equal(alive[0, 2], padded[0, 2])


def test_packed_documents(small):
    first, second = small("one two three")["input_ids"], small("four five")["input_ids"]
    positions = [*range(len(first)), *range(len(second))]
    packed = small.compute_hash_ids([first + second], position_ids=[positions])
    assert np.array_equal(packed[0, : len(first)], small.compute_hash_ids(first))
    assert np.array_equal(packed[0, len(first) :], small.compute_hash_ids(second))
    twice = small.compute_hash_ids([first + second] * 2, position_ids=torch.tensor([positions]))
    assert np.array_equal(twice[1], packed[0])


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[600]], ValueError, r"id 600, outside \[0, 600\)"),
        ([[-1]], ValueError, "id -1, outside"),
        ([[1.0]], TypeError, "must hold integers"),
        ([[True]], TypeError, "must hold integers"),
        (3, ValueError, r"must have the shape \[B, L\] or \[L\], got \[\]"),
        ([[[1]]], ValueError, r"got \[1, 1, 1\]"),
    ],
)
def test_compute_hash_ids_refuses(small, ids, error, message):
    with pytest.raises(error, match=message):
        small.compute_hash_ids(ids)


@pytest.mark.parametrize("mask", [[[1]], [[1, 1], [1, 1]], np.ones((1, 1, 2, 2))])
def test_mask_of_another_shape_is_refused(small, mask):
    if np.shape(mask) == (2, 2):
        ids = [[1, 2, 3], [1, 2, 3]]
    else:
        ids = [[1, 2], [3, 4]]
    with pytest.raises(ValueError, match="`attention_mask` must have the shape of `input_ids`"):
        small.compute_hash_ids(ids, mask)


# --- fields


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("engram_layer_ids", [-1], "integer of at least 0, got -1"),
        ("engram_layer_ids", [1.0], "got 1.0"),
        ("engram_layer_ids", [3, 1], r"must ascend, each index once, got \[3, 1\]. Sort them"),
        ("engram_layer_ids", [1, 1], "must ascend"),
        ("engram_layer_ids", 1, "must be a list"),
        ("engram_layer_ids", "1", "must be a list"),
        ("engram_vocab_size", 0, "at least 1, got 0"),
        ("engram_vocab_size", 2.5, "got 2.5"),
        ("engram_max_ngram_size", 1, "at least 2, got 1"),
        ("engram_n_heads", 0, "at least 1, got 0"),
        ("engram_n_heads", True, "got True"),
        ("engram_pad_token_id", -1, "at least 0, got -1"),
        ("engram_compressed_vocab_size", 0, "at least 1, got 0"),
    ],
)
def test_fields_out_of_range_are_refused(small_plain, field, value, message):
    with pytest.raises(ValueError, match=f"`{field}` .*{message}"):
        EngramTokenizer.from_tokenizer(small_plain, **{field: value})


def test_fields_take_numpy_integers(small_plain):
    tokenizer = EngramTokenizer.from_tokenizer(small_plain, engram_layer_ids=np.array([1, 2]))
    assert tokenizer.engram_fields()["engram_layer_ids"] == [1, 2]


def test_default_pad_token(small_backend, small_plain):
    assert EngramTokenizer.from_tokenizer(small_plain).engram_fields()["engram_pad_token_id"] == 0
    only_eos = PreTrainedTokenizerFast(tokenizer_object=small_backend, eos_token="</s>")
    assert EngramTokenizer.from_tokenizer(only_eos).engram_fields()["engram_pad_token_id"] == 2
    neither = EngramTokenizer.from_tokenizer(PreTrainedTokenizerFast(tokenizer_object=small_backend))
    with pytest.raises(ValueError, match="`engram_pad_token_id` is not given"):
        neither("a")
    neither.add_special_tokens({"pad_token": "<new>"})
    assert neither.engram_fields()["engram_pad_token_id"] == 600
    outside = EngramTokenizer.from_tokenizer(small_plain, engram_pad_token_id=600)
    with pytest.raises(ValueError, match="`engram_pad_token_id` is 600, but the tokenizer's ids end at 599"):
        outside.engram_fields()


def test_slow_tokenizer_is_refused():
    with pytest.raises(TypeError, match="must be a fast tokenizer, got object"):
        EngramTokenizer.from_tokenizer(object())


def test_vocabulary_with_ids_left_out():
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "b": 7}, unk_token="<pad>"))
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>")
    tokenizer = EngramTokenizer.from_tokenizer(plain)
    assert tokenizer("b")["hash_ids"] and tokenizer.engram_fields()["engram_token_map_size"] == 8


# --- added tokens


def test_map_follows_tokens_that_are_added(small):
    before = small.engram_fields()
    token_map = small.token_map
    small.add_tokens(["THE", "zebra", " Zebra "])
    after = small.engram_fields()
    assert small.token_map[:600].tolist() == token_map.tolist() and len(small.token_map) == len(small) == 603
    the, zebra, zebra_too = small.token_map[600:].tolist()
    assert the == small.token_map[small.convert_tokens_to_ids("\u0120the")]
    assert zebra == zebra_too == before["engram_compressed_vocab_size"]
    assert after["engram_compressed_vocab_size"] == zebra + 1 and after["engram_token_map_size"] == 603
    assert before["engram_token_map_sha256"] != after["engram_token_map_sha256"]
    assert small("a zebra")["hash_ids"]


def test_given_size_leaves_room(small_plain):
    classes = EngramTokenizer.from_tokenizer(small_plain).engram_compressed_vocab_size
    tokenizer = EngramTokenizer.from_tokenizer(small_plain, engram_compressed_vocab_size=classes + 1)
    assert tokenizer.engram_fields()["engram_compressed_vocab_size"] == classes + 1
    tokenizer.add_tokens(["zebra"])
    assert tokenizer.token_map[600] == classes
    tokenizer.add_tokens(["gnu"])
    message = rf"Token 'gnu' \(id 601\) needs the compressed id {classes + 1}, but .* is {classes + 1}\."
    with pytest.raises(ValueError, match=message):
        tokenizer("a")
    too_small = EngramTokenizer.from_tokenizer(small_plain, engram_compressed_vocab_size=classes - 1)
    with pytest.raises(ValueError, match=f"`engram_compressed_vocab_size` is {classes - 1}"):
        too_small.engram_fields()


def test_tokenizer_trained_from_this_one_starts_afresh(small, corpus):
    trained = small.train_new_from_iterator(corpus[:5], 400)
    assert type(trained) is EngramTokenizer and trained.engram_layer_ids == [1, 3]
    assert len(trained.token_map) == len(trained) and trained("a word")["hash_ids"]


def test_chat_without_hash_ids(small):
    """`return_hash_ids=False` is the tokenizer's, not the template's."""
    assert "hash_ids" not in small.apply_chat_template(CHAT, return_dict=True, return_hash_ids=False)


def test_pickles_the_same_before_and_after_use(small_plain):
    """`datasets` recognises a tokenizer by its pickle: first use must not change it."""
    tokenizer = EngramTokenizer.from_tokenizer(small_plain, engram_layer_ids=[1])
    before = pickle.dumps(tokenizer)
    tokenizer(["a text"])
    assert pickle.dumps(tokenizer) == before
