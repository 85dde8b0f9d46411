"""The golden numbers: the reference's own Engram layer, and a float64 residual stream, outputs and gradients."""

from types import SimpleNamespace

import pytest
import torch

from hf_engram.modeling_engram.engram_layer import EngramLayer
from hf_engram.modeling_engram.engram_memory import EngramMemory
from hf_engram.modeling_engram.hyper_connection import HyperConnection, collapse
from hf_engram.modeling_engram.ops.residual_stream import stream_collapse, stream_expand, stream_mixes


LAYERS = ["engram_layer_hc1_fp32", "engram_layer_hc2_bf16", "engram_layer_hc4_fp32", "engram_layer_hc4_masked_fp32"]
STREAMS = ["residual_stream_hc2", "residual_stream_hc4"]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((actual.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def bf16_steps(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference in units of the spacing of bf16 at the expected value."""
    expected, actual = expected.double(), actual.double()
    spacing = torch.exp2(torch.floor(torch.log2(expected.abs().clamp_min(2.0**-126))) - 7)
    return ((actual - expected).abs() / spacing).max().item()


@torch.no_grad()
def fp32_error(layer: EngramLayer, x: torch.Tensor, rows: torch.Tensor, token_mask: torch.Tensor | None) -> float:
    """What rounding to fp32 may do to the gradients of an fp64 layer, relative to their largest value.

    A sum of n terms is off by at most n * 2^-24 of the sum of their absolute values, in whichever order they are
    added; so is the gate's dot, by what its keys are off by and by its own sum. Where the dot is near zero, the
    derivative of its root, 1 / (2 sqrt(|dot|)), makes that `error / (2 |dot|)` of the token's gradient.
    """
    unit, dim = 2.0**-24, x.shape[-1]
    keys, _, gates = layer.read(x, rows, token_mask)
    keys_error = rows.shape[-1] * (rows.abs() @ layer.wkv.weight.abs().T)[..., : -layer.hidden_size].view_as(keys)
    scale = ((x.square().mean(-1) + layer.eps) * (keys.square().mean(-1) + layer.eps)).rsqrt() * dim**-0.5
    weight = (layer.q_weight * layer.k_weight).abs()
    error = unit * scale * ((x.abs() * weight) * (keys_error + dim * keys.abs())).sum(-1)
    dot = gates.logit().square()  # infinite where the mask is False: no gradient
    return (error / (2 * dot)).max().item() + unit * (rows.shape[-1] + x.shape[:2].numel() + 2 * dim)


def build_layer(tensors, numbers, dtype: torch.dtype | None = None) -> tuple[EngramLayer, EngramMemory]:
    """The layer and the memory with the golden weights, in their dtype or another."""
    dtype = tensors["x"].dtype if dtype is None else dtype
    config = SimpleNamespace(
        hidden_size=numbers["dim"],
        hc_mult=numbers["hc_mult"],
        rms_norm_eps=numbers["eps"],
        engram_max_ngram_size=numbers["max_ngram_size"],
        engram_n_heads=numbers["n_heads"],
        engram_head_dim=numbers["head_dim"],
        engram_num_embeddings=[tensors["table"].shape[0]],
    )
    layer, memory = EngramLayer(config).to(dtype), EngramMemory(config).to(dtype)
    with torch.no_grad():
        layer.wkv.weight.copy_(tensors["wkv"])
        layer.q_weight.copy_(tensors["q_weight"])
        layer.k_weight.copy_(tensors["k_weight"])
        memory.tables[0].weight.copy_(tensors["table"])
    return layer, memory


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_engram_layer(golden, name, sparse_grad):
    """The layer's output and all gradients (stream, projection, both weights, table) are the reference's."""
    tensors, numbers = golden(name)

    def run(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        layer, memory = build_layer(tensors, numbers, dtype)
        memory.sparse_grad = sparse_grad
        x = tensors["x"].to(dtype, copy=True).requires_grad_()
        (rows,) = memory(tensors["hash_ids"].unsqueeze(2))
        out = layer(x, rows, tensors.get("token_mask"))
        out.backward(tensors["grad_out"].to(dtype))
        table_grad = memory.tables[0].weight.grad
        assert table_grad.is_sparse == sparse_grad
        values = {
            "out": out,
            "grad_x": x.grad,
            "grad_wkv": layer.wkv.weight.grad,
            "grad_q_weight": layer.q_weight.grad,
            "grad_k_weight": layer.k_weight.grad,
            "grad_table": table_grad.to_dense() if sparse_grad else table_grad,
        }
        assert all(value.dtype == dtype for value in values.values())
        if dtype == torch.float64:
            values["fp32_error"] = fp32_error(layer, x.detach(), rows, tensors.get("token_mask"))
        return values

    mine = run(tensors["x"].dtype)
    if tensors["x"].dtype == torch.bfloat16:
        # One rounding: products of two bf16 numbers are exact in fp32, and so few of them that their sums are, nearly.
        assert all(bf16_steps(value, tensors[name]) <= 1.0 for name, value in mine.items())
        return
    exact = run(torch.float64)
    bound = exact.pop("fp32_error")
    assert bound < 1e-2  # it says something
    for name, value in exact.items():
        # The same on every processor: how far the reference's own fp32 is from exact numbers.
        assert relative_error(value, tensors[name]) <= 1e-5, name
        assert relative_error(mine[name], value) <= bound, name


@pytest.mark.parametrize("name", [name for name in LAYERS if name != "engram_layer_hc4_fp32"])
def test_masked_tokens_pass_bit_for_bit(golden, name):
    """Where the mask is False the stream comes out with the very same bits, negative zeros included."""
    tensors, numbers = golden(name)
    layer, memory = build_layer(tensors, numbers)
    mask = tensors["token_mask"]
    assert not mask.all()
    x = tensors["x"].clone()
    x[~mask] = torch.where(x[~mask].abs() < 0.3, torch.full_like(x[~mask], -0.0), x[~mask])
    out = layer(x, memory(tensors["hash_ids"].unsqueeze(2))[0], mask)
    as_bits = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    assert torch.equal(out[~mask].view(as_bits), x[~mask].view(as_bits))
    assert torch.equal(tensors["out"][~mask], tensors["x"][~mask])
    assert not torch.equal(out[mask], x[mask])


def run_stream(tensors, numbers, dtype, sublayers) -> dict[str, torch.Tensor]:
    """The chain of sublayers `y = sub @ h`, as the model passes the stream on; every intermediate, and gradients."""
    leaves = {name: tensors[name].to(dtype).requires_grad_() for name in ("h0", "fn", "base", "scale", "sub")}
    values = {}
    stream = leaves["h0"].unsqueeze(2).expand(-1, -1, numbers["hc_mult"], -1)
    hidden_states, pre = sublayers(leaves, stream, values)
    values["out"] = hidden_states
    assert pre is not None
    hidden_states.backward(tensors["grad_out"].to(dtype))
    values.update({f"grad_{name}": leaf.grad for name, leaf in leaves.items()})
    return values


def by_ops(numbers):
    """The ops themselves."""

    def run(leaves, stream, values):
        constants = numbers["norm_eps"], numbers["hc_eps"], numbers["sinkhorn_iters"]
        hidden_states, pre = stream[:, :, 0], None
        for i in range(numbers["n_sublayers"]):
            pre, post, comb = stream_mixes(stream, leaves["fn"][i], leaves["scale"][i], leaves["base"][i], *constants)
            stream = stream_expand(hidden_states @ leaves["sub"][i].T, stream, post, comb)
            hidden_states = stream_collapse(stream, pre)
            values.update({f"pre_{i}": pre, f"post_{i}": post, f"comb_{i}": comb, f"stream_{i}": stream})
        return hidden_states, pre

    return run


def by_modules(numbers):
    """HyperConnection and `collapse`, as the decoder layer calls them."""

    def run(leaves, stream, values):
        config = SimpleNamespace(
            hc_mult=numbers["hc_mult"],
            hidden_size=leaves["h0"].shape[-1],
            rms_norm_eps=numbers["norm_eps"],
            hc_eps=numbers["hc_eps"],
            hc_sinkhorn_iters=numbers["sinkhorn_iters"],
        )
        pre = None
        for i in range(numbers["n_sublayers"]):
            connection = HyperConnection(config)
            for name in ("fn", "scale", "base"):
                delattr(connection, name)
                setattr(connection, name, leaves[name][i])
            mixes = connection(stream)
            hidden_states = collapse(stream, pre) @ leaves["sub"][i].T
            stream, pre = connection.expand(hidden_states, stream, mixes)
            values.update({f"pre_{i}": pre, f"post_{i}": mixes[1], f"comb_{i}": mixes[2], f"stream_{i}": stream})
        return collapse(stream, pre), pre

    return run


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["fp64", "fp32"])
@pytest.mark.parametrize("sublayers", [by_ops, by_modules])
@pytest.mark.parametrize("name", STREAMS)
def test_residual_stream(golden, name, sublayers, dtype, tolerance):
    """Mixing weights, the stream after every sublayer, the final output and all gradients."""
    tensors, numbers = golden(name)
    values = run_stream(tensors, numbers, dtype, sublayers(numbers))
    for key in ("pre", "post", "comb", "stream"):
        for i in range(numbers["n_sublayers"]):
            assert relative_error(values[f"{key}_{i}"], tensors[f"{key}_{i}"]) <= tolerance, f"{key}_{i}"
    for key in ("out", "grad_h0", "grad_fn", "grad_base", "grad_scale", "grad_sub"):
        assert values[key].dtype == dtype
        assert relative_error(values[key], tensors[key]) <= tolerance, key


def test_mixes_of_a_bf16_stream_are_fp32(golden):
    """A bf16 stream is mixed in fp32, and rounded once."""
    tensors, numbers = golden("residual_stream_hc4")
    stream = tensors["stream_0"].bfloat16()
    parameters = [tensors[name][0].float() for name in ("fn", "scale", "base")]
    constants = numbers["norm_eps"], numbers["hc_eps"], numbers["sinkhorn_iters"]
    exact = stream_mixes(stream.double(), *(parameter.double() for parameter in parameters), *constants)
    for actual, expected in zip(stream_mixes(stream, *parameters, *constants), exact, strict=True):
        assert actual.dtype == torch.float32
        assert relative_error(actual, expected) <= 1e-5
    pre, post, comb = exact
    collapsed = stream_collapse(stream, pre.float())
    assert collapsed.dtype == torch.bfloat16
    assert relative_error(collapsed, stream_collapse(stream.double(), pre)) <= 2**-8
    hidden_states = tensors["h0"].bfloat16()
    expanded = stream_expand(hidden_states, stream, post.float(), comb.float())
    assert expanded.dtype == torch.bfloat16
    assert relative_error(expanded, stream_expand(hidden_states.double(), stream.double(), post, comb)) <= 2**-8


@pytest.mark.parametrize("name", STREAMS)
def test_comb_is_nearly_doubly_stochastic(golden, name):
    """Columns of `comb` add up to one exactly, rows nearly: mixing neither grows nor shrinks the stream."""
    tensors, numbers = golden(name)
    parameters = [tensors[key][-1] for key in ("fn", "scale", "base")]
    constants = numbers["norm_eps"], numbers["hc_eps"], numbers["sinkhorn_iters"]
    _, _, comb = stream_mixes(tensors["stream_0"], *parameters, *constants)
    assert (comb > 0).all()
    assert (comb.sum(-2) - 1).abs().max() < 1e-5
    assert (comb.sum(-1) - 1).abs().max() < 0.05
