"""The Engram gate, without kernels and with them, against the plain formula in fp64."""

import pytest
import torch
from torch import nn

import hf_engram.modeling_engram.ops.engram_gate as gate_module
from hf_engram.modeling_engram.ops.engram_gate import EagerEngramGate, engram_gate, engram_gate_reference


NAMES = ("out", "grad of hidden_states", "grad of kv", "grad of q_weight", "grad of k_weight")
AHEAD_OF_TIME = ["sm_80", "sm_90", "sm_100", "gfx942"]


def make_inputs(leading, copies, dim, dtype=torch.float32, device="cpu", seed=0):
    """x, kv, q_weight, k_weight and a gradient for the output.

    Keys lean towards their copy of the stream, or away from it, so that dot products are about 5 or -5: near zero the
    gate's slope goes like 1 / sqrt(|dot|), and no fp32 is close to fp64 there.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape, mean=0.0, std=1.0):
        return (mean + std * torch.randn(shape, generator=generator)).to(device, dtype)

    x, kv = draw(*leading, copies, dim), draw(*leading, (copies + 1) * dim)
    lean = min(1.0, 5 * dim**-0.5) * (-1.0) ** torch.arange(copies).to(x).unsqueeze(-1)
    kv[..., : copies * dim] += (lean * x).flatten(-2)
    q_weight, k_weight = (draw(copies, dim, mean=1.0, std=0.2) for _ in range(2))
    return x, kv, q_weight, k_weight, draw(*leading, copies, dim)


def outcome(function, tensors, grad_out, token_mask=None, **options):
    """The output, and the gradients of the four tensors."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = function(*leaves, token_mask, **options)
    out.backward(grad_out)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_equals_reference(inputs, token_mask=None, backend=None, tolerance=2e-6):
    """Each result is that of the formula in fp64 on the same numbers: up to fp32's rounding, and one cast."""
    *tensors, grad_out = inputs
    actual = outcome(engram_gate, tensors, grad_out, token_mask, backend=backend)
    expected = outcome(engram_gate_reference, [t.double() for t in tensors], grad_out.double(), token_mask)
    for name, result, truth in zip(NAMES, actual, expected, strict=True):
        assert result.shape == truth.shape, name
        if result.numel():
            # Triton's interpreter truncates where a GPU rounds: a whole step of a 16-bit type, not half of one.
            step = 0.0 if result.dtype == torch.float32 else torch.finfo(result.dtype).eps
            bound = tolerance * truth.abs().max() + step * truth.abs() + torch.finfo(result.dtype).smallest_normal
            assert ((result.double() - truth).abs() <= bound).all(), name
    return actual


@pytest.mark.parametrize("copies", range(1, 9))
def test_any_number_of_copies(backend, device, copies):
    assert_equals_reference(make_inputs((3,), copies, 96, device=device), backend=backend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("copies", "dim"), [(4, 1), (3, 257), (4, 576), (1, 2500)])
def test_any_width_and_dtype(backend, device, copies, dim, dtype):
    inputs = make_inputs((3,), copies, dim, dtype, device)
    results = assert_equals_reference(inputs, backend=backend)
    assert all(result.dtype == dtype for result in results)


def test_full_width(backend, device):
    assert_equals_reference(make_inputs((2,), 4, 5120, torch.bfloat16, device), backend=backend)


def test_stream_in_fp32_beside_a_layer_in_bf16(backend, device):
    x, kv, q_weight, k_weight, grad_out = make_inputs((5,), 2, 96, device=device)
    results = assert_equals_reference((x, kv.bfloat16(), q_weight, k_weight.bfloat16(), grad_out), backend=backend)
    assert [result.dtype for result in results] == [torch.float32] * 2 + [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]


