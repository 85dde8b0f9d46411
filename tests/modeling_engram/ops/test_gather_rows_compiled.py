"""`gather_rows` under torch.compile, its kernels compiled for GPUs that are not there, and memory on one that is."""

import pytest
import torch
from gather_inputs import assert_same, make_ids, make_quantised, make_table

import hf_engram.modeling_engram.ops.gather_rows as gather_module
from hf_engram.modeling_engram.ops.gather_rows import gather_rows, gather_rows_reference


AHEAD_OF_TIME = ["sm_80", "sm_90", "sm_100", "gfx942"]
# Bytes of local memory that a thread may spill: none has to.
SPILL_BOUND = 0
FLOATS = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("quantised", [False, True])
def test_meta_tensors(quantised):
    table, scales = make_quantised(9, 32, device="meta") if quantised else (make_table(9, 32, device="meta"), None)
    for length in (0, 5):
        out = gather_rows(table, make_ids(9, 2, length, 3, device="meta"), scales)
        assert out.is_meta and out.shape == (2, length, 96)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["inference", "dense", "sparse", "quantised"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_into_one_graph(compiler, case, dynamic):
    torch._dynamo.reset()
    table, scales = make_quantised(50, 64) if case == "quantised" else (make_table(50, 64), None)
    table.requires_grad_(case in ("dense", "sparse"))
    options = {"dtype": torch.bfloat16, "sparse_grad": case == "sparse"}
    compiled = torch.compile(gather_rows, fullgraph=True, dynamic=dynamic, backend=compiler)
    for length in (5, 6):
        ids = make_ids(50, 2, length, 3)
        out, expected = compiled(table, ids, scales, **options), gather_rows(table, ids, scales, **options)
        assert_same(out, expected)
        if table.requires_grad:
            (grad,), (truth,) = (torch.autograd.grad(result.sum(), table) for result in (out, expected))
            assert grad.is_sparse == truth.is_sparse == (case == "sparse")
            assert torch.equal(grad.to_dense(), truth.to_dense())


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [False, True])
def test_inductor_reads_rows_in_place(quantised):
    """The generated code allocates less than a table: one that were copied, or cast as a whole, would show."""
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    rows = 200_003
    table, scales = make_quantised(rows, 64) if quantised else (make_table(rows, 64, torch.bfloat16), None)
    ids = make_ids(rows, 2, 5, 3)
    compiled = torch.compile(gather_rows, fullgraph=True)
    out, code = run_and_get_code(compiled, table, ids, scales, torch.float32)
    assert_same(out, gather_rows_reference(table, ids, scales, torch.float32))
    allocations = [line for source in code for line in source.splitlines() if "empty_strided" in line and "=" in line]
    assert allocations
    assert not any(str(rows) in line for line in allocations if "import" not in line)


@pytest.mark.parametrize("case", ["inference", "dense"])
def test_kernel_is_traced_into_one_graph(monkeypatch, case):
    """torch.compile takes the launch into its graph; traced without a GPU."""
    pytest.importorskip("triton")
    from ahead_of_time import absent_device
    from torch._dynamo.backends.common import aot_autograd

    class TracedError(Exception):
        pass

    def stop(graph, inputs):
        nodes.extend(node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target))
        raise TracedError

    nodes = []
    torch._dynamo.reset()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(gather_module, "resolve_backend", lambda *args: "triton")
    table = make_table(9, 64).requires_grad_(case == "dense")
    compiled = torch.compile(gather_rows, fullgraph=True, backend=aot_autograd(fw_compiler=stop))
    with absent_device("sm_90"), pytest.raises(Exception, match="TracedError"):
        compiled(table, make_ids(9, 2, 5, 3))
    assert len(nodes) == 1
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [-1, 50])
@pytest.mark.parametrize("case", ["inference", "dense", "sparse", "quantised"])
def test_ids_out_of_range_in_compiled_code(wrong, case):
    torch._dynamo.reset()
    table, scales = make_quantised(50, 32) if case == "quantised" else (make_table(50, 32), None)
    table.requires_grad_(case in ("dense", "sparse"))
    compiled = torch.compile(gather_rows, fullgraph=True)
    with pytest.raises((IndexError, RuntimeError), match=r"index out of|out of bounds|must lie between"):
        compiled(table, torch.tensor([[3, wrong]]), scales, sparse_grad=case == "sparse")


def test_two_copies_of_the_code_in_one_process():
    """Each has a compiled operation of its own, also when a copy is loaded again."""
    from importlib.util import module_from_spec, spec_from_file_location

    torch._dynamo.reset()
    table, scales = make_quantised(9, 32)
    ids = make_ids(9, 2, 3)
    for name in ("other_ops", "other_ops", "another_ops"):
        spec = spec_from_file_location(f"{gather_module.__package__}.{name}", gather_module.__file__)
        copy = module_from_spec(spec)
        spec.loader.exec_module(copy)
        for function in (copy.gather_rows, gather_rows):
            out = torch.compile(function, fullgraph=True, backend="aot_eager")(table, ids, scales)
            assert_same(out, gather_rows_reference(table, ids, scales))


# The kernels, without a GPU and with one.


