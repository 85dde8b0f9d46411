"""Binding a tokenizer to a model, and resizing its vocabulary."""

import copy

import numpy as np
import pytest
import torch

from hf_engram import EngramForCausalLM, EngramModel
from hf_engram.tokenization.token_map import token_map_sha256


MAP = np.arange(90) // 2  # 45 compressed ids


def map_fields(token_map=MAP, compressed=45) -> dict:
    return {
        "engram_compressed_vocab_size": compressed,
        "engram_token_map_size": len(token_map),
        "engram_token_map_sha256": token_map_sha256(np.asarray(token_map, dtype=np.int32)),
    }


def test_unbound_model_says_what_to_do(tiny_model, random_ids):
    """A model whose config asks for a token map cannot hash before a tokenizer is bound; the remedy is named."""
    model = tiny_model(**map_fields())
    for call in (model.compute_hash_ids, model):
        with pytest.raises(ValueError, match=r"bind_tokenizer"):
            call(random_ids(1, 4))
    assert torch.isfinite(tiny_model(**map_fields(), engram_layer_ids=[])(random_ids(1, 4)).logits).all()


def test_bind(tiny_model, stand_in_tokenizer):
    """Binding installs the map, returns the model, and works again; ids beyond the tokenizer hash as padding."""
    model = tiny_model(**map_fields())
    tokenizer = stand_in_tokenizer(model.config, MAP)
    assert model.bind_tokenizer(tokenizer) is model
    token_map = model.model.engram_hasher.token_map
    assert token_map.dtype == torch.int32
    assert token_map.tolist() == [*MAP.tolist(), *[int(MAP[model.config.engram_pad_token_id])] * 6]
    before = model.compute_hash_ids(torch.tensor([[3, 4, 5]]))
    assert torch.equal(model.bind_tokenizer(tokenizer).compute_hash_ids(torch.tensor([[3, 4, 5]])), before)
    # 4 and 5 are one compressed id, 3 is another.
    assert torch.equal(model.compute_hash_ids(torch.tensor([[3, 5, 4]])), before)
    assert not torch.equal(model.compute_hash_ids(torch.tensor([[4, 4, 4]])), before)


def test_bind_through_the_base_model(tiny_model, stand_in_tokenizer):
    """The decoder alone can be bound, too."""
    model = tiny_model(EngramModel, **map_fields())
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    assert model.engram_hasher.is_bound


def test_bind_fills_in_the_config(tiny_model, stand_in_tokenizer):
    """A model made without the map's digest gets it from the first tokenizer, and refuses others from then on."""
    model = tiny_model(engram_compressed_vocab_size=45)
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    assert model.config.engram_token_map_size == 90
    assert model.config.engram_token_map_sha256 == map_fields()["engram_token_map_sha256"]
    model.config.validate()
    with pytest.raises(ValueError, match="sha256"):
        model.bind_tokenizer(stand_in_tokenizer(model.config, MAP[::-1]))


def test_bind_refuses_a_plain_model(tiny_model, tiny_config, stand_in_tokenizer):
    """A model without Engram layers has nothing to bind."""
    with pytest.raises(ValueError, match="engram_layer_ids"):
        tiny_model(engram_layer_ids=[]).bind_tokenizer(stand_in_tokenizer(tiny_config(), MAP))


@pytest.mark.parametrize(
    ("token_map", "fields", "words"),
    [
        (MAP[:89], {}, ["90", "89"]),
        (MAP[::-1], {}, ["sha256"]),
        (np.where(np.arange(90) == 7, 4, MAP), {}, ["sha256"]),
        (MAP, {"engram_layer_ids": [0, 1]}, ["engram_layer_ids", "[0, 1]", "[0, 2]"]),
        (MAP, {"engram_vocab_size": 61}, ["engram_vocab_size", "61", "60"]),
        (MAP, {"engram_max_ngram_size": 3}, ["engram_max_ngram_size", "3", "4"]),
        (MAP, {"engram_n_heads": 1}, ["engram_n_heads", "1", "2"]),
        (MAP, {"engram_pad_token_id": 1}, ["engram_pad_token_id", "1", "0"]),
        (MAP, {"engram_compressed_vocab_size": 50}, ["engram_compressed_vocab_size", "50", "45"]),
    ],
    ids=["size", "order", "one_entry", "layers", "rows", "ngram", "heads", "pad", "compressed"],
)
def test_bind_refuses(tiny_model, stand_in_tokenizer, token_map, fields, words):
    """A tokenizer of another size, map or layout is refused, and the model stays as it was."""
    model = tiny_model(**map_fields())
    config, token_map_before = copy.deepcopy(model.config), model.model.engram_hasher.token_map.clone()
    with pytest.raises(ValueError) as error:
        model.bind_tokenizer(stand_in_tokenizer(model.config, token_map, **fields))
    for word in words:
        assert word in str(error.value)
    assert model.config.to_dict() == config.to_dict()
    assert torch.equal(model.model.engram_hasher.token_map, token_map_before)