@pytest.mark.parametrize(
    "case", ["zero stream", "zero keys", "negative zeros", "large", "denormal", "opposite", "alone"]
)
def test_extreme_numbers(backend, device, case):
    x, kv, q_weight, k_weight, grad_out = make_inputs((6,), 3, 160, device=device)
    keys = kv[:, : 3 * 160]
    if case == "zero stream":
        x.zero_()
    elif case == "zero keys":
        keys.zero_()
    elif case == "negative zeros":
        x.fill_(-0.0)
    elif case == "large":
        x.mul_(1e4)
        kv.mul_(1e4)
    elif case == "denormal":
        x.mul_(1e-40)
    elif case == "opposite":
        keys.copy_(-x.flatten(1))
    elif case == "alone":
        keys.copy_(x.flatten(1))
        x[..., 1:] = 0
    assert_equals_reference((x, kv, q_weight, k_weight, grad_out), backend=backend)


def test_zero_dot_product_takes_its_sign(backend, device):
    """The gate at +-0 is sigmoid(+-0.001), and has no slope there."""
    x, kv, q_weight, k_weight, grad_out = make_inputs((4,), 2, 32, device=device)
    x.zero_()
    out, grad_x, grad_kv, *grad_weights = outcome(engram_gate, (x, kv, q_weight, k_weight), grad_out, backend=backend)
    gate = torch.sigmoid(torch.tensor(0.001, device=device))
    torch.testing.assert_close(out, (gate * kv[:, 64:]).unsqueeze(1).expand_as(out))
    assert torch.equal(grad_x, grad_out)
    assert not grad_kv[:, :64].any()
    assert not any(grad.any() for grad in grad_weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("live", [[0, 2, 3, 6], [5], [], range(7)], ids=str)
def test_masked_tokens(backend, device, live, dtype):
    """Under the mask: the stream's bits pass, the gradient passes, and nothing that is there leaks out."""
    tensors = make_inputs((7,), 3, 96, dtype, device)
    mask = torch.zeros(7, dtype=torch.bool, device=device)
    mask[list(live)] = True
    x, kv, q_weight, k_weight, grad_out = tensors
    clean = outcome(engram_gate, (x[mask], kv[mask], q_weight, k_weight), grad_out[mask], backend=backend)
    kv[~mask] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=device).repeat(128).to(dtype)
    x[~mask] = torch.where(x[~mask].abs() < 0.5, -0.0, x[~mask])
    grad_out[~mask] = torch.where(grad_out[~mask].abs() < 0.5, -0.0, grad_out[~mask])

    out, grad_x, grad_kv, *grad_weights = outcome(
        engram_gate, (x, kv, q_weight, k_weight), grad_out, mask, backend=backend
    )
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(out[~mask].view(bits), x[~mask].view(bits))
    assert torch.equal(grad_x[~mask].view(bits), grad_out[~mask].view(bits))
    assert not grad_kv[~mask].any()
    for result, expected in zip((out[mask], grad_x[mask], grad_kv[mask], *grad_weights), clean, strict=True):
        torch.testing.assert_close(result, expected)


def test_infinite_stream_under_the_mask(backend, device):
    *tensors, grad_out = make_inputs((3,), 2, 96, device=device)
    mask = torch.tensor([True, False, True], device=device)
    tensors[0][1] = float("inf")
    out, *grads = outcome(engram_gate, tensors, grad_out, mask, backend=backend)
    assert torch.equal(out[1], tensors[0][1])
    assert torch.equal(grads[0][1], grad_out[1])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("leading", [(0,), (2, 0), (1,), (1, 1), (2, 1, 3), ()], ids=str)
def test_any_leading_shape(backend, device, leading):
    assert_equals_reference(make_inputs(leading, 2, 40, device=device), backend=backend)
    mask = torch.ones(leading, dtype=torch.bool, device=device)
    assert_equals_reference(make_inputs(leading, 2, 40, device=device), mask, backend=backend)


def test_mask_of_one_sequence_for_all(backend, device):
    *tensors, grad_out = make_inputs((2, 4), 2, 40, device=device)
    mask = torch.tensor([True, False, True, True], device=device)
    one = outcome(engram_gate, tensors, grad_out, mask, backend=backend)
    all_ = outcome(engram_gate, tensors, grad_out, mask.expand(2, 4), backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(one, all_, strict=True))


