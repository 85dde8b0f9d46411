"""Saving and loading with the installed package: every class, and weights that do not belong to their config."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_engram import (
    EngramConfig,
    EngramForCausalLM,
    EngramForQuestionAnswering,
    EngramForSequenceClassification,
    EngramForTokenClassification,
    EngramModel,
)


CLASSES = {
    EngramModel: (AutoModel, {}),
    EngramForCausalLM: (AutoModelForCausalLM, {}),
    EngramForSequenceClassification: (AutoModelForSequenceClassification, {"num_labels": 3}),
    EngramForTokenClassification: (AutoModelForTokenClassification, {"num_labels": 5}),
    EngramForQuestionAnswering: (AutoModelForQuestionAnswering, {}),
}


@pytest.mark.parametrize("auto", [False, True], ids=["class", "auto"])
@pytest.mark.parametrize("cls", CLASSES)
def test_save_and_load(lively_model, random_ids, tmp_path, cls, auto):
    """Every class comes back with the same outputs, bit for bit, by its own name and through Auto classes."""
    auto_cls, fields = CLASSES[cls]
    model = lively_model(cls, **fields)
    model.save_pretrained(tmp_path)
    loaded, report = (auto_cls if auto else cls).from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is cls
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    loaded.eval()
    ids = random_ids(2, 7)
    with torch.no_grad():
        for actual, expected in zip(loaded(ids, use_cache=False)[:2], model(ids, use_cache=False)[:2], strict=True):
            assert torch.equal(actual, expected)
    assert type(AutoConfig.from_pretrained(tmp_path)) is EngramConfig


def test_state_dict_round_trip(lively_model, random_ids):
    """A state dict moves everything that matters from one model to another."""
    one, two = lively_model(seed=0), lively_model(seed=1)
    ids = random_ids(2, 7)
    with torch.no_grad():
        assert not torch.equal(one(ids).logits, two(ids).logits)
        two.load_state_dict(one.state_dict())
        assert torch.equal(one(ids).logits, two(ids).logits)
        assert torch.equal(copy.deepcopy(one)(ids).logits, one(ids).logits)


def test_tied_head(lively_model, random_ids, tmp_path):
    """A tied head shares its weight, is saved once, and is tied after loading."""
    model = lively_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded = EngramForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    with torch.no_grad():
        assert torch.equal(loaded(random_ids(1, 5)).logits, model(random_ids(1, 5)).logits)


def test_decoder_loads_from_a_causal_model(lively_model, random_ids, tmp_path):
    """The base model takes its part of a causal model's folder, and a head's model too."""
    model = lively_model()
    model.save_pretrained(tmp_path)
    ids = random_ids(2, 7)
    with torch.no_grad():
        expected = model.model(ids).last_hidden_state
        assert torch.equal(EngramModel.from_pretrained(tmp_path).eval()(ids).last_hidden_state, expected)
        classifier, report = EngramForSequenceClassification.from_pretrained(
            tmp_path, num_labels=3, output_loading_info=True
        )
        assert set(report["missing_keys"]) == {"score.weight"}
        assert torch.equal(classifier.eval().model(ids).last_hidden_state, expected)


def test_sharded_folder(lively_model, random_ids, tmp_path):
    """Several weight files are as good as one."""
    model = lively_model()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = EngramForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(random_ids(1, 5)).logits, model(random_ids(1, 5)).logits)


@pytest.mark.parametrize(
    "change",
    [
        {"engram_layer_ids": [0, 1]},
        {"engram_layer_ids": [1, 2]},
        {"engram_compressed_vocab_size": 90},
        {"engram_vocab_size": 200, "engram_num_embeddings": None},
        {"engram_max_ngram_size": 3, "engram_n_heads": 3, "engram_num_embeddings": None},
        {"engram_n_heads": 3, "engram_max_ngram_size": 3, "engram_num_embeddings": None, "engram_head_dim": 4},
    ],
    ids=str,
)
def test_config_of_another_model_is_refused(lively_model, tmp_path, change):
    """Saved weights under a config.json whose `engram_*` fields were changed do not load silently."""
    lively_model().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises((ValueError, RuntimeError)):
        EngramForCausalLM.from_pretrained(tmp_path)


def test_same_layout_from_another_minimum(lively_model, random_ids, tmp_path):
    """60 and 61 rows at least lay out the same primes: such a config is the same model."""
    model = lively_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "engram_vocab_size": 61}))
    loaded = EngramForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.compute_hash_ids(random_ids(1, 5)), model.compute_hash_ids(random_ids(1, 5)))


@pytest.mark.parametrize("name", ["token_map", "multipliers", "primes", "offsets"])
def test_damaged_hash_constants_are_refused(lively_model, tmp_path, name):
    """A hash constant that is not the config's raises on load."""
    lively_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    key = f"model.engram_hasher.{name}"
    tensors[key] = tensors[key] + 2
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=name.replace("_", ".")):
        EngramForCausalLM.from_pretrained(tmp_path)