def test_bind_refuses_far_smaller_tokenizers(tiny_model, stand_in_tokenizer, tmp_path):
    """A tokenizer that leaves more than half of the rows without a token is another model's; one more token than that,
    and it may be this one's. A model that was made with the small tokenizer keeps it."""
    model = tiny_model(engram_compressed_vocab_size=45)
    with pytest.raises(ValueError, match=r"47 token ids.*`vocab_size` 96"):
        model.bind_tokenizer(stand_in_tokenizer(model.config, np.arange(47) % 45))
    assert not model.model.engram_hasher.is_bound
    assert model.bind_tokenizer(stand_in_tokenizer(model.config, np.arange(48) % 45)).model.engram_hasher.is_bound

    token_map = np.arange(40, dtype=np.int32)
    model = tiny_model(**map_fields(token_map))
    tokenizer = stand_in_tokenizer(model.config, token_map)
    with pytest.raises(ValueError, match=r"40 token ids.*`vocab_size` 96"):
        model.bind_tokenizer(tokenizer)
    model.model.engram_hasher.bind_token_map(token_map)
    model.save_pretrained(tmp_path)
    assert EngramForCausalLM.from_pretrained(tmp_path).bind_tokenizer(tokenizer).model.engram_hasher.is_bound


def test_bind_refuses_a_pad_token_beyond_the_tokenizer(tiny_model, stand_in_tokenizer):
    model = tiny_model(engram_compressed_vocab_size=45, engram_pad_token_id=92)
    with pytest.raises(ValueError, match=r"`engram_pad_token_id` is 92.*end at 89"):
        model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    assert not model.model.engram_hasher.is_bound


@pytest.mark.parametrize("token_map", [[], [[0, 1]], [0.0, 1.0], "map"], ids=str)
def test_bind_refuses_what_is_no_map(tiny_model, token_map):
    with pytest.raises(ValueError, match="`token_map` must hold one integer"):
        tiny_model().model.engram_hasher.bind_token_map(token_map)


def test_bind_refuses_ordinary_tokenizers(tiny_model):
    """Something without a token map is refused, and the wrapper is named."""
    with pytest.raises(ValueError, match="EngramTokenizer"):
        tiny_model().bind_tokenizer(object())


def test_bind_refuses_ids_beyond_the_compressed_vocabulary(tiny_model, stand_in_tokenizer):
    """A map that goes beyond `engram_compressed_vocab_size` would overflow the hash; the model stays as it was."""
    model = tiny_model(engram_compressed_vocab_size=40)
    with pytest.raises(ValueError, match="44"):
        model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    assert model.config.engram_token_map_size is None
    assert not model.model.engram_hasher.is_bound


def test_bind_refuses_negative_compressed_ids(tiny_model, stand_in_tokenizer):
    """A map with a negative entry is refused, and the model stays as it was."""
    model = tiny_model(engram_compressed_vocab_size=45)
    with pytest.raises(ValueError):
        model.bind_tokenizer(stand_in_tokenizer(model.config, np.where(np.arange(90) == 8, -2, MAP)))
    assert model.config.engram_token_map_size is None
    assert not model.model.engram_hasher.is_bound


def test_tokenizer_longer_than_the_vocabulary(tiny_model, stand_in_tokenizer):
    """A tokenizer longer than the vocabulary is told to resize the model first."""
    model = tiny_model(**map_fields(compressed=60))
    longer = np.concatenate([MAP, np.arange(45, 55)])
    with pytest.raises(ValueError, match="resize_token_embeddings"):
        model.bind_tokenizer(stand_in_tokenizer(model.config, longer))