@pytest.mark.parametrize("case", ["expanded", "sliced", "transposed", "columns apart", "expanded gradient"])
def test_inputs_that_are_not_contiguous(backend, device, case):
    x, kv, q_weight, k_weight, grad_out = make_inputs((2, 3), 4, 72, device=device)
    if case == "expanded":
        x = x[:, :, :1].expand(-1, -1, 4, -1)
    elif case == "sliced":
        x, kv = torch.cat([x, x], -1)[..., :72], torch.cat([kv, kv], -1)[..., :360]
    elif case == "transposed":
        x, kv, q_weight = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, kv, q_weight))
    elif case == "columns apart":
        x, kv, k_weight = (torch.stack([t, t], -1)[..., 0] for t in (x, kv, k_weight))
    elif case == "expanded gradient":
        grad_out = grad_out[0, 0, 0, 0].expand(2, 3, 4, 72)
    assert_equals_reference((x, kv, q_weight, k_weight, grad_out), backend=backend)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (1, 2, 3)], ids=str)
def test_only_the_gradients_that_are_asked_for(backend, device, wanted):
    *tensors, grad_out = make_inputs((5,), 3, 96, device=device)
    expected = outcome(engram_gate_reference, tensors, grad_out)[1:]
    for index in wanted:
        tensors[index].requires_grad_()
    engram_gate(*tensors, backend=backend).backward(grad_out)
    for index, tensor in enumerate(tensors):
        if index in wanted:
            torch.testing.assert_close(tensor.grad, expected[index], rtol=1e-5, atol=1e-5)
        else:
            assert tensor.grad is None


def test_several_blocks_and_runs_of_tokens(backend, device, monkeypatch):
    """The last block or run may be shorter; two passes give the same bits."""
    monkeypatch.setattr(gate_module, "CPU_BLOCK", 3 * 2 * 40)
    monkeypatch.setattr(gate_module, "CPU_BLOCK_THREADS", 1)
    monkeypatch.setattr(gate_module, "_run_length", lambda tokens, pieces: 3)
    inputs = make_inputs((8,), 2, 40, device=device)
    mask = torch.tensor([True] * 5 + [False] + [True] * 2, device=device)
    for token_mask in (None, mask):
        first = assert_equals_reference(inputs, token_mask, backend=backend)
        second = assert_equals_reference(inputs, token_mask, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_autocast_changes_nothing(backend, device):
    *tensors, grad_out = make_inputs((5,), 3, 96, device=device)
    expected = outcome(engram_gate, tensors, grad_out, backend=backend)
    with torch.autocast(device, torch.bfloat16):
        actual = outcome(engram_gate, tensors, grad_out, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_backward_keeps_little(backend, device):
    """Besides its inputs, backward keeps three numbers a token and copy, and the product of the weights."""
    *tensors, _ = make_inputs((9,), 3, 96, device=device)
    kept = {}
    inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors}

    def note(tensor):
        if tensor.untyped_storage().data_ptr() not in inputs:
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    leaves = [tensor.requires_grad_() for tensor in tensors]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = engram_gate(*leaves, backend=backend)
    assert sum(kept.values()) == 3 * 9 * 3 + 3 * 96
    out.sum().backward()


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck(masked):
    *tensors, _ = make_inputs((4,), 2, 5, torch.float64)
    mask = torch.tensor([True, True, False, True]) if masked else None
    leaves = [tensor.requires_grad_() for tensor in tensors]
    assert torch.autograd.gradcheck(lambda *leaves: engram_gate(*leaves, mask, backend="eager"), leaves)


def test_eager_blocks_equal_the_formula_in_fp64():
    *tensors, grad_out = make_inputs((7,), 4, 96, torch.float64)
    mask = torch.tensor([True] * 6 + [False])
    actual = outcome(engram_gate, tensors, grad_out, mask, backend="eager")
    expected = outcome(engram_gate_reference, tensors, grad_out, mask)
    for result, truth in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-12, atol=1e-12)


