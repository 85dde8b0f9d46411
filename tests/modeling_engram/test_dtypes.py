"""Dtypes: what follows the model's, and what does not."""

import pytest
import torch

from hf_engram import EngramForCausalLM, EngramModel
from hf_engram.modeling_engram.hyper_connection import HyperConnection


def check_dtypes(model, dtype: torch.dtype) -> None:
    """Stream parameters are fp32 at least, integer buffers what they were, all else is `dtype`."""
    stream = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, HyperConnection)
        for part, _ in module.named_parameters()
    }
    assert len(stream) == 18
    for name, parameter in model.named_parameters():
        expected = torch.promote_types(dtype, torch.float32) if name in stream else dtype
        assert parameter.dtype == expected, name
    hasher = model.base_model.engram_hasher
    assert hasher.token_map.dtype == torch.int32
    assert {hasher.multipliers.dtype, hasher.primes.dtype, hasher.offsets.dtype} == {torch.int64}


# The cast, the dtype that it leads to, and how far logits may move, relative to the largest.
CASTS = {
    "half": (lambda model: model.half(), torch.float16, 0.02),
    "to_half": (lambda model: model.to(torch.float16), torch.float16, 0.02),
    "bfloat16": (lambda model: model.bfloat16(), torch.bfloat16, 0.15),
    "to_bf16": (lambda model: model.to(torch.bfloat16), torch.bfloat16, 0.15),
    "to_device_bf16": (lambda model: model.to("cpu", torch.bfloat16), torch.bfloat16, 0.15),
    "to_like": (lambda model: model.to(torch.zeros(1, dtype=torch.bfloat16)), torch.bfloat16, 0.15),
    "double": (lambda model: model.double(), torch.float64, 1e-4),
    "bf16_float": (lambda model: model.bfloat16().float(), torch.float32, 0.15),
    "bf16_double": (lambda model: model.bfloat16().double(), torch.float64, 0.15),
}


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("cls", [EngramModel, EngramForCausalLM])
def test_casts(lively_model, random_ids, cls, cast):
    """Every way of casting leaves stream parameters fp32, bit for bit, and hashes right; forward works."""
    model = lively_model(cls)
    ids = random_ids(2, 6)
    hash_ids = model.compute_hash_ids(ids)
    scale = model.base_model.layers[1].mlp_hc.fn.detach().clone()
    with torch.no_grad():
        expected = model(ids)[0]
    cast, dtype, tolerance = CASTS[cast]
    model = cast(model)
    check_dtypes(model, dtype)
    assert torch.equal(model.base_model.layers[1].mlp_hc.fn.to(scale.dtype), scale)
    assert torch.equal(model.compute_hash_ids(ids), hash_ids)
    with torch.no_grad():
        actual = model(ids)[0]
    assert actual.dtype == dtype
    assert (actual.double() - expected.double()).abs().max() / expected.abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, "bfloat16", "auto", None], ids=str)
def test_dtype_on_load(lively_model, random_ids, tmp_path, dtype):
    """`dtype=` on load casts the model, not the stream's parameters, which keep their fp32 bits."""
    model = lively_model()
    model.save_pretrained(tmp_path)
    loaded = EngramForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    expected = {"bfloat16": torch.bfloat16, "auto": torch.float32, None: torch.float32}.get(dtype, dtype)
    check_dtypes(loaded, expected)
    assert torch.equal(loaded.model.layers[0].attn_hc.fn, model.model.layers[0].attn_hc.fn)
    assert torch.equal(loaded.compute_hash_ids(random_ids(2, 5)), model.compute_hash_ids(random_ids(2, 5)))
    assert torch.isfinite(loaded(random_ids(2, 5)).logits).all()


def test_bf16_model_round_trip(lively_model, random_ids, tmp_path):
    """A bf16 model is saved and loaded as it is: the same logits, bit for bit."""
    lively_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "first")
    # `.to(bfloat16)` rounds the rotary frequencies, too (as any Llama's), and they are not saved.
    model = EngramForCausalLM.from_pretrained(tmp_path / "first", dtype="auto").eval()
    check_dtypes(model, torch.bfloat16)
    model.save_pretrained(tmp_path / "second")
    again = EngramForCausalLM.from_pretrained(tmp_path / "second", dtype="auto").eval()
    check_dtypes(again, torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(again(random_ids(2, 6)).logits, model(random_ids(2, 6)).logits)


def test_default_dtype(tiny_config, random_ids):
    """Built under `torch.set_default_dtype(bfloat16)`: bf16 weights, fp32 stream, and the same hashes."""
    torch.manual_seed(0)
    expected = EngramForCausalLM(tiny_config()).compute_hash_ids(random_ids(2, 5))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        model = EngramForCausalLM(tiny_config())
        check_dtypes(model, torch.bfloat16)
        assert model(random_ids(2, 5)).logits.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(model.compute_hash_ids(random_ids(2, 5)), expected)
    assert torch.isfinite(model(random_ids(2, 5)).logits).all()


@pytest.mark.parametrize("argument", ["dtype", "torch_dtype"])
def test_from_config_in_bf16(tiny_config, argument):
    """`AutoModelForCausalLM.from_config(config, dtype=bf16)` keeps the stream fp32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config(), **{argument: torch.bfloat16})
    assert isinstance(model, EngramForCausalLM)
    check_dtypes(model, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(lively_model, random_ids, dtype):
    """Under autocast logits are close to fp32's, and the stream's mixing weights are computed in fp32."""
    model = lively_model()
    ids = random_ids(2, 8)
    mixes = []
    handle = model.model.layers[1].attn_hc.register_forward_hook(lambda m, args, out: mixes.append((args[0], out)))
    with torch.no_grad():
        expected = model(ids).logits
        with torch.autocast("cpu", dtype=dtype):
            actual = model(ids).logits
    handle.remove()
    assert (actual.float() - expected).abs().max() / expected.abs().max() < (0.15 if dtype == torch.bfloat16 else 0.03)
    stream, under_autocast = mixes[1]
    with torch.no_grad():
        outside = model.model.layers[1].attn_hc(stream)
    for inside, exact in zip(under_autocast, outside, strict=True):
        assert inside.dtype == torch.float32
        assert torch.equal(inside, exact)


def test_autocast_training(lively_model, random_ids):
    """Gradients under autocast are finite, and land in the parameters' dtypes."""
    model = lively_model().train()
    ids = random_ids(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, labels=ids).loss
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == parameter.dtype == torch.float32
        assert torch.isfinite(parameter.grad).all(), name


def test_fp32_stream_in_bf16_training(lively_model, random_ids):
    """A bf16 model's stream parameters get fp32 gradients."""
    model = lively_model(dtype=torch.bfloat16).train()
    ids = random_ids(2, 8)
    model(ids, labels=ids).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.dtype == parameter.dtype, name
        assert torch.isfinite(parameter.grad).all(), name