def test_extended_tokenizer_after_resizing(tiny_model, stand_in_tokenizer):
    """Tokens added within the head-room: resize, bind again; old ids keep their hashes, new ones have their own."""
    model = tiny_model(**map_fields(compressed=60))
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    before = model.compute_hash_ids(torch.tensor([[3, 4, 9, 80]]))
    model.resize_token_embeddings(100)
    longer = np.concatenate([MAP, np.arange(45, 55)])
    model.bind_tokenizer(stand_in_tokenizer(model.config, longer))
    assert model.config.engram_token_map_size == 100
    assert torch.equal(model.compute_hash_ids(torch.tensor([[3, 4, 9, 80]])), before)
    first, second = model.compute_hash_ids(torch.tensor([[98], [99]]))
    assert not torch.equal(first, second)


def resized_model(tiny_model, stand_in_tokenizer, compressed=60, **fields):
    model = tiny_model(**map_fields(compressed=compressed), vocab_size=90, **fields)
    return model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))


@pytest.mark.parametrize("tied", [False, True])
def test_resize_within_head_room(tiny_model, stand_in_tokenizer, tied, tmp_path):
    """Growing gives every new token a compressed id of its own, and leaves the hashes of the others."""
    model = resized_model(tiny_model, stand_in_tokenizer, tie_word_embeddings=tied)
    ids = torch.tensor([[5, 6, 7, 8, 89]])
    before, logits = model.compute_hash_ids(ids), model(ids).logits
    embedding = model.resize_token_embeddings(97)
    assert embedding.weight.shape[0] == model.config.vocab_size == model.lm_head.weight.shape[0] == 97
    assert model.vocab_size == 97
    token_map = model.model.engram_hasher.token_map
    assert token_map.tolist() == [*MAP.tolist(), *range(45, 52)]
    assert torch.equal(model.compute_hash_ids(ids), before)
    assert torch.allclose(model(ids).logits[..., :90], logits, atol=1e-6)
    assert torch.isfinite(model(torch.tensor([[90, 96]])).logits).all()
    model.save_pretrained(tmp_path)
    again = EngramForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert torch.equal(again.model.engram_hasher.token_map, token_map)


PAD = int(MAP[0])


def test_resize_to_a_multiple(tiny_model, stand_in_tokenizer, tmp_path):
    """`pad_to_multiple_of`: rows up to `new_num_tokens` are tokens with compressed ids of their own; the rest hashes
    as padding. A tokenizer that has these tokens is bound later, also after the model was saved and cut."""
    model = resized_model(tiny_model, stand_in_tokenizer, compressed=50)
    model.resize_token_embeddings(pad_to_multiple_of=32)
    hasher, config = model.model.engram_hasher, model.config
    assert hasher.token_map.tolist() == [*MAP, *[PAD] * 6]
    model.resize_token_embeddings(97, pad_to_multiple_of=20)
    assert config.vocab_size == model.get_input_embeddings().weight.shape[0] == 100
    assert hasher.token_map.tolist() == [*MAP, *[PAD] * 6, 45, *[PAD] * 3]
    model.resize_token_embeddings(102, pad_to_multiple_of=8)
    expected = [*MAP, *[PAD] * 6, 45, *[PAD] * 3, 46, 47, PAD, PAD]
    assert hasher.token_map.tolist() == expected
    assert (config.engram_token_map_size, config.engram_token_map_sha256) == (90, token_map_sha256(MAP.astype("i4")))

    model.save_pretrained(tmp_path)
    again = EngramForCausalLM.from_pretrained(tmp_path)
    assert again.model.engram_hasher.token_map.tolist() == expected
    again.resize_token_embeddings(98)
    assert again.model.engram_hasher.token_map.tolist() == expected[:98]
    again.bind_tokenizer(stand_in_tokenizer(config, [*MAP, 45, 45, 3, 46, 47, 48]))
    assert again.model.engram_hasher.token_map.tolist() == [*MAP, 45, 45, 3, 46, 47, 48, PAD, PAD]
    assert again.config.engram_token_map_size == 96
    again.save_pretrained(tmp_path)
    EngramForCausalLM.from_pretrained(tmp_path).bind_tokenizer(
        stand_in_tokenizer(config, [*MAP, 45, 45, 3, 46, 47, 48])
    )


