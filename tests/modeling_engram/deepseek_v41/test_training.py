"""Gradients and dtypes."""

import pytest
import torch
from torch.nn import functional as F
from v41_helpers import load_model

from hf_engram.modeling_engram.deepseek_v41.sparse_attention import sparse_attention


def gradients(model, input_ids) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids, labels=input_ids).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("rounding", [False, True])
def test_what_gets_gradients(input_ids, rounding):
    """Everything but indexers, whose choices pass none, and tables in fp8, which are frozen."""
    model = load_model(cache_rounding=rounding).train()
    found = gradients(model, input_ids)
    without = {name for name, _ in model.named_parameters()} - set(found)
    expected = {name for name, _ in model.named_parameters() if ".indexer." in name or "engram_memory" in name}
    assert without == expected
    assert all(grad.isfinite().all() and grad.any() for grad in found.values())


def test_gradient_checkpointing(input_ids):
    model = load_model(cache_rounding=False).train()
    plain = gradients(model, input_ids)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = gradients(model, input_ids)
    assert plain.keys() == again.keys()
    for name, grad in plain.items():
        torch.testing.assert_close(again[name], grad, rtol=1e-5, atol=1e-6 * grad.abs().max().item())


def test_attention_against_float64():
    """Output and gradients of the attention, in chunks, against its formula over all keys."""
    generator = torch.Generator().manual_seed(0)
    length, heads, size, window, groups, k = 300, 3, 16, 20, 40, 5

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    inputs = [
        normal(1, length, heads, size),
        normal(1, window - 1 + length, size),
        normal(heads),
        normal(1, groups, size),
    ]
    choice = torch.stack([torch.randperm(groups, generator=generator)[:k] for _ in range(length)]).unsqueeze(0)
    choice[:, :7, 2:] = -1
    index = torch.arange(length).unsqueeze(0)
    weight = torch.randn(1, length, heads, size, generator=generator)
    queries, keys, sinks, entries = inputs
    own = sparse_attention(queries, keys, index, window, sinks, entries, choice)
    own_grads = torch.autograd.grad((own * weight).sum(), inputs)

    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    queries, keys, sinks, entries = doubles
    tokens, at = keys[:, window - 1 :], torch.arange(length)
    near = (at[:, None] >= at) & (at[:, None] - at < window)
    far = F.one_hot(choice + 1, groups + 1).sum(2)[..., 1:].bool()
    logits = torch.einsum("blhd,bsd->blhs", queries, torch.cat([tokens, entries], 1)) * size**-0.5
    seen = torch.cat([near.unsqueeze(0), far], -1).unsqueeze(2)
    logits = torch.cat([logits.masked_fill(~seen, -torch.inf), sinks.view(1, 1, -1, 1).expand(1, length, -1, 1)], -1)
    exact = torch.einsum("blhs,bsd->blhd", logits.softmax(-1)[..., :-1], torch.cat([tokens, entries], 1))
    exact_grads = torch.autograd.grad((exact * weight.double()).sum(), doubles)
    for mine, formula in zip([own, *own_grads], [exact, *exact_grads], strict=True):
        torch.testing.assert_close(mine.double(), formula, rtol=1e-4, atol=1e-5 * formula.abs().max().item())


def test_what_stays_in_fp32(input_ids):
    model = load_model(torch.bfloat16)
    kept = ("attn_hc", "mlp_hc", "sinks", "e_score_correction_bias", "inv_freq")
    for cast in (model, model.to(torch.bfloat16), model.half()):
        tensors = {**dict(cast.named_parameters()), **dict(cast.named_buffers())}
        own = {name: tensor.dtype for name, tensor in tensors.items() if any(part in name for part in kept)}
        assert len(own) > 50 and set(own.values()) == {torch.float32}
    assert model.to(torch.bfloat16)(input_ids).logits.dtype == torch.float32
    model.resize_token_embeddings(191)
    assert model(input_ids.clamp_max(190)).logits.dtype == torch.float32
