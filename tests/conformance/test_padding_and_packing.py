"""Padding, packed documents and masked tokens: what stands there is no text, and nothing else feels it."""

import math

import pytest
import torch
from torch.nn import functional as F
from transformers import DataCollatorWithFlattening

from hf_engram.modeling_engram.engram_layer import EngramLayer


@pytest.fixture
def gradients():
    """`gradients(model)`: every parameter's gradient by name, and the model's are cleared."""

    def take(model) -> dict[str, torch.Tensor]:
        taken = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        model.zero_grad(set_to_none=True)
        return taken

    return take


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert sum(gradient.abs().sum() for gradient in expected.values()) > 0
    for name, gradient in expected.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            actual[name], gradient, atol=1e-4 * scale, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


def with_attention(model, implementation: str):
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding(own_model, draw, left_padded, gradients, side, attention):
    """A padded row had other logits, loss and gradients than alone: padding was hashed as text."""
    model = with_attention(own_model, attention)
    rows = [draw(1, length, seed) for seed, length in enumerate((9, 4, 1, 6))]
    ids, mask = left_padded(rows, side)
    # The token before a row's first is padding, from which any causal model would be asked to predict it.
    labels = ids.masked_fill(mask.cumsum(1) * mask <= 1, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    out.loss.backward()
    padded = gradients(model)

    total, n_targets = 0.0, sum(row.shape[1] - 1 for row in rows)
    for i, row in enumerate(rows):
        alone = model(input_ids=row).logits
        torch.testing.assert_close(out.logits[i][mask[i] != 0], alone[0], atol=1e-4, rtol=1e-4)
        if row.shape[1] > 1:
            total = total + F.cross_entropy(alone[0, :-1], row[0, 1:], reduction="sum")
    loss = total / n_targets
    torch.testing.assert_close(out.loss, loss, atol=1e-4, rtol=1e-4)
    loss.backward()
    assert_same_gradients(padded, gradients(model))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_hash_ids(model, draw, left_padded, spelled_out_hash, side):
    """The windows of a padded row's first tokens reached into the padding."""
    rows = [draw(1, length, seed) for seed, length in enumerate((9, 4, 1, 6))]
    ids, mask = left_padded(rows, side)
    hash_ids = model.compute_hash_ids(ids, attention_mask=mask)
    for i, row in enumerate(rows):
        assert torch.equal(hash_ids[i][mask[i] != 0], spelled_out_hash(model, row[0].tolist()))


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_garbage_under_the_mask(model, draw, left_padded, side):
    """What ids stand under the mask changed the outputs at real tokens."""
    ids, mask = left_padded([draw(1, 9, 1), draw(1, 4, 2), draw(1, 1, 3)], side)
    garbage = torch.where(mask != 0, ids, draw(3, 9, 4))
    assert not torch.equal(garbage, ids)
    expected = model(input_ids=ids, attention_mask=mask).logits[mask != 0]
    assert torch.equal(model(input_ids=garbage, attention_mask=mask).logits[mask != 0], expected)
    rows = model.compute_hash_ids(ids, attention_mask=mask)[mask != 0]
    assert torch.equal(model.compute_hash_ids(garbage, attention_mask=mask)[mask != 0], rows)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_row_that_is_all_padding(own_model, draw, gradients, attention):
    """One row of nothing but padding (a last, filled-up batch) made losses and gradients NaN."""
    model = with_attention(own_model, attention)
    ids = torch.cat([draw(1, 6, 1), torch.full((1, 6), model.config.engram_pad_token_id), draw(1, 6, 2)])
    mask = torch.ones_like(ids)
    mask[1] = 0
    labels = ids.masked_fill(mask == 0, -100)
    out = model(input_ids=ids, attention_mask=mask, labels=labels)
    assert torch.isfinite(out.logits).all()
    out.loss.backward()
    actual = gradients(model)
    assert all(torch.isfinite(gradient).all() for gradient in actual.values())
    expected = model(input_ids=ids[[0, 2]], labels=ids[[0, 2]])
    torch.testing.assert_close(out.logits[[0, 2]], expected.logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(out.loss, expected.loss, atol=1e-4, rtol=1e-4)
    expected.loss.backward()
    assert_same_gradients(actual, gradients(model))


def test_row_that_is_all_padding_in_generate(model, draw, watch, generate, plain_greedy):
    """A row of padding in a batch of prompts spoilt the others, or stopped the run."""
    ids = torch.cat([draw(1, 5, 1), torch.full((1, 5), model.config.engram_pad_token_id)])
    mask = torch.tensor([[1] * 5, [0] * 5])
    with watch(model) as seen:
        out = generate(model, ids, 6, attention_mask=mask)
    seen.check_sequences(out, mask)
    assert torch.equal(out[:1], plain_greedy(model, ids[:1], 6)[0])


def test_pad_token_is_also_eos(plain_tokenizer, wrap, make_model, spelled_out_hash, watch, generate, plain_greedy):
    """With the pad token equal to eos, every eos in a text was taken for padding and cut the n-grams after it."""
    plain_tokenizer = plain_tokenizer.__class__(
        tokenizer_object=plain_tokenizer.backend_tokenizer, pad_token="</s>", eos_token="</s>"
    )
    tokenizer = wrap(plain_tokenizer, [0, 2])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    model = make_model(tokenizer, eos_token_id=2)
    text = tokenizer(["one</s>two three", "four"], padding=True, padding_side="left", return_tensors="pt")
    ids, mask = text["input_ids"], text["attention_mask"]
    assert (ids[0] == 2).any() and (ids[1] == 2).any() and mask[0].all() and not mask[1].all()
    expected = spelled_out_hash(model, ids[0].tolist())
    assert torch.equal(model.compute_hash_ids(ids, attention_mask=mask)[0], expected)
    assert torch.equal(text["hash_ids"][0], expected)
    with watch(model) as seen:
        out = generate(model, ids, 6, attention_mask=mask)
    seen.check_sequences(out, mask)
    assert torch.equal(out, plain_greedy(model, ids, 6, mask)[0])


ATTENTIONS = ["sdpa", "eager", pytest.param("flex_attention", marks=pytest.mark.slow)]
LENGTHS = (5, 1, 3, 8)


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("packer", ["position_ids", "collator"])
def test_packed_documents(own_model, draw, gradients, spelled_out_hash, packer, attention):
    """Packed documents saw each other's n-grams, so training on packed rows was another training."""
    model = with_attention(own_model, attention)
    documents = [draw(1, length, seed) for seed, length in enumerate(LENGTHS)]
    if packer == "collator":
        features = [{"input_ids": document[0].tolist()} for document in documents]
        batch = DataCollatorWithFlattening(return_tensors="pt")(features)
        batch = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        assert "attention_mask" not in batch
    else:
        labels = torch.cat([torch.cat([torch.tensor([[-100]]), document[:, 1:]], 1) for document in documents], 1)
        positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
        batch = {"input_ids": torch.cat(documents, 1), "position_ids": positions, "labels": labels}

    rows = torch.cat([spelled_out_hash(model, document[0].tolist()) for document in documents])
    assert torch.equal(model.compute_hash_ids(batch["input_ids"], position_ids=batch["position_ids"])[0], rows)

    # Flex attention has no backward on a CPU.
    trains = attention != "flex_attention" or model.device.type != "cpu"
    for parameter in model.parameters():
        parameter.requires_grad_(trains and parameter.requires_grad)
    out = model(**batch, use_cache=False)
    if trains:
        out.loss.backward()
        packed = gradients(model)
    total = 0.0
    for document, logits in zip(documents, out.logits[0].split(LENGTHS), strict=True):
        alone = model(input_ids=document, use_cache=False).logits[0]
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=1e-4)
        if document.shape[1] > 1:
            total = total + F.cross_entropy(alone[:-1], document[0, 1:], reduction="sum")
    loss = total / sum(length - 1 for length in LENGTHS)
    torch.testing.assert_close(out.loss, loss, atol=1e-4, rtol=1e-4)
    if trains:
        loss.backward()
        assert_same_gradients(packed, gradients(model))


def test_packed_batch(model, draw):
    """Several packed rows in one batch, each with its own cuts."""
    ids = draw(2, 12)
    cuts = ((4, 8), (7, 5))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in cuts])
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        for i, lengths in enumerate(cuts):
            alone = [model(input_ids=part[None], use_cache=False).logits[0] for part in ids[i].split(lengths)]
            torch.testing.assert_close(logits[i], torch.cat(alone), atol=1e-4, rtol=1e-4)