@pytest.mark.parametrize("pads", [{"pad_to_multiple_of": 64}, {"new_num_tokens": 96, "pad_to_multiple_of": 64}])
def test_padding_needs_no_compressed_ids(tiny_model, stand_in_tokenizer, pads, random_ids, tmp_path):
    """A model without head-room is padded all the same, compressed or not; its answers stay."""
    compressed = tiny_model(**map_fields())
    compressed.bind_tokenizer(stand_in_tokenizer(compressed.config, MAP))
    for model, known in ((compressed, [*MAP, *[PAD] * 6]), (tiny_model(), range(96))):
        ids = random_ids(2, 8)
        hash_ids, logits = model.compute_hash_ids(ids), model(ids).logits
        model.resize_token_embeddings(**pads)
        assert model.config.vocab_size == 128
        assert model.model.engram_hasher.token_map.tolist() == [*known, *[PAD] * 32]
        assert torch.equal(model.compute_hash_ids(ids), hash_ids)
        torch.testing.assert_close(model(ids).logits[..., :96], logits)
        model.save_pretrained(tmp_path)
        again = EngramForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(again.model.engram_hasher.token_map, model.model.engram_hasher.token_map)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"pad_to_multiple_of": 0}, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": -8}, "pad_to_multiple_of"),
        ({"pad_to_multiple_of": "8"}, "pad_to_multiple_of"),
        ({"new_num_tokens": 0}, "new_num_tokens"),
        ({"new_num_tokens": 97.0}, "new_num_tokens"),
    ],
)
def test_resize_to_no_size(tiny_model, arguments, name):
    model = tiny_model()
    with pytest.raises(ValueError, match=f"`{name}` must be an integer above zero"):
        model.resize_token_embeddings(**arguments)
    assert model.config.vocab_size == len(model.model.engram_hasher.token_map) == 96


def test_resize_without_head_room(tiny_model, stand_in_tokenizer):
    """No compressed ids left: an error that says what to do, and the model is what it was."""
    model = resized_model(tiny_model, stand_in_tokenizer, compressed=46)
    before = copy.deepcopy(model.state_dict())
    config = model.config.to_dict()
    with pytest.raises(ValueError, match="engram_compressed_vocab_size") as error:
        model.resize_token_embeddings(92)
    assert "46" in str(error.value)
    assert model.config.to_dict() == config
    after = model.state_dict()
    assert set(after) == set(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    model.resize_token_embeddings(91)


def test_resize_of_a_full_vocabulary(tiny_model):
    """A model without compression (every id its own) has no head-room: the error is the same."""
    model = tiny_model()
    with pytest.raises(ValueError, match="engram_compressed_vocab_size"):
        model.resize_token_embeddings(97)
    assert model.config.vocab_size == model.get_input_embeddings().weight.shape[0] == 96


def test_shrink(tiny_model, stand_in_tokenizer, tmp_path):
    """Shrinking cuts the map and renews its digest; the model can be saved, loaded and bound again."""
    model = resized_model(tiny_model, stand_in_tokenizer, compressed=45)
    ids = torch.tensor([[5, 6, 7]])
    before = model.compute_hash_ids(ids)
    model.resize_token_embeddings(80)
    assert model.config.vocab_size == model.config.engram_token_map_size == 80
    assert torch.equal(model.compute_hash_ids(ids), before)
    model.save_pretrained(tmp_path)
    again = EngramForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.compute_hash_ids(ids), before)
    again.bind_tokenizer(stand_in_tokenizer(again.config, MAP[:80]))


@pytest.mark.parametrize(("size", "word"), [(44, "engram_compressed_vocab_size"), (3, "engram_pad_token_id")])
def test_shrink_too_far(tiny_model, stand_in_tokenizer, size, word):
    """The vocabulary stays as large as the compressed one, and keeps the pad token."""
    model = resized_model(tiny_model, stand_in_tokenizer, compressed=45, engram_pad_token_id=5)
    with pytest.raises(ValueError, match=word):
        model.resize_token_embeddings(size)
    assert model.config.vocab_size == 90
    assert len(model.model.engram_hasher.token_map) == 90


