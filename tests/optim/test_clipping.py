"""Norms of gradients of which some are sparse equal those of dense ones, and so do clipped gradients."""

import copy
import math

import pytest
import torch
from torch import nn

from hf_engram.optim import EngramOptimizer, clip_grad_norm_


def make_parameters(dtype: torch.dtype = torch.float32, coalesced: bool = True) -> tuple[list, list]:
    """Parameters with sparse and dense gradients, and the same with dense ones."""
    generator = torch.Generator().manual_seed(0)
    sparse = [nn.Parameter(torch.zeros(20, 4, dtype=dtype)) for _ in range(2)]
    sparse += [nn.Parameter(torch.zeros(3, 5)), nn.Parameter(torch.zeros(7))]
    for table in sparse[:2]:
        rows = torch.tensor([[3, 5, 3, 19, 0, 5, 5]])
        values = torch.randn(7, 4, generator=generator).to(dtype)
        grad = torch.sparse_coo_tensor(rows, values, table.shape, check_invariants=True)
        table.grad = grad.coalesce() if coalesced else grad
    for parameter in sparse[2:]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    dense = [nn.Parameter(parameter.detach().clone()) for parameter in sparse]
    for ours, theirs in zip(sparse, dense, strict=True):
        theirs.grad = ours.grad.to_dense() if ours.grad.is_sparse else ours.grad.clone()
    return sparse, dense


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.5, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6, math.inf, 0.0])
@pytest.mark.parametrize("whose", ["ours", "torch"])
def test_equals_the_dense_value(coalesced, norm_type, max_norm, whose):
    """Ours, and torch's own once an optimizer has been made (the Trainer's and accelerate's call it)."""
    sparse, dense = make_parameters(coalesced=coalesced)
    EngramOptimizer([{"params": sparse[:2], "table": True}])
    clip = clip_grad_norm_ if whose == "ours" else torch.nn.utils.clip_grad_norm_
    expected = torch.nn.utils.clip_grad_norm_(dense, max_norm, norm_type)
    norm = clip(sparse, max_norm, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(sparse, dense, strict=True):
        assert ours.grad.is_sparse == (ours.shape == (20, 4))
        grad = ours.grad.to_dense() if ours.grad.is_sparse else ours.grad
        # Of rows that are summed before and after they are scaled, elements may cancel.
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-6, atol=1e-6 * theirs.grad.abs().max().item())
        if whose == "ours" and ours.grad.is_sparse:
            assert ours.grad.is_coalesced() == coalesced


@pytest.mark.parametrize("of_others", [torch.float32, torch.bfloat16, torch.float64])
def test_bf16_gradients(of_others):
    sparse, dense = make_parameters(torch.bfloat16)
    for parameter in (*sparse[2:], *dense[2:]):
        grad = parameter.grad.to(of_others)
        parameter.grad, parameter.data = None, parameter.data.to(of_others)
        parameter.grad = grad
    expected = torch.stack([parameter.grad.double().norm() for parameter in dense]).norm()
    # torch rounds the norms of gradients of bf16 to bf16.
    tolerance = 4e-3 if of_others == torch.bfloat16 else 1e-6
    torch.testing.assert_close(clip_grad_norm_(sparse, 0.5).double(), expected, rtol=tolerance, atol=0)
    clipped = torch.stack([parameter.grad.to_dense().double().norm() for parameter in sparse]).norm()
    assert clipped.item() == pytest.approx(0.5, rel=4e-3)


def test_any_parameters():
    sparse, dense = make_parameters()
    module = nn.ParameterList(copy.deepcopy(sparse))
    for ours, theirs in zip(module.parameters(), sparse, strict=True):
        ours.grad = theirs.grad.clone()
    expected = torch.nn.utils.clip_grad_norm_(dense, 1.0)
    assert clip_grad_norm_(module, 1.0) == pytest.approx(expected.item())
    assert clip_grad_norm_(iter(sparse), 1.0) == pytest.approx(expected.item())
    assert clip_grad_norm_(sparse[0], math.inf) == pytest.approx(sparse[0].grad.to_dense().norm().item())
    assert clip_grad_norm_([nn.Parameter(torch.ones(3))], 1.0).item() == 0
    assert clip_grad_norm_([], 1.0).item() == 0


def test_a_gradient_without_rows():
    table = nn.Parameter(torch.zeros(20, 4))
    rows, values = torch.zeros(1, 0, dtype=torch.long), torch.zeros(0, 4)
    table.grad = torch.sparse_coo_tensor(rows, values, table.shape, check_invariants=True)
    assert clip_grad_norm_([table], 1.0).item() == 0
    optimizer = EngramOptimizer([{"params": [table], "table": True}])
    optimizer.step()
    assert optimizer.state[table]["step"] == 1


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("which", [0, 2])
def test_gradients_that_are_not_finite(wrong, which):
    sparse, _ = make_parameters()
    grad = sparse[which].grad
    (grad._values() if grad.is_sparse else grad)[0, 0] = wrong
    before = sparse[1].grad.to_dense()
    with pytest.raises(RuntimeError, match="nothing was clipped"):
        clip_grad_norm_(sparse, 1.0, error_if_nonfinite=True)
    assert torch.equal(sparse[1].grad.to_dense(), before)
    assert not math.isfinite(clip_grad_norm_(sparse, 1.0))


def test_arguments_that_are_wrong():
    sparse, _ = make_parameters()
    for options, message in [
        ({"max_norm": -1.0}, "`max_norm` must be at least zero, got -1.0"),
        ({"max_norm": math.nan}, "`max_norm`"),
        ({"max_norm": None}, "`max_norm`"),
        ({"max_norm": 1.0, "norm_type": 0}, "`norm_type` must be above zero, got 0"),
        ({"max_norm": 1.0, "norm_type": -math.inf}, "`norm_type`"),
    ]:
        with pytest.raises(ValueError, match=message):
            clip_grad_norm_(sparse, **options)


def test_norms_of_sparse_tensors_over_some_dimensions_are_refused():
    sparse, _ = make_parameters()
    EngramOptimizer([{"params": sparse[:2], "table": True}])
    with pytest.raises(NotImplementedError, match="norms over all elements"):
        torch.linalg.vector_norm(sparse[0].grad, dim=1)
