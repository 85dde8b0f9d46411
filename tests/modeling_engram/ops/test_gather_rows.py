"""Rows by their ids: fetched, dequantised and given gradients, without kernels and with them."""

import subprocess
import sys

import pytest
import torch
from gather_inputs import assert_same, make_ids, make_quantised, make_table
from torch.nn import functional as F

import hf_engram.modeling_engram.ops.gather_rows as gather_module
from hf_engram.modeling_engram.engram_memory import EngramMemory
from hf_engram.modeling_engram.ops.gather_rows import gather_rows, gather_rows_reference


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def row_sums(row_ids, grad_out, dtype=torch.float64):
    """The distinct ids, and the sum of the gradients of each, one after the other."""
    grads = grad_out.to("cpu", dtype).reshape(row_ids.numel(), -1)
    sums = {}
    for row, grad in zip(row_ids.flatten().tolist(), grads, strict=True):
        sums[row] = sums[row] + grad if row in sums else grad
    return torch.tensor(sorted(sums)), torch.stack([sums[row] for row in sorted(sums)])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [1, 16, 24, 256, 257, 1500])
def test_rows_of_any_width_and_dtype(backend, device, dim, dtype):
    table, ids = make_table(50, dim, dtype, device), make_ids(50, 2, 5, 3, device=device)
    out = gather_rows(table, ids, backend=backend)
    assert torch.equal(out, table[ids].flatten(-2))
    assert out.dtype == dtype


@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_result_in_another_dtype(backend, device, dtype, to):
    table, ids = make_table(50, 24, dtype, device), make_ids(50, 2, 5, 3, device=device)
    assert_same(gather_rows(table, ids, dtype=to, backend=backend), gather_rows_reference(table, ids, dtype=to))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("few", [0, 2**40])
def test_every_byte_with_every_scale(backend, device, dtype, few, monkeypatch):
    """All 256 x 256, by any route: normal and subnormal numbers, zeros of both signs, NaN of either, infinity."""
    monkeypatch.setattr(gather_module, "CPU_FEW", few)
    byte = torch.arange(256, dtype=torch.uint8)
    table = byte.repeat(256, 1).view(torch.float8_e4m3fn).to(device)
    scales = byte.unsqueeze(1).view(torch.float8_e8m0fnu).to(device)
    ids = torch.arange(256, device=device).view(8, 32)
    actual = gather_rows(table, ids, scales, dtype, backend=backend)

    # The formula in fp64, with nothing of torch's own conversions: 2^7 sign, 2^3 exponent, mantissa.
    exponent, mantissa = (byte.double() // 8) % 16, byte.double() % 8
    magnitude = torch.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    value = torch.copysign(magnitude, 127.5 - byte.double())
    value[[0x7F, 0xFF]] = torch.nan
    scale = 2.0 ** (byte.double() - 127)
    scale[255] = torch.nan
    expected = (scale.unsqueeze(1) * value).float().to(dtype).view(8, 32 * 256)
    assert expected[~expected.isnan()].numel() == 254 * 255
    assert_same(actual.cpu(), expected)
    assert_same(gather_rows_reference(table, ids, scales, dtype).cpu(), expected)


@pytest.mark.parametrize(("dim", "block"), [(32, 32), (96, 32), (256, 32), (24, 8), (24, 12), (40, 40), (1600, 32)])
def test_scale_blocks(backend, device, dim, block):
    table, scales = make_quantised(50, dim, block, device)
    ids = make_ids(50, 2, 5, 3, device=device)
    out = gather_rows(table, ids, scales, backend=backend)
    assert out.dtype == torch.float32
    assert_same(out, gather_rows_reference(table, ids, scales))


@pytest.mark.parametrize("dtype", FLOATS)
def test_several_blocks_of_rows(monkeypatch, dtype):
    """The last block on a CPU is shorter."""
    monkeypatch.setattr(gather_module, "CPU_FEW", 0)
    monkeypatch.setattr(gather_module, "CPU_BLOCK", 7 * 64)
    table, scales = make_quantised(50, 64)
    ids = make_ids(50, 5, 10)
    inputs = (table, ids, scales, dtype)
    assert_same(gather_rows(*inputs), gather_rows_reference(*inputs))


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3), (1, 3), (1, 1, 1), (3,), (2, 1, 3, 4)], ids=str)
@pytest.mark.parametrize("quantised", [False, True])
def test_any_shape_of_ids(backend, device, shape, quantised):
    table, scales = make_quantised(9, 32, device=device) if quantised else (make_table(9, 32, device=device), None)
    ids = make_ids(9, *shape, device=device)
    out = gather_rows(table, ids, scales, backend=backend)
    assert out.shape == (*shape[:-1], shape[-1] * 32)
    assert_same(out, gather_rows_reference(table, ids, scales))


