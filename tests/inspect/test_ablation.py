"""Ablation: losses are the model's own, a layer that is shut off writes nothing, and the model stays as it is."""

import pytest
import torch

from hf_engram import EngramForSequenceClassification, EngramModel
from hf_engram.inspect import ablate, shut_off


def loss_of(model, tokenizer, text) -> float:
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


def without_value(model, layer_ids):
    """The same model, with weights by which these layers write zeros."""
    for index in layer_ids:
        engram = model.model.layers[index].engram
        with torch.no_grad():
            engram.wkv.weight[-engram.hidden_size :] = 0
    return model


@pytest.mark.parametrize("hc_mult", [1, 4])
def test_losses(make_model, tokenizer, text, hc_mult):
    result = ablate(make_model(hc_mult=hc_mult), tokenizer, text)
    assert result.n_tokens == len(tokenizer(text)["input_ids"]) - 1
    assert result.loss == pytest.approx(loss_of(make_model(hc_mult=hc_mult), tokenizer, text), abs=1e-5)
    assert list(result.without_layer) == [0, 2]
    off = [([0], result.without_layer[0]), ([2], result.without_layer[2]), ([0, 2], result.without_memory)]
    for layers, loss in off:
        other = without_value(make_model(hc_mult=hc_mult), layers)
        assert loss == pytest.approx(loss_of(other, tokenizer, text), abs=1e-5)
        assert abs(loss - result.loss) > 1e-4


def test_the_memory_of_a_trained_model_is_worth_something(make_model, tokenizer, text):
    """And nothing that the run touches changes: it can be trained on."""
    model = make_model()
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    optimizer = torch.optim.Adam(model.model.engram_memory.parameters(), lr=0.05)
    for _ in range(15):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    result = ablate(model, tokenizer, text)
    assert result.loss < min(*result.without_layer.values(), result.without_memory)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_windows_and_max_tokens(make_model, tokenizer, text):
    """The loss is the mean over all predicted tokens, those of the short last window too."""
    model = make_model(max_position_embeddings=25)
    ids = tokenizer(text)["input_ids"][:40]
    result = ablate(model, tokenizer, text, max_tokens=40)
    assert result.n_tokens == 24 + 14
    sums = 0
    for part in (ids[:25], ids[25:]):
        batch = torch.tensor([part])
        with torch.no_grad():
            sums += model(input_ids=batch, labels=batch).loss.item() * (len(part) - 1)
    assert result.loss == pytest.approx(sums / 38, abs=1e-5)


def test_long_windows_are_scored_in_blocks(make_model, tokenizer, text, monkeypatch):
    model = make_model()
    whole = ablate(model, tokenizer, text)
    monkeypatch.setattr("hf_engram.inspect.ablation.LOGITS_AT_ONCE", 7)
    assert ablate(model, tokenizer, text).loss == pytest.approx(whole.loss, abs=1e-6)


def snapshot(model) -> tuple:
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    return [module.training for module in model.modules()], hooks


def test_the_model_is_restored_also_after_an_error(make_model, tokenizer, text, monkeypatch):
    model = make_model()
    model.train()
    model.model.layers[2].eval()
    before, weights = snapshot(model), {name: value.clone() for name, value in model.state_dict().items()}
    ablate(model, tokenizer, text)
    assert snapshot(model) == before

    calls = []

    def fail_late(states):
        calls.append(states)
        if len(calls) == 3:
            raise RuntimeError("broken head")
        return torch.nn.functional.linear(states, model.lm_head.weight)

    monkeypatch.setattr(model.lm_head, "forward", fail_late)
    with pytest.raises(RuntimeError, match="broken head"):
        ablate(model, tokenizer, text)
    assert len(calls) == 3 and snapshot(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_shut_off(make_model, tokenizer, text):
    model = make_model()
    whole = loss_of(model, tokenizer, text)
    with shut_off(model, [2]):
        assert loss_of(model, tokenizer, text) != whole
    assert loss_of(model, tokenizer, text) == whole
    with pytest.raises(ValueError, match=r"`layer_ids` names \[1\], but the Engram layers are \[0, 2\]"):
        with shut_off(model, [0, 1]):
            pass
    assert not any(m._forward_hooks for m in model.modules())


def test_what_it_refuses(make_model, tokenizer, tiny_model, text):
    for cls in (EngramForSequenceClassification, EngramModel):
        if cls is EngramModel:
            model = make_model().model
        else:
            model = make_model(cls=cls)
        with pytest.raises(ValueError, match="has no language modelling head"):
            ablate(model, tokenizer, text)
    with pytest.raises(ValueError, match="`text` has 1 token: a loss needs at least two"):
        ablate(make_model(), tokenizer, text, max_tokens=1)
    with pytest.raises(ValueError, match="`model` has no Engram layers"):
        ablate(tiny_model(engram_layer_ids=[]), tokenizer, text)