def test_meta_tensors():
    x, kv, q_weight, k_weight, _ = make_inputs((2, 3), 2, 8, device="meta")
    out = engram_gate(x, kv, q_weight, k_weight, torch.ones(2, 3, dtype=torch.bool, device="meta"))
    assert out.is_meta
    assert out.shape == x.shape


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [False, True])
def test_compiles_into_one_graph(compiler, masked):
    *tensors, grad_out = make_inputs((2, 5), 3, 96)
    mask = torch.tensor([True, False, True, True, True]).expand(2, 5) if masked else None
    expected = outcome(engram_gate, tensors, grad_out, mask)
    compiled = torch.compile(engram_gate, fullgraph=True, backend=compiler)
    for result, truth in zip(outcome(compiled, tensors, grad_out, mask), expected, strict=True):
        torch.testing.assert_close(result, truth, rtol=1e-5, atol=1e-5)


class Gate(nn.Module):
    """The gate with parameters of its own."""

    def __init__(self, copies, dim):
        super().__init__()
        self.q_weight, self.k_weight = (nn.Parameter(torch.randn(copies, dim)) for _ in range(2))

    def forward(self, x, kv, token_mask):
        return engram_gate(x, kv, self.q_weight, self.k_weight, token_mask)


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernels_are_traced_into_one_graph(monkeypatch, dynamic):
    """torch.compile takes all three launches, forward's and backward's, into its graph; traced without a GPU."""
    pytest.importorskip("triton")
    from ahead_of_time import absent_device
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    class TracedError(Exception):
        pass

    def count_launches(joint, *args, **kwargs):
        nodes.extend(node for node in joint.graph.nodes if "triton_kernel_wrapper" in str(node.target))
        return min_cut_rematerialization_partition(joint, *args, **kwargs)

    def stop(graph, inputs):
        raise TracedError

    nodes = []
    torch._dynamo.reset()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(gate_module, "resolve_backend", lambda *args: "triton")
    x, kv, _, _, _ = make_inputs((2, 5), 3, 96)
    backend = aot_autograd(fw_compiler=stop, partition_fn=count_launches)
    compiled = torch.compile(Gate(3, 96), fullgraph=True, dynamic=dynamic, backend=backend)
    with absent_device("sm_90"), pytest.raises(Exception, match="TracedError"):
        compiled(x.requires_grad_(), kv.requires_grad_(), torch.ones(2, 5, dtype=torch.bool))
    assert len(nodes) == 3
    torch._dynamo.reset()


def test_what_the_kernels_cannot_take(monkeypatch):
    x, kv, q_weight, k_weight, _ = make_inputs((2,), 2, 8)
    with pytest.raises(RuntimeError, match=r"engram_gate.*(needs a GPU|not installed)"):
        engram_gate(x, kv, q_weight, k_weight, backend="triton")
    monkeypatch.setattr("hf_engram.modeling_engram.ops.backend.TRITON_DEVICES", ("cpu",))
    pytest.importorskip("triton")
    with pytest.raises(RuntimeError, match="float64"):
        engram_gate(x.double(), kv, q_weight, k_weight, backend="triton")
    with pytest.raises(RuntimeError, match="8 copies"):
        engram_gate(*make_inputs((2,), 9, 8)[:4], backend="triton")


@pytest.mark.parametrize("index", [1, 2, 3])
def test_shapes_that_do_not_fit(index):
    *tensors, _ = make_inputs((2,), 2, 8)
    tensors[index] = tensors[index][..., :-1]
    with pytest.raises(ValueError, match=r"kv must be \[..., \(H \+ 1\) \* D\]"):
        engram_gate(*tensors)


