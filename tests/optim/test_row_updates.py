"""The rule for rows, by plain PyTorch and by the Triton kernel."""

import math
import os
import subprocess
import sys

import pytest
import torch
from dense_rule import DenseRule
from hypothesis import given, settings
from hypothesis import strategies as st

import hf_engram.optim_kernels as kernels_module
from hf_engram.optim_kernels import random_bits, random_key, stochastic_round, update_rows


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def make_state(table: torch.Tensor, momentum: bool = False) -> dict[str, torch.Tensor]:
    rows, device = table.shape[:1], table.device
    state = {
        "second_moment": torch.zeros(rows, device=device),
        "last_step": torch.zeros(rows, dtype=torch.int32, device=device),
    }
    if momentum:
        state["momentum"] = torch.zeros(table.shape, dtype=torch.bfloat16, device=device)
        state["momentum_weight"] = torch.zeros(rows, device=device)
    return state


def update(
    table, rows, grads, state, step=1, rate=0.1, beta=0.99, momentum=0.0, eps=1e-15, decay=1.0, key=0, **kwargs
):
    options = {"beta": beta, "momentum": momentum, "eps": eps, "decay": decay, "key": key, **kwargs}
    update_rows(table, rows, grads, state, step=step, rate=rate, **options)


@pytest.mark.parametrize("dim", [1, 24, 1500])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 1.0), (0.0, 0.99), (0.9, 0.99)])
def test_steps_equal_the_dense_rule(backend, device, dim, momentum, decay):
    """Rows in any order, some never used, gaps of any length, gradients of any size."""
    generator = torch.Generator().manual_seed(dim)
    table = torch.randn(20, dim, generator=generator)
    beta, lr = 0.9, 0.01
    dense = DenseRule(table, beta, momentum, weight_decay=(1 - decay) / lr)
    table, state = table.to(device), make_state(table.to(device), momentum > 0)
    for step in range(1, 13):
        rows = torch.randperm(18, generator=generator)[: step % 5]
        scale = 10.0 ** torch.randint(-6, 3, (len(rows), 1), generator=generator)
        grads = torch.randn(len(rows), dim, generator=generator) * scale
        if momentum:
            grads = grads.bfloat16().float()
        update(
            table,
            rows.to(device),
            grads.to(device),
            state,
            step,
            lr / math.sqrt(1 - beta),
            beta,
            momentum,
            decay=decay,
            backend=backend,
        )
        dense.step(torch.zeros(20, dim).index_copy(0, rows, grads), lr)
    # Momentum is kept in bf16.
    tolerance = {"rtol": 0, "atol": 2e-3} if momentum else {"rtol": 2e-6, "atol": 2e-6}
    torch.testing.assert_close(table.cpu().double(), dense.table, **tolerance)
    last = state["last_step"].cpu()
    assert (last[18:] == 0).all()
    second = state["second_moment"].cpu().double() * beta ** (12 - last).double() * (1 - beta)
    torch.testing.assert_close(second, dense.second, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("grad_dtype", FLOATS)
def test_dtypes(backend, device, dtype, grad_dtype):
    """As in fp32 up to the rounding of the result."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(9, 24, generator=generator).to(dtype).to(device)
    grads = torch.randn(4, 24, generator=generator).to(grad_dtype).to(device)
    rows = torch.tensor([7, 0, 3, 8], device=device)
    exact = table.float()
    update(exact, rows, grads.float(), make_state(table), backend="eager")
    update(table, rows, grads, make_state(table), backend=backend)
    unit = torch.finfo(dtype).eps
    assert ((table.float() - exact).abs() <= unit * exact.abs() + 1e-6).all()
    assert table.dtype == dtype


def test_fp64_is_not_cut_short():
    table = torch.randn(9, 24, dtype=torch.float64)
    dense = DenseRule(table)
    rows, grads = torch.tensor([7, 0, 3]), torch.randn(3, 24, dtype=torch.float64)
    state = make_state(table)
    state["second_moment"] = state["second_moment"].double()
    update(table, rows, grads, state, rate=0.01 / math.sqrt(1 - 0.99))
    dense.step(torch.zeros(9, 24, dtype=torch.float64).index_copy(0, rows, grads), 0.01)
    torch.testing.assert_close(table, dense.table, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [1e-12, 2e-5, 1.0, 1e12])
@pytest.mark.parametrize("step", [1, 1000, 2**31 - 1])
def test_first_step_of_a_row(backend, device, size, step):
    """Its rms is the rate, whenever it comes and whatever the size of the gradient."""
    table = torch.zeros(3, 16, device=device)
    grads = size * torch.randn(1, 16, generator=torch.Generator().manual_seed(0)).to(device)
    update(table, torch.tensor([1], device=device), grads, make_state(table), step, rate=0.1, backend=backend)
    assert table[1].square().mean().sqrt().item() == pytest.approx(0.1, rel=2e-3 if size < 1e-11 else 1e-5)
    assert not table[[0, 2]].any()


@given(sizes=st.lists(st.floats(-8, 8), min_size=2, max_size=20), gaps=st.integers(1, 10**6))
@settings(max_examples=50, deadline=None)
def test_no_step_is_longer_than_the_first(sizes, gaps):
    """Whatever the gradients before."""
    table, step = torch.zeros(1, 4, dtype=torch.float64), 0
    state = make_state(table)
    for size in sizes:
        before, step = table.clone(), step + gaps
        update(table, torch.tensor([0]), 10.0**size * torch.ones(1, 4, dtype=torch.float64), state, step, rate=0.1)
        assert 0 < (table - before).abs().max() <= 0.1 * (1 + 1e-6)


def test_rows_in_use_come_down_to_adams_rate(backend, device):
    """Of gradients alike in size at each step, the mean is known, and the step is lr."""
    table, beta, lr = torch.zeros(1, 8, device=device), 0.5, 0.01
    state = make_state(table)
    for step in range(1, 26):
        before = table.clone()
        grads = 3e-5 * torch.ones(1, 8, device=device)
        update(
            table,
            torch.tensor([0], device=device),
            grads,
            state,
            step,
            lr / math.sqrt(1 - beta),
            beta,
            backend=backend,
        )
    assert (before - table).mean().item() == pytest.approx(lr, rel=1e-4)


def test_rows_without_a_gradient_are_not_of_the_step(backend, device):
    table = torch.ones(5, 16, device=device)
    state = make_state(table, momentum=True)
    rows = torch.tensor([3, 1], device=device)
    grads = torch.ones(2, 16, device=device)
    update(table, rows, grads, state, 1, momentum=0.9, decay=0.9, backend=backend)
    before = [tensor.clone() for tensor in (table, *state.values())]
    update(table, rows, 0 * grads, state, 2, momentum=0.9, decay=0.9, backend=backend)
    for old, new in zip(before, (table, *state.values()), strict=True):
        assert torch.equal(old, new)
    update(table, rows[:0], grads[:0], state, 3, backend=backend)


def test_blocks_of_rows_give_the_same_bits(monkeypatch):
    grads, rows = torch.randn(23, 8), torch.randperm(40)[:23]
    tables = []
    for block in (8 * 5, 2**18):
        monkeypatch.setattr(kernels_module, "CPU_BLOCK", block)
        tables.append(torch.ones(40, 8, dtype=torch.bfloat16))
        update(tables[-1], rows, grads, make_state(tables[-1]), key=7)
    assert torch.equal(*tables)


def test_a_table_that_is_a_part_of_wider_rows(backend, device):
    wide = torch.randn(9, 40, device=device)
    table, expected = wide[:, 8:24], wide[:, 8:24].clone()
    before = wide.clone()
    rows, grads = torch.tensor([4, 2], device=device), torch.randn(2, 16, device=device)
    update(table, rows, grads, make_state(table), backend=backend)
    update(expected, rows, grads, make_state(table), backend="eager")
    torch.testing.assert_close(table, expected)
    assert torch.equal(wide[:, :8], before[:, :8])
    assert torch.equal(wide[:, 24:], before[:, 24:])


# Stochastic rounding.


def test_kernels_round_as_plain_pytorch_does(backend, device):
    """To the bit, given values that both compute exactly; rows beyond 2^32 count too."""
    key = random_key(5, 1, 77)
    for base in (0, 2**33 + 2**31):
        rows = base + torch.tensor([0, 5, 1, 1000])
        bits = random_bits(rows, 64, key)
        assert len(bits.unique()) == bits.numel()
    table = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows, grads = torch.tensor([49, 5, 1, 30]), torch.full((4, 64), 2.0**-12)
    expected = table.clone()
    # mean(g^2) = g^2 and its root are exact, so the step is 2^-9 for all.
    values = expected[rows].float() - 2.0**-9
    expected[rows] = stochastic_round(values, random_bits(rows, 64, key))
    actual = table.to(device)
    update(
        actual, rows.to(device), grads.to(device), make_state(actual), rate=2.0**-9, eps=0.0, key=key, backend=backend
    )
    assert torch.equal(actual.cpu(), expected)
    assert not torch.equal(expected[rows], values.bfloat16())


@pytest.mark.parametrize("value", [1.0 + 2.0**-10, -1.0 - 2.0**-9 - 2.0**-12, 3.3e-5, 0.0, 2.0**-130])
def test_stochastic_rounding_has_no_bias(value):
    """The mean of n roundings lies within five of its standard deviations; each is one of the two neighbours."""
    n_rows, dim = 1000, 64
    values = torch.full((n_rows, dim), value)
    rounded = stochastic_round(values, random_bits(torch.arange(n_rows), dim, random_key(0, 0, 1))).double()
    value = values[0, 0].double()
    spacing = rounded.max() - rounded.min()
    assert len(rounded.unique()) <= 2
    deviation = spacing / 2 / math.sqrt(n_rows * dim)
    assert (rounded.mean() - value).abs() <= 5 * deviation
    # Neither do rows, columns or steps share bits.
    if spacing:
        up = (rounded == rounded.max()).double()
        share = up.mean()
        for means in (up.mean(0), up.mean(1)):
            assert (means - share).abs().max() <= 6 * math.sqrt(0.25 / (n_rows * dim / len(means)))


def test_random_bits_are_fair_and_apart():
    """Each of the 32 bits is set half the time, also as one after another of rows, columns, steps and tables."""
    keys = [random_key(0, 0, 1), random_key(0, 0, 2), random_key(0, 1, 1), random_key(1, 0, 1)]
    bits = torch.stack([random_bits(torch.arange(500), 64, key) for key in keys])
    masks = 1 << torch.arange(32)
    bound = 5 * math.sqrt(0.25 / bits[0].numel())
    for numbers in (*bits, bits[0] ^ bits[1], bits[0] ^ bits[2], bits[0] ^ bits[3]):
        share = ((numbers.long().unsqueeze(-1) & masks) != 0).double().mean((0, 1))
        assert (share - 0.5).abs().max() < bound
    for numbers in (bits[0][1:] ^ bits[0][:-1], bits[0][:, 1:] ^ bits[0][:, :-1]):
        share = ((numbers.long().unsqueeze(-1) & masks) != 0).double().mean((0, 1))
        assert (share - 0.5).abs().max() < 1.05 * bound


def test_rounding_of_what_is_not_finite():
    values = torch.tensor([[math.inf, -math.inf, math.nan, -math.nan, 3.3e38]])
    values[0, 3] = torch.tensor(2**31 - 1, dtype=torch.int32).view(torch.float32)
    rounded = stochastic_round(values, torch.full((1, 5), -1, dtype=torch.int32))
    assert torch.equal(rounded[0, :2], values[0, :2].bfloat16())
    assert rounded[0, 2:4].isnan().all()


def test_small_steps_are_not_lost():
    """A thousand steps of a hundredth of what bf16 can tell apart move a row by ten of them."""
    table = torch.ones(1, 256, dtype=torch.bfloat16)
    state = make_state(table)
    for step in range(1, 1001):
        update(
            table, torch.tensor([0]), torch.ones(1, 256), state, step, 2.0**-8 / 100, 1e-30, key=random_key(0, 0, step)
        )
    # Below 1, bf16's spacing is 2^-8.
    assert (1 - table.float().mean()).item() == pytest.approx(10 * 2.0**-8, rel=0.05)


def test_what_the_kernel_cannot_take(monkeypatch):
    monkeypatch.setattr(kernels_module, "resolve_backend", lambda op, backend, tensor, why: pytest.fail(str(why)))
    for table, words in ((torch.ones(3, 4, dtype=torch.float64), "fp32, bf16"), (torch.ones(4, 3).T, "side by side")):
        with pytest.raises(pytest.fail.Exception, match=words):
            update(table, torch.tensor([0]), torch.ones(1, table.shape[1]), make_state(table))


# The kernel without a GPU.


def test_kernel_in_the_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-P", "-m", "pytest", __file__, "-q", "-k", "triton", "-p", "no:cacheprovider"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize(("dim", "dtype"), [(16, torch.float32), (1500, torch.bfloat16)])
def test_kernel_compiles_without_spills(target, dim, dtype, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from ahead_of_time import compile_only, resources

    table = torch.ones(40, dim, dtype=dtype)
    with compile_only(target) as compiled:
        for momentum in (0.0, 0.9):
            arguments = (table, torch.arange(9), table[:9], make_state(table, momentum > 0))
            for step in (1, 16, 17):
                kernels_module._launch_update(*arguments, step, 0.1, 0.99, momentum, 1e-15, 0.99, step)
    assert len({kernel.hash for kernel in compiled}) == 2, "a number that changes each step makes another kernel"
    assert max(resources(kernel, tmp_path)[1] for kernel in compiled) == 0