def test_damaged_token_map_of_a_bound_model(lively_model, stand_in_tokenizer, tmp_path):
    """Two swapped entries of a bound token map change its digest, and are refused."""
    model = lively_model(engram_compressed_vocab_size=48)
    model.bind_tokenizer(stand_in_tokenizer(model.config, [i // 2 for i in range(96)]))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.engram_hasher.token_map"][[5, 9]] = tensors["model.engram_hasher.token_map"][[9, 5]]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="sha256"):
        EngramForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("cls", [EngramModel, EngramForCausalLM, EngramForSequenceClassification])
@pytest.mark.parametrize("part", ["engram_hasher.multipliers", "engram_memory.tables.1", "layers.2.attn_hc.fn"])
def test_missing_weights_are_refused(lively_model, tmp_path, part, cls):
    """A checkpoint that lacks a part of the decoder does not load with that part at random."""
    lively_model().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if part not in name}
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=part.replace(".", r"\.")):
        cls.from_pretrained(tmp_path)


@pytest.mark.parametrize("change", [{"engram_layer_ids": []}, {"hc_mult": 1}, {"num_hidden_layers": 2}], ids=str)
def test_left_over_weights_are_refused(lively_model, tmp_path, change):
    """Weights that the config has no place for are not dropped silently."""
    lively_model(engram_layer_ids=[0]).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    change = {"engram_num_embeddings": None, **change}
    path.write_text(json.dumps({**json.loads(path.read_text()), "engram_layer_ids": [0], **change}))
    with pytest.raises((ValueError, RuntimeError)):
        EngramForCausalLM.from_pretrained(tmp_path)


def test_save_refuses_a_file(lively_model, tmp_path):
    """A path that is a file raises, and the file stays."""
    path = tmp_path / "file"
    path.write_text("kept")
    with pytest.raises(ValueError, match="save_directory"):
        lively_model().save_pretrained(path)
    assert path.read_text() == "kept"


@pytest.mark.parametrize(
    ("cls", "fields"), [(cls, fields) for cls, (_, fields) in CLASSES.items() if "For" in cls.__name__]
)
def test_heads_forward_and_loss(lively_model, random_ids, cls, fields):
    """Every head's loss has gradients, and padding does not change its answer."""
    model = lively_model(cls, **fields)
    ids = random_ids(2, 7)
    labels = {
        EngramForCausalLM: {"labels": ids},
        EngramForSequenceClassification: {"labels": torch.tensor([0, 2])},
        EngramForTokenClassification: {"labels": torch.randint(5, (2, 7))},
        EngramForQuestionAnswering: {"start_positions": torch.tensor([1, 2]), "end_positions": torch.tensor([3, 2])},
    }[cls]
    output = model(ids, **labels)
    assert output.loss.ndim == 0 and torch.isfinite(output.loss)
    output.loss.backward()
    assert model.model.engram_memory.tables[0].weight.grad.abs().max() > 0
    padded = torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], 1)
    mask = (torch.arange(10) < 7).long().expand(2, -1)
    with torch.no_grad():
        alone, beside = model(ids), model(padded, attention_mask=mask)
    key = "start_logits" if cls is EngramForQuestionAnswering else "logits"
    actual = beside[key] if cls is EngramForSequenceClassification else beside[key][:, :7]
    assert (actual - alone[key]).abs().max() < 1e-4


def test_heads_take_hash_ids(lively_model, random_ids):
    """`hash_ids` and `token_mask` pass through the generic heads to the decoder."""
    model = lively_model(EngramForTokenClassification, num_labels=5)
    ids = random_ids(2, 7)
    hash_ids = model.compute_hash_ids(ids)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(model(ids, hash_ids=hash_ids).logits, expected)
        with pytest.raises(ValueError, match="`hash_ids` are not"):
            model(ids, hash_ids=hash_ids.flip(1))
        assert not torch.equal(model(ids, token_mask=torch.zeros(2, 7, dtype=torch.bool)).logits, expected)