def test_packed_documents_of_features_with_hash_ids(model, tokenizer, draw):
    """Features of the tokenizer, which hold `hash_ids`, through the flattening collator."""
    features = [dict(tokenizer(text)) for text in ("The for statement", "An", "while")]
    assert "hash_ids" in features[0]
    batch = DataCollatorWithFlattening(return_tensors="pt")(features)
    lengths = [len(feature["input_ids"]) for feature in features]
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits[0].split(lengths)
        for feature, part in zip(features, logits, strict=True):
            alone = model(input_ids=torch.tensor([feature["input_ids"]]), use_cache=False).logits[0]
            torch.testing.assert_close(part, alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dead", [(3,), (0, 1), (4, 5), (2, 6, 7), (8,), tuple(range(9))], ids=str)
def test_dead_tokens(model, draw, spelled_out_hash, dead):
    """Tokens that are no text (an image span): Engram wrote on them, or n-grams reached into or across them."""
    ids = draw(1, 9)
    token_mask = torch.ones_like(ids, dtype=torch.bool)
    token_mask[0, list(dead)] = False
    live = token_mask[0]

    rows = model.compute_hash_ids(ids, token_mask=token_mask)[0]
    assert torch.equal(rows[live], spelled_out_hash(model, ids[0].tolist(), dead=dead)[live])

    seen = []
    handles = [
        layer.register_forward_hook(lambda layer, args, out: seen.append((args[0].clone(), out.clone())))
        for layer in model.modules()
        if isinstance(layer, EngramLayer)
    ]
    with torch.no_grad():
        logits = model(input_ids=ids, token_mask=token_mask).logits
        other = ids.clone()
        other[0, ~live] = draw(1, 9, 5)[0, ~live]
        model.compute_hash_ids(other, token_mask=token_mask)
    for handle in handles:
        handle.remove()
    assert len(seen) == len(model.config.engram_layer_ids)
    for before, after in seen:
        assert torch.equal(after[0, ~live], before[0, ~live])
        if live.any() and any(parameter.abs().sum() > 0 for parameter in model.model.engram_memory.parameters()):
            assert not torch.equal(after[0, live], before[0, live])
    assert torch.isfinite(logits).all()


def test_no_gradient_from_dead_tokens(own_model, draw):
    """Table rows of padding and of image spans were trained."""
    ids = draw(2, 6)
    token_mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    own_model(input_ids=ids, attention_mask=mask, token_mask=token_mask).logits[0, 3:].sum().backward()
    rows = own_model.compute_hash_ids(ids, attention_mask=mask, token_mask=token_mask)
    for index, table in enumerate(own_model.model.engram_memory.tables):
        used = rows[0, [0, 1, 3, 4, 5], index].unique()
        touched = (table.weight.grad.abs().sum(-1) > 0).nonzero()[:, 0]
        assert len(touched) > 0
        assert set(touched.tolist()) <= set(used.tolist())


def test_labels_of_minus_100(model, draw):
    """A label of -100 counted in the loss, or was hashed."""
    ids = draw(2, 8)
    labels = ids.clone()
    labels[0, :5], labels[1, 2:4], labels[1, 7] = -100, -100, -100
    with torch.no_grad():
        out = model(input_ids=ids, labels=labels)
        logits = model(input_ids=ids).logits
    targets = [(i, t, labels[i, t + 1]) for i in range(2) for t in range(7) if labels[i, t + 1] != -100]
    losses = [-float(logits[i, t].log_softmax(-1)[target]) for i, t, target in targets]
    assert 0 < len(losses) < 14
    assert math.isclose(float(out.loss), sum(losses) / len(losses), rel_tol=1e-5)
    assert torch.equal(out.logits, logits)