def assert_compiles(target, tmp_path, dim, dtype, to, block=None):
    """Gather and, of a float table, the sums of its gradient, with no more than SPILL_BOUND spilled."""
    from ahead_of_time import compile_only, resources

    table, scales = (make_table(9, dim, dtype), None) if block is None else make_quantised(9, dim, block)
    ids = make_ids(9, 5, 3)
    with compile_only(target) as compiled:
        gather_module._launch_gather(table, ids, scales, to)
        if block is None:
            positions, starts = torch.arange(15), torch.arange(16)
            gather_module._launch_sums(make_table(15, dim, to), positions, starts[:-1], starts[1:], dtype)
            gather_module._launch_sums(make_table(15, dim, to), positions, starts[:-1], starts[1:], torch.float32)
    assert len(compiled) == (3 if block is None else 1)
    for kernel in compiled:
        _, spilled = resources(kernel, tmp_path)
        assert spilled <= SPILL_BOUND, (target, kernel.metadata.name, dim, dtype, to, block)


@pytest.mark.parametrize("target", AHEAD_OF_TIME)
def test_compiles_ahead_of_time(target, tmp_path):
    pytest.importorskip("triton")
    assert_compiles(target, tmp_path, 256, torch.bfloat16, torch.bfloat16)
    assert_compiles(target, tmp_path, 256, None, torch.bfloat16, 32)


@pytest.mark.slow
@pytest.mark.parametrize("target", AHEAD_OF_TIME)
def test_compiles_every_tile_ahead_of_time(target, tmp_path):
    """Every tile and dtype that dispatch can choose: rows whole, ragged and in pieces; blocks of any width."""
    pytest.importorskip("triton")
    for dtype in FLOATS:
        for to in FLOATS:
            assert_compiles(target, tmp_path, 256, dtype, to)
        for dim in (1, 16, 24, 257, 1500):
            assert_compiles(target, tmp_path, dim, dtype, dtype)
        for dim, block in ((32, 32), (96, 32), (256, 32), (24, 8), (24, 12), (40, 40), (1600, 32), (4096, 4096)):
            assert_compiles(target, tmp_path, dim, None, dtype, block)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_generated_code(target):
    """Rows are read and written sixteen bytes at a time."""
    pytest.importorskip("triton")
    from ahead_of_time import compile_only

    for table, scales in ((make_table(9, 256, torch.bfloat16), None), make_quantised(9, 256)):
        with compile_only(target) as compiled:
            gather_module._launch_gather(table, make_ids(9, 5, 3), scales, torch.bfloat16)
        assert "ld.global.v4.b32" in compiled[0].asm["ptx"] and "st.global.v4.b32" in compiled[0].asm["ptx"]
        # Subnormal numbers count; ids out of range stop the kernel.
        assert "ftz" not in compiled[0].asm["ptx"]
        assert "assertfail" in compiled[0].asm["ptx"]


@pytest.mark.gpu
@pytest.mark.parametrize("quantised", [False, True])
def test_pinned_host_memory_is_read_in_place(quantised):
    table, scales = make_quantised(5000, 256) if quantised else (make_table(5000, 256, torch.bfloat16), None)
    ids = make_ids(5000, 2, 5, 24)
    expected = gather_rows(table, ids, scales, torch.bfloat16)
    pinned, scales = table.pin_memory(), None if scales is None else scales.pin_memory()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ids = ids.cuda()
    out = gather_rows(pinned, ids, scales, torch.bfloat16, backend="triton")
    assert out.is_cuda and torch.equal(out.cpu(), expected)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + ids.nbytes + 2**12
    if not quantised:
        pinned.requires_grad_()
        gather_rows(pinned, ids, sparse_grad=True, backend="triton").sum().backward()
        assert pinned.grad.is_sparse and pinned.grad.device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("sparse_grad", [False, True])
def test_tables_on_another_device(sparse_grad):
    """Host memory that is not pinned, with ids on a GPU, and the other way round."""
    table = make_table(50, 16)
    ids = make_ids(50, 2, 5, 3)
    for place, ids_place in (("cpu", "cuda"), ("cuda", "cpu")):
        there = table.to(place, copy=True).requires_grad_()
        out = gather_rows(there, ids.to(ids_place), sparse_grad=sparse_grad)
        out.sum().backward()
        assert out.device.type == ids_place and torch.equal(out.cpu(), table[ids].flatten(-2))
        assert there.grad.device.type == place and there.grad.is_sparse == sparse_grad
    with pytest.raises(RuntimeError, match="not pinned"):
        gather_rows(table, ids.cuda(), backend="triton")


@pytest.mark.gpu
def test_memory_on_the_gpu():
    """Forward allocates its result; backward the sparse gradient and lists of ids, never a table."""
    table = make_table(2_000_000, 256, torch.bfloat16, "cuda").requires_grad_()
    ids = make_ids(2_000_000, 4096, 24, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = gather_rows(table, ids, sparse_grad=True, backend="triton")
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 2**20
    grad_out = torch.ones_like(out)
    out.backward(grad_out)
    lists = 16 * ids.nbytes
    assert torch.cuda.max_memory_allocated() - before <= 2 * out.nbytes + table.grad.values().nbytes + lists + 2**22