@pytest.mark.parametrize("case", ["a layer's", "transposed", "expanded", "int32"])
@pytest.mark.parametrize("quantised", [False, True])
def test_ids_that_are_not_contiguous(backend, device, case, quantised):
    table, scales = make_quantised(50, 32, device=device) if quantised else (make_table(50, 32, device=device), None)
    ids = make_ids(50, 2, 5, 3, 4, device=device)
    if case == "a layer's":
        ids = ids[:, :, 1]
    elif case == "transposed":
        ids = ids[:, :, 0].transpose(0, 2)
    elif case == "expanded":
        ids = ids[:, :, 0, :1].expand(-1, -1, 4)
    elif case == "int32":
        ids = ids[:, :, 1].int()
    assert_same(gather_rows(table, ids, scales, backend=backend), gather_rows_reference(table, ids, scales))


def test_rows_that_are_not_side_by_side(backend, device):
    """A table that is a piece of wider rows is read in place."""
    wide = make_table(50, 80, device=device)
    ids = make_ids(50, 4, 3, device=device)
    assert torch.equal(gather_rows(wide[:, 24:48], ids, backend=backend), wide[:, 24:48][ids].flatten(-2))


def test_addresses_beyond_int32(backend, device):
    """Rows whose first element is number 2^31 and more; memory that is not touched is not there."""
    rows, dim = 2**31 // 16 + 2, 16
    table = torch.empty(rows, dim, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(rows, 1, dtype=torch.float8_e8m0fnu, device=device)
    ids = torch.tensor([[2**31 // 16, 3, rows - 1]], device=device)
    values = torch.arange(3 * dim, device=device).view(3, dim)
    table.view(torch.uint8)[ids[0]] = values.to(torch.uint8)
    scales.view(torch.uint8)[ids[0]] = torch.tensor([[127], [128], [129]], dtype=torch.uint8, device=device)
    small = values.to(torch.uint8).view(torch.float8_e4m3fn).float() * torch.tensor([[1.0], [2], [4]], device=device)
    assert torch.equal(gather_rows(table, ids, scales, backend=backend), small.view(1, -1))


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("few", [0, 2**13])
def test_ids_out_of_range_on_the_cpu(wrong, quantised, few, monkeypatch):
    monkeypatch.setattr(gather_module, "CPU_FEW", few)
    table, scales = make_quantised(50, 32) if quantised else (make_table(50, 32), None)
    ids = torch.tensor([[3, wrong]])
    message = rf"`row_ids` must lie between 0 and 49.*from {min(3, wrong)} to {max(3, wrong)}"
    with pytest.raises(IndexError, match=message):
        gather_rows(table, ids, scales)
    if not quantised:
        with pytest.raises(IndexError, match=message):
            gather_rows(table.requires_grad_(), ids, sparse_grad=True)


@pytest.mark.parametrize("wrong", [-1, 50, 2**40])
@pytest.mark.parametrize("quantised", [False, True])
def test_ids_out_of_range_without_assertions(backend, device, wrong, quantised):
    """The interpreter leaves the kernel's assertion out: such a row is not read, and is NaN."""
    if backend == "eager" or device == "cuda":
        pytest.skip("these raise: see the tests beside this one")
    table, scales = make_quantised(50, 32) if quantised else (make_table(50, 32), None)
    out = gather_rows(table, torch.tensor([[3, wrong]]), scales, backend=backend)
    assert out[:, 32:].isnan().all() and not out[:, :32].isnan().any()


@pytest.mark.gpu
def test_ids_out_of_range_on_the_gpu():
    """The device asserts, which ends its process."""
    script = (
        "import torch; from hf_engram.modeling_engram.ops.gather_rows import gather_rows\n"
        "gather_rows(torch.zeros(50, 32, device='cuda'), torch.tensor([[3, 50]], device='cuda'), backend='triton')\n"
        "torch.cuda.synchronize()"
    )
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=600, check=False)
    assert child.returncode != 0
    assert "row id out of range" in child.stderr + child.stdout


# Gradients.


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dim", [16, 24, 257, 1500])
def test_sparse_gradient(backend, device, dim, dtype):
    """Coalesced, of the fetched rows only, summed in fp32 and rounded once."""
    table = make_table(50, dim, dtype, device).requires_grad_()
    ids, grad_out = make_ids(50, 4, 6, 3, device=device), make_table(4 * 6, 3 * dim, dtype, device, 2)
    gather_rows(table, ids, sparse_grad=True, backend=backend).backward(grad_out.view(4, 6, -1))
    assert table.grad.is_sparse and table.grad.is_coalesced() and table.grad.dtype == dtype
    rows, sums = row_sums(ids, grad_out)
    assert torch.equal(table.grad.indices().cpu(), rows.unsqueeze(0))
    step = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(table.grad.values().cpu().double(), sums, rtol=step, atol=1e-5)


@pytest.mark.parametrize(("dtype", "to"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_sparse_gradient_through_a_cast(backend, device, dtype, to):
    table = make_table(5, 16, dtype, device).requires_grad_()
    ids, grad_out = make_ids(5, 40, 3, device=device), make_table(40, 48, to, device, 2)
    gather_rows(table, ids, dtype=to, sparse_grad=True, backend=backend).backward(grad_out)
    _, sums = row_sums(ids, grad_out)
    assert table.grad.dtype == dtype
    step = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(table.grad.values().cpu().double(), sums, rtol=step, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_duplicates_are_summed_in_fp32(backend, device, dtype):
    """Many small numbers, each lost if it were added to a 16-bit total; also runs of more than one program."""
    table = torch.zeros(4, 16, dtype=dtype, device=device).requires_grad_()
    counts = [3000, 0, 65, 64]
    ids = torch.arange(4).repeat_interleave(torch.tensor(counts)).view(-1, 1).to(device)
    grad_out = torch.full((len(ids), 16), 2.0**-8, dtype=dtype, device=device)
    grad_out[0] = 1.0
    gather_rows(table, ids, sparse_grad=True, backend=backend).backward(grad_out)
    expected = torch.tensor([1 + 2999 * 2.0**-8, 65 * 2.0**-8, 64 * 2.0**-8]).to(dtype)
    assert table.grad.indices().tolist() == [[0, 2, 3]]
    step = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(table.grad.values().cpu(), expected.unsqueeze(1).expand(3, 16), rtol=step, atol=0)


@pytest.mark.parametrize("rows", [3, 50])
def test_two_passes_give_the_same_bits(backend, device, rows):
    """With few rows, in long runs; with more, in short ones too."""
    table = make_table(rows, 40, device=device).requires_grad_()
    ids, grad_out = make_ids(rows, 300, 3, device=device), make_table(300, 120, device=device, seed=2)
    grads = []
    for _ in range(2):
        table.grad = None
        gather_rows(table, ids, sparse_grad=True, backend=backend).backward(grad_out)
        grads.append(table.grad.values())
    assert torch.equal(*grads)
    torch.testing.assert_close(grads[0].cpu().double(), row_sums(ids, grad_out)[1], rtol=1e-5, atol=1e-5)


def test_the_order_of_summation_is_that_of_positions():
    """The very bits of a loop, where one program sums the run."""
    table = make_table(50, 40).requires_grad_()
    ids, grad_out = make_ids(50, 40, 3), make_table(40, 120, seed=2)
    gather_rows(table, ids, sparse_grad=True).backward(grad_out)
    assert torch.equal(table.grad.values(), row_sums(ids, grad_out, torch.float32)[1])


@pytest.mark.parametrize("sparse_grad", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_equals_that_of_embedding(backend, device, dtype, sparse_grad):
    """Dense: its very bits. Sparse: the same, up to the rounding of sums."""
    ids, grad_out = make_ids(50, 4, 6, 3, device=device), make_table(4 * 6, 3 * 24, dtype, device, 2).view(4, 6, -1)
    grads = []
    for fetch in (
        lambda table: gather_rows(table, ids, sparse_grad=sparse_grad, backend=backend),
        lambda table: F.embedding(ids, table).flatten(-2),
    ):
        table = make_table(50, 24, dtype, device).requires_grad_()
        fetch(table).backward(grad_out)
        grads.append(table.grad)
    assert grads[0].is_sparse == sparse_grad
    if sparse_grad:
        step = torch.finfo(dtype).eps
        torch.testing.assert_close(grads[0].to_dense(), grads[1], rtol=8 * step, atol=8 * step)
    else:
        assert torch.equal(*grads)


@pytest.mark.parametrize("case", ["expanded gradient", "no ids", "int32 ids", "ids of a layer"])
def test_sparse_gradient_of_odd_inputs(backend, device, case):
    table = make_table(9, 16, device=device).requires_grad_()
    ids = make_ids(9, 2, 5, 2, 3, device=device)[:, :, 1]
    if case == "no ids":
        ids = ids[:0]
    elif case == "int32 ids":
        ids = ids.int()
    grad_out = torch.ones(len(ids), 5, 48, device=device)
    if case == "expanded gradient":
        grad_out = grad_out[:1, :1, :1].expand(2, 5, 48)
    gather_rows(table, ids, sparse_grad=True, backend=backend).backward(grad_out)
    expected = torch.zeros(9, 16).index_add_(0, ids.flatten().long().cpu(), torch.ones(ids.numel(), 16))
    assert table.grad.is_coalesced()
    assert torch.equal(table.grad.to_dense().cpu(), expected)


def test_no_dense_gradient_on_the_way():
    """Forward and backward allocate much less than a table."""
    table = make_table(100_000, 32).requires_grad_()
    ids = make_ids(100_000, 20, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        gather_rows(table, ids, sparse_grad=True).sum().backward()
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sizes and max(sizes) <= 60 * 32 * 4


@pytest.mark.parametrize("rows", [9, 2**61])
def test_sorted_ids_and_positions(rows):
    """The fast way, and torch's where id and position do not fit into one number."""
    ids = make_ids(9, 50) + rows - 9
    row_ids, positions = gather_module._sorted_with_positions(ids, rows)
    expected = ids.sort(stable=True)
    assert torch.equal(row_ids, expected.values) and torch.equal(positions, expected.indices)


def test_dense_gradient_is_differentiable_twice():
    table, ids = make_table(9, 5, torch.float64).requires_grad_(), make_ids(9, 3, 2)
    assert torch.autograd.gradcheck(lambda table: gather_rows(table, ids), [table])
    assert torch.autograd.gradgradcheck(lambda table: gather_rows(table, ids), [table])


def test_sparse_gradient_is_differentiable_once(backend, device):
    table = make_table(9, 16, device=device).requires_grad_()
    out = gather_rows(table, make_ids(9, 3, 2, device=device), sparse_grad=True, backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), table, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad|differentiate twice"):
        torch.sparse.sum(grad).backward()


def test_the_table_is_not_among_saved_tensors(backend, device):
    """Hooks that move what backward needs must not move a table, and it may change before backward."""
    table = make_table(50, 16, device=device).requires_grad_()
    sizes = []
    for sparse_grad in (False, True):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: sizes.append(tensor.numel()) or tensor, lambda t: t
        ):
            out = gather_rows(table, make_ids(50, 4, 3, device=device), sparse_grad=sparse_grad, backend=backend)
        with torch.no_grad():
            table.add_(1)
        out.sum().backward()
        table.grad = None
    assert sizes == [12, 12]


def test_sparse_gradients_add_up(backend, device):
    """A table that is used twice, as when gradients are accumulated."""
    table = make_table(9, 16, device=device).requires_grad_()
    ids = make_ids(8, 3, 2, device=device)
    for _ in range(2):
        out = gather_rows(table, ids, sparse_grad=True, backend=backend)
        (out + gather_rows(table, ids + 1, sparse_grad=True, backend=backend)).sum().backward()
    ids = torch.cat([ids, ids + 1]).flatten().cpu()
    expected = torch.zeros(9, 16).index_add_(0, ids, torch.full((len(ids), 16), 2.0))
    assert torch.equal(table.grad.coalesce().to_dense().cpu(), expected)
    assert torch.equal(table.grad.to_dense().cpu(), expected)


# Refusals.


def test_quantised_tables_are_frozen():
    table, scales = make_quantised(9, 32)
    with pytest.raises(ValueError, match="frozen in training"):
        gather_rows(table.requires_grad_(), torch.zeros(1, 1, dtype=torch.long), scales)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scales": None}, ValueError, "needs `scales`"),
        ({"scales": torch.ones(9, 1)}, TypeError, "float8_e8m0fnu, got torch.float32"),
        ({"scales": torch.ones(8, 1).to(torch.float8_e8m0fnu)}, ValueError, r"must be \[9, n\].*got \[8, 1\]"),
        ({"scales": torch.ones(9, 5).to(torch.float8_e8m0fnu)}, ValueError, "n a divisor of 32"),
        ({"scales": torch.ones(9, 0).to(torch.float8_e8m0fnu)}, ValueError, "n a divisor of 32"),
        ({"scales": torch.ones(9, 1).to(torch.float8_e8m0fnu).to("meta")}, ValueError, "beside the table on cpu"),
        ({"table": torch.ones(9, 32)}, ValueError, "this one is torch.float32: leave them out"),
        ({"table": torch.ones(9, 32).to(torch.float8_e5m2)}, TypeError, "got torch.float8_e5m2"),
        ({"table": torch.ones(9)}, ValueError, r"`table` must be \[rows, d\]"),
        ({"row_ids": torch.ones(1, 1)}, TypeError, "int64 or int32, got torch.float32"),
        ({"row_ids": torch.tensor(1)}, ValueError, r"`row_ids` \[..., C\], got \[9, 32\] and \[\]"),
        ({"dtype": torch.int32}, TypeError, "`dtype` must be fp32"),
        ({"backend": "cuda"}, ValueError, "must be one of"),
    ],
    ids=str,
)
def test_inputs_that_do_not_fit(change, error, message):
    table, scales = make_quantised(9, 32)
    arguments = {"table": table, "row_ids": torch.zeros(1, 1, dtype=torch.long), "scales": scales, **change}
    with pytest.raises(error, match=message):
        gather_rows(**arguments)


def test_what_the_kernels_cannot_take(monkeypatch):
    table, ids = make_table(9, 8), make_ids(9, 2, 3)
    with pytest.raises(RuntimeError, match=r"gather_rows.*(needs a GPU|not installed)"):
        gather_rows(table, ids, backend="triton")
    monkeypatch.setattr("hf_engram.modeling_engram.ops.backend.TRITON_DEVICES", ("cpu",))
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="float64"):
        gather_rows(table.double(), ids, backend="triton")
    with pytest.raises(RuntimeError, match="side by side"):
        gather_rows(table.T.contiguous().T, ids, backend="triton")
    assert torch.equal(gather_rows(table.T.contiguous().T, ids), table[ids].flatten(-2))


# The memory, which fetches through this.


class Sizes:
    engram_num_embeddings = (50, 70)
    engram_head_dim = 16


@pytest.mark.parametrize("sparse_grad", [False, True])
def test_memory_fetches_every_layer(sparse_grad):
    memory = EngramMemory(Sizes)
    memory.sparse_grad = sparse_grad
    hash_ids = make_ids(50, 2, 5, 2, 3)
    rows = memory(hash_ids)
    for index, (table, result) in enumerate(zip(memory.tables, rows, strict=True)):
        assert torch.equal(result, table.weight[hash_ids[:, :, index]].flatten(-2))
    sum(result.sum() for result in rows).backward()
    assert all(table.weight.grad.is_sparse == sparse_grad for table in memory.tables)
    if sparse_grad:
        assert all(table.weight.grad.is_coalesced() for table in memory.tables)


def test_kernels_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)