def test_kernels_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def assert_compiles(target, tmp_path, copies, dim, dtypes, masked, wanted=(True, True, True)):
    """Forward and backward for the target, with no more than `spill_bound` spilled."""
    from ahead_of_time import compile_only, resources, spill_bound

    x_dtype, kv_dtype = dtypes
    x, kv, weight, _, grad_out = make_inputs((4,), copies, dim)
    leaves = [x.to(x_dtype), kv.to(kv_dtype), weight]
    for leaf, wants in zip(leaves, wanted, strict=True):
        leaf.requires_grad_(wants)
    mask = torch.ones(4, dtype=torch.bool) if masked else None
    with compile_only(target) as compiled:
        gate_module.TritonEngramGate.apply(*leaves, mask, 1e-6).backward(grad_out.to(x_dtype))
    assert len(compiled) == 3
    for kernel in compiled:
        _, spilled = resources(kernel, tmp_path)
        assert spilled <= spill_bound(target), (target, kernel.metadata.name, copies, dim, dtypes)


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_compiles_ahead_of_time(target, tmp_path):
    pytest.importorskip("triton")
    assert_compiles(target, tmp_path, 4, 5120, (torch.bfloat16, torch.bfloat16), masked=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtypes", "masked"),
    [
        ((torch.float32, torch.float32), False),
        ((torch.bfloat16, torch.bfloat16), False),
        ((torch.bfloat16, torch.bfloat16), True),
        ((torch.float16, torch.float16), True),
        ((torch.float32, torch.bfloat16), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("target", AHEAD_OF_TIME)
def test_compiles_every_tile_ahead_of_time(target, dtypes, masked, tmp_path):
    """Every tile that the dispatch can choose: 1, 2, 4 and 8 rows, whole and ragged, every number of warps."""
    pytest.importorskip("triton")
    for copies, dim in ((1, 5120), (2, 257), (3, 576), (4, 96), (4, 1024), (4, 5120), (8, 5120)):
        assert_compiles(target, tmp_path, copies, dim, dtypes, masked)


@pytest.mark.slow
@pytest.mark.parametrize("target", AHEAD_OF_TIME)
def test_compiles_every_set_of_gradients_ahead_of_time(target, tmp_path):
    pytest.importorskip("triton")
    for number in range(1, 8):
        wanted = tuple(bool(number & bit) for bit in (1, 2, 4))
        assert_compiles(target, tmp_path, 4, 1024, (torch.bfloat16,) * 2, True, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_on_the_gpu(dtype):
    """Forward allocates its output and the statistics; backward the gradients, the factors and the partial sums."""
    tokens, copies, dim = 4096, 4, 5120
    *tensors, grad_out = make_inputs((tokens,), copies, dim, dtype, "cuda")
    leaves = [tensor.requires_grad_() for tensor in tensors]
    engram_gate(*leaves, backend="triton").backward(grad_out)
    grads = sum(leaf.grad.nbytes for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = engram_gate(*leaves, backend="triton")
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + 2**22
    out.backward(grad_out)
    assert torch.cuda.max_memory_allocated() - before <= out.nbytes + grads + 2**24


def test_eager_is_what_runs_on_the_cpu(monkeypatch):
    monkeypatch.delenv("HF_ENGRAM_BACKEND", raising=False)
    calls = []
    monkeypatch.setattr(EagerEngramGate, "apply", lambda x, *args: calls.append(x) or x)
    *tensors, _ = make_inputs((2,), 2, 8)
    tensors[2].requires_grad_()
    engram_gate(*tensors)
    assert len(calls) == 1


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_without_gradients(backend, device, tokens):
    """The same bits as with gradients, which is what lets a checkpointed layer be computed again."""
    *tensors, grad_out = make_inputs((tokens,), 2, 40, device=device)
    mask = torch.arange(tokens, device=device) != 1
    expected, *_ = outcome(engram_gate, tensors, grad_out, mask, backend=backend)
    assert torch.equal(engram_gate(*tensors, mask, backend=backend), expected)
