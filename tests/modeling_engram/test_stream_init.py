"""How a model starts: the stream as an ordinary residual, Engram without an effect, and how both come alive."""

import pytest
import torch

from hf_engram import EngramForCausalLM, EngramModel
from hf_engram.modeling_engram.hyper_connection import HyperConnection


def with_weights_of(model, other):
    """`model` with all weights that it shares with `other`; the names that it has beyond those."""
    result = model.load_state_dict(other.state_dict(), strict=False)
    assert not result.unexpected_keys
    return result.missing_keys


@pytest.mark.parametrize("layer_ids", [[], [0, 2]], ids=["plain", "engram"])
@pytest.mark.parametrize("copies", [2, 4, 7])
def test_copies_start_as_one(tiny_model, random_ids, copies, layer_ids):
    """A fresh model of several copies computes what one copy does with the same weights, to 1e-4."""
    fields = {"engram_layer_ids": layer_ids, "initializer_range": 0.2}
    if layer_ids:
        # The gate has one key per copy, so Engram's own weights cannot be shared; their effect starts at zero.
        one = tiny_model(hc_mult=1, **{**fields, "engram_layer_ids": []})
    else:
        one = tiny_model(hc_mult=1, **fields)
    many = tiny_model(hc_mult=copies, seed=1, **fields)
    missing = with_weights_of(many, one)
    assert all("_hc." in name or "engram" in name for name in missing)
    assert missing
    ids = random_ids(2, 12)
    with torch.no_grad():
        expected, actual = one(ids).logits, many(ids).logits
    assert expected.abs().max() > 1
    assert (actual - expected).abs().max() < 1e-4


def test_initial_mixes(tiny_model, random_ids):
    """At the start `post` is one, `pre` is 1/H, and each copy keeps mostly to itself, whatever the stream holds."""
    connection = tiny_model().model.layers[0].attn_hc
    pre, post, comb = connection(torch.randn(2, 3, 4, 32))
    assert torch.allclose(post, torch.ones_like(post))
    assert torch.allclose(pre, torch.full_like(pre, 0.25))
    assert (comb.diagonal(dim1=-2, dim2=-1) > 0.9).all()
    assert torch.allclose(comb.sum(-1), torch.ones_like(post), atol=1e-4)


@pytest.mark.parametrize("copies", [1, 4])
def test_engram_starts_without_effect(tiny_model, random_ids, copies):
    """Fresh Engram layers change nothing: the same logits, bit for bit, as without them."""
    engram = tiny_model(hc_mult=copies, initializer_range=0.2)
    plain = tiny_model(hc_mult=copies, initializer_range=0.2, engram_layer_ids=[], seed=1)
    missing = plain.load_state_dict(engram.state_dict(), strict=False)
    assert not missing.missing_keys
    assert missing.unexpected_keys and all("engram" in name for name in missing.unexpected_keys)
    ids = random_ids(2, 12)
    with torch.no_grad():
        assert torch.equal(engram(ids).logits, plain(ids).logits)


def test_only_tables_start_at_zero(tiny_model):
    """Keys, values and gate weights start random or at one, so that gradients reach the tables."""
    model = tiny_model(initializer_range=0.1)
    layer = model.model.layers[0].engram
    for half in layer.wkv.weight.split([4 * 32, 32]):
        assert 0.05 < half.std() < 0.2
    assert (layer.q_weight == 1).all() and (layer.k_weight == 1).all()
    for table in model.model.engram_memory.tables:
        assert (table.weight == 0).all()


def test_no_stream_parameters_with_one_copy(tiny_model):
    """`hc_mult=1` has no parameters of the stream at all."""
    model = tiny_model(hc_mult=1)
    assert not any("_hc" in name for name in model.state_dict())


def train(model, optimizer, ids, steps):
    losses = []
    model.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses


def spread_of_copies(model, ids):
    """How far the copies of the last stream are apart, relative to their size."""
    streams = []
    handle = model.model.layers[-1].register_forward_hook(lambda module, args, output: streams.append(output[1]))
    with torch.no_grad():
        model(ids)
    handle.remove()
    (stream,) = streams
    return ((stream - stream.mean(2, keepdim=True)).norm() / stream.norm()).item()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("layer_ids", [[], [0, 2]], ids=["plain", "engram"])
def test_copies_come_apart(tiny_model, random_ids, layer_ids, optimizer):
    """A few steps of training make the copies differ; all parameters of the stream get a gradient."""
    model = tiny_model(engram_layer_ids=layer_ids)
    ids = random_ids(2, 16)
    assert spread_of_copies(model, ids) < 1e-5
    losses = train(model, optimizer(model.parameters(), lr=0.01 if optimizer is torch.optim.AdamW else 0.5), ids, 8)
    assert losses[-1] < losses[0]
    assert spread_of_copies(model, ids) > (1e-3 if optimizer is torch.optim.AdamW else 1e-5)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        if "_hc." in name:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
    # The very last `comb` and `post` mix copies that are then collapsed: everything before has a gradient, too.
    first = model.model.layers[0]
    assert all(getattr(first.mlp_hc, name).grad.abs().max() > 0 for name in ("fn", "base", "scale"))


def test_engram_comes_alive(tiny_model, random_ids):
    """The first step moves the rows of the batch; from the second on `wkv` and the gate weights get gradients."""
    model = tiny_model()
    ids = random_ids(2, 16)
    layer, table = model.model.layers[0].engram, model.model.engram_memory.tables[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(ids, labels=ids).loss.backward()
    assert table.weight.grad.abs().max() > 0
    assert layer.wkv.weight.grad.abs().max() == 0
    used = torch.zeros(table.weight.shape[0], dtype=torch.bool)
    used[model.compute_hash_ids(ids)[:, :, 0].flatten()] = True
    assert (table.weight.grad[~used] == 0).all()
    optimizer.step()
    optimizer.zero_grad()
    model(ids, labels=ids).loss.backward()
    for parameter in (layer.wkv.weight, layer.q_weight, layer.k_weight, table.weight):
        assert parameter.grad.abs().max() > 0


def test_initialisation_is_seeded(tiny_model, random_ids):
    """The same seed gives the same model, another seed another one."""
    ids = random_ids(1, 6)
    with torch.no_grad():
        assert torch.equal(tiny_model(seed=5)(ids).logits, tiny_model(seed=5)(ids).logits)
        assert not torch.equal(tiny_model(seed=5)(ids).logits, tiny_model(seed=6)(ids).logits)


@pytest.mark.parametrize("cls", [EngramModel, EngramForCausalLM])
def test_every_parameter_is_initialised(tiny_config, cls):
    """A model built on the meta device and initialised afterwards has no value left from uninitialised memory."""
    with torch.device("meta"):
        model = cls(tiny_config())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(77)
    model.init_weights()
    for name, tensor in model.state_dict().items():
        assert not (tensor == 77).all(), name
    for module in model.modules():
        if isinstance(module, HyperConnection):
            assert (module.scale == 0).all()
    torch.manual_seed(0)
    built = cls(tiny_config())
    for name in ("multipliers", "primes", "offsets", "token_map"):
        got, want = (getattr(m.base_model.engram_hasher, name) for m in (model, built))
        assert torch.equal(got, want), name