def test_resize_of_an_unbound_model(tiny_model):
    """Resizing before a tokenizer is bound leaves nothing bound by accident."""
    model = tiny_model(**map_fields(compressed=60))
    model.resize_token_embeddings(100)
    assert not model.model.engram_hasher.is_bound
    with pytest.raises(ValueError, match="bind_tokenizer"):
        model.compute_hash_ids(torch.tensor([[3, 99]]))


def test_shrinking_an_unbound_model(tiny_model, stand_in_tokenizer):
    """What is left of a map that is not there yet cannot be known by a digest: refused, until it is there."""
    model = tiny_model(**map_fields())
    model.resize_token_embeddings(92)  # the tokenizer has 90
    with pytest.raises(ValueError, match=r"`new_num_tokens` \(80\).*bind_tokenizer"):
        model.resize_token_embeddings(80)
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP)).resize_token_embeddings(80)
    assert model.model.engram_hasher.token_map.tolist() == MAP[:80].tolist()


def test_resize_of_a_plain_model(tiny_model):
    """Without Engram layers resizing is Transformers' own."""
    model = tiny_model(engram_layer_ids=[])
    model.resize_token_embeddings(120)
    assert model.config.vocab_size == 120
    assert model(torch.tensor([[119]])).logits.shape[-1] == 120


def test_padded_vocabulary(tiny_model, stand_in_tokenizer, tmp_path):
    """A vocabulary larger than the tokenizer hashes everything, and comes back from a folder."""
    model = tiny_model(**map_fields(), vocab_size=128)
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    ids = torch.tensor([[3, 127, 90, 89]])
    model.save_pretrained(tmp_path)
    again = EngramForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again.compute_hash_ids(ids), model.compute_hash_ids(ids))
    again.bind_tokenizer(stand_in_tokenizer(again.config, MAP))
    # An id that no tokenizer gives hashes as the pad token.
    assert torch.equal(
        model.compute_hash_ids(torch.tensor([[3, 127]])), model.compute_hash_ids(torch.tensor([[3, 0]]))
    )


def test_unbound_model_can_be_saved(tiny_model, stand_in_tokenizer, tmp_path):
    """Saved before a tokenizer is bound, loaded and bound later."""
    model = tiny_model(**map_fields())
    model.save_pretrained(tmp_path)
    again = EngramForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="bind_tokenizer"):
        again.compute_hash_ids(torch.tensor([[3]]))
    again.bind_tokenizer(stand_in_tokenizer(again.config, MAP))
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    assert torch.equal(again.compute_hash_ids(torch.tensor([[3]])), model.compute_hash_ids(torch.tensor([[3]])))


def test_hashes_follow_a_new_binding(tiny_model, stand_in_tokenizer):
    """The model's config, not an earlier check, decides: after unbinding by hand nothing is hashed silently."""
    model = tiny_model(**map_fields())
    model.bind_tokenizer(stand_in_tokenizer(model.config, MAP))
    state = model.state_dict()
    state["model.engram_hasher.token_map"] = torch.full((96,), -1, dtype=torch.int32)
    fresh = tiny_model(**map_fields())
    fresh.load_state_dict(state)
    with pytest.raises(ValueError, match="bind_tokenizer"):
        fresh.compute_hash_ids(torch.tensor([[3]]))
    fresh.load_state_dict({**state, "model.engram_hasher.token_map": model.model.engram_hasher.token_map})
    assert torch.equal(fresh.compute_hash_ids(torch.tensor([[3]])), model.compute_hash_ids(torch.tensor([[3]])))


def test_loading_other_weights_into_a_checked_model(tiny_model):
    """`load_state_dict` with another model's token map into a model that has already hashed is noticed."""
    token_map = np.arange(96) // 2
    fields = {"engram_compressed_vocab_size": 48}
    one, two = tiny_model(**fields), tiny_model(**fields)
    one.model.engram_hasher.bind_token_map(token_map)
    two.model.engram_hasher.bind_token_map(token_map[::-1].copy())
    one.compute_hash_ids(torch.tensor([[3, 4]]))
    one.load_state_dict(two.state_dict())
    with pytest.raises(ValueError, match="sha256"):
        one.compute_hash_ids(torch.tensor([[3, 4]]))
