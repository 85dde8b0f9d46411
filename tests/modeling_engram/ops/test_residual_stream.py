"""The residual stream's operations against their formulas in fp64: outputs, all gradients, both implementations."""

import os

import pytest
import torch

from hf_engram.modeling_engram.ops import (
    residual_stream,
    stream_mixes,
    stream_mixes_kernels,
    stream_update,
    stream_update_kernels,
    token_blocks,
)


NORM_EPS, HC_EPS = 1e-6, 1e-6
# Batch, length, copies, width: every number of copies, widths that are no power of two, one token, none.
SHAPES = [
    (1, 5, 1, 96),
    (2, 3, 2, 33),
    (1, 37, 3, 65),
    (2, 5, 4, 96),
    (1, 1, 4, 257),
    (1, 7, 5, 7),
    (1, 3, 6, 40),
    (3, 1, 7, 17),
    (1, 4, 8, 576),
    (2, 2, 2, 1),
    (0, 4, 4, 8),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
# Rounds of Sinkhorn, whose backward is quadratic in them in the kernels; the interpreter takes milliseconds for each.
ITERS = 4 if os.environ.get("TRITON_INTERPRET") == "1" else 20


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def to(device: str, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """In fp32 on the device."""
    return [value.to(device, torch.float32) for value in values]


def mixes_inputs(batch: int, length: int, copies: int, dim: int) -> list[torch.Tensor]:
    """Stream, fn, scale, base."""
    mixes = (2 + copies) * copies
    return [
        draw(batch, length, copies, dim, seed=0),
        draw(mixes, copies * dim, seed=1, scale=(copies * dim) ** -0.5),
        draw(3, seed=2),
        draw(mixes, seed=3),
    ]


def update_inputs(batch: int, length: int, copies: int, dim: int) -> list[torch.Tensor]:
    """Sublayer output, stream, post, comb, pre."""
    lead = batch, length
    return [
        draw(*lead, dim, seed=4),
        draw(*lead, copies, dim, seed=5),
        draw(*lead, copies, seed=6),
        draw(*lead, copies, copies, seed=7),
        draw(*lead, copies, seed=8),
    ]


def plain_update(y, stream, post, comb, pre):
    out = stream_update.plain_stream_expand(y, stream, post, comb)
    return out, stream_update.plain_stream_collapse(out, pre)


def run(function, inputs, seed: int = 10) -> list[torch.Tensor]:
    """Outputs, and the gradients of all inputs for random gradients of the outputs (the same for every dtype)."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    grads = [draw(*out.shape, seed=seed + i).to(out.device, out.dtype) for i, out in enumerate(outputs)]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, leaves, grads)]


def assert_close(actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    """Every largest difference within `tolerance` of the largest expected value."""
    for index, (ours, exact) in enumerate(zip(actual, expected, strict=True)):
        assert ours.shape == exact.shape
        assert torch.isfinite(ours).all(), index
        if exact.numel():
            error = (ours.double() - exact.double()).abs().max()
            bound = tolerance * exact.double().abs().max() + torch.finfo(torch.float32).tiny * (tolerance > 1e-12)
            assert error <= bound, (index, error.item())


def check_mixes(op, inputs, iters=ITERS, **kwargs):
    """`op` on the inputs as they are, and the formula in fp64 on the same values."""
    constants = NORM_EPS, HC_EPS, iters
    expected = run(lambda *args: stream_mixes.plain_stream_mixes(*args, *constants), [v.double() for v in inputs])
    actual = run(lambda *args: op(*args, *constants, **kwargs), inputs)
    wide = torch.float64 if inputs[0].dtype == torch.float64 else torch.float32
    assert all(out.dtype == wide for out in actual[:3])
    # Only the stream's gradient is rounded to the stream's dtype.
    assert actual[3].dtype == inputs[0].dtype
    assert_close(actual[3:4], expected[3:4], TOLERANCE[inputs[0].dtype])
    assert_close(actual[:3] + actual[4:], expected[:3] + expected[4:], TOLERANCE[wide])


def check_update(op, inputs, **kwargs):
    expected = run(plain_update, [value.double() for value in inputs])
    actual = run(lambda *args: op(*args, **kwargs), inputs)
    assert_close(actual, expected, TOLERANCE[inputs[0].dtype])
    for ours, value in zip(actual[2:], inputs, strict=True):
        assert ours.dtype == value.dtype


# Against the formulas


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mixes(backend, device, shape):
    check_mixes(residual_stream.stream_mixes, to(device, mixes_inputs(*shape)), backend=backend)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_update(backend, device, shape):
    check_update(residual_stream.stream_update, to(device, update_inputs(*shape)), backend=backend)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eager_in_fp64(shape):
    check_mixes(residual_stream.stream_mixes, mixes_inputs(*shape), backend="eager")
    check_update(residual_stream.stream_update, update_inputs(*shape), backend="eager")


@pytest.mark.parametrize("iters", [1, 2, 20])
def test_sinkhorn_rounds(backend, device, iters):
    inputs = to(device, mixes_inputs(1, 3, 4, 16))
    check_mixes(residual_stream.stream_mixes, inputs, iters=iters, backend=backend)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_streams(backend, device, dtype):
    """fp32 inside whatever the stream's dtype; parameters and mixing weights stay fp32."""
    stream, *parameters = to(device, mixes_inputs(1, 6, 4, 96))
    check_mixes(residual_stream.stream_mixes, [stream.to(dtype), *parameters], backend=backend)
    y, stream, *mixes = to(device, update_inputs(1, 6, 4, 96))
    inputs = [y.to(dtype), stream.to(dtype), *mixes]
    check_update(residual_stream.stream_update, inputs, backend=backend)


def test_wide_sublayer_output_in_narrow_stream(backend, device):
    """A sublayer's output may have another dtype than the stream, as under autocast."""
    y, stream, *mixes = to(device, update_inputs(1, 5, 4, 32))
    for y_dtype, dtype in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        inputs = [y.to(y_dtype), stream.to(dtype), *mixes]
        expected = run(plain_update, [value.double() for value in inputs])
        actual = run(lambda *args: residual_stream.stream_update(*args, backend=backend), inputs)
        assert actual[0].dtype == actual[1].dtype == dtype
        assert actual[2].dtype == y_dtype
        assert_close(actual, expected, 2**-6)


def test_halves_and_whole_agree(backend, device):
    """The single pass is expand, then collapse, bit for bit but for the order of sums."""
    y, stream, post, comb, pre = to(device, update_inputs(2, 3, 4, 96))
    out, collapsed = residual_stream.stream_update(y, stream, post, comb, pre, backend=backend)
    assert_close([out], [residual_stream.stream_expand(y, stream, post, comb, backend=backend)], 1e-6)
    assert_close([collapsed], [residual_stream.stream_collapse(out, pre, backend=backend)], 1e-6)

    run_expand = run(lambda *args: residual_stream.stream_expand(*args, backend=backend), [y, stream, post, comb])
    exact = run(stream_update.plain_stream_expand, [v.double() for v in (y, stream, post, comb)])
    assert_close(run_expand, exact, 1e-5)
    run_collapse = run(lambda *args: residual_stream.stream_collapse(*args, backend=backend), [stream, pre])
    assert_close(run_collapse, run(stream_update.plain_stream_collapse, [stream.double(), pre.double()]), 1e-5)


def test_gradcheck():
    """The backward written by hand against finite differences, in fp64."""
    inputs = [value.requires_grad_() for value in mixes_inputs(1, 2, 3, 4)]
    assert torch.autograd.gradcheck(lambda *args: residual_stream.stream_mixes(*args, NORM_EPS, HC_EPS, 5), inputs)
    inputs = [value.requires_grad_() for value in update_inputs(1, 2, 3, 4)]
    assert torch.autograd.gradcheck(residual_stream.stream_update, inputs)
    y, stream, post, comb, pre = inputs
    assert torch.autograd.gradcheck(residual_stream.stream_expand, (y, stream, post, comb))
    assert torch.autograd.gradcheck(residual_stream.stream_collapse, (stream, pre))


# Unusual values


VALUES = {
    "zeros": lambda x: 0 * x.abs(),
    "negative zeros": lambda x: -0.0 * x.abs(),
    "large": lambda x: 1e4 * x,
    "denormal": lambda x: 1e-40 * x,
}


@pytest.mark.parametrize("name", VALUES)
def test_extreme_streams(backend, device, name):
    stream, *parameters = to(device, mixes_inputs(1, 5, 4, 48))
    check_mixes(residual_stream.stream_mixes, [VALUES[name](stream), *parameters], backend=backend)
    if name != "denormal":
        y, stream, *others = to(device, update_inputs(1, 5, 4, 48))
        inputs = [VALUES[name](y), VALUES[name](stream), *others]
        expected = run(plain_update, [value.double() for value in inputs])
        actual = run(lambda *args: residual_stream.stream_update(*args, backend=backend), inputs)
        assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("copies", [3, 4, 8])
def test_sharp_mixing_matrices(backend, device, copies):
    """Copies that all prefer one copy, and softmaxes with nothing but one entry: Sinkhorn far from done."""
    stream, fn, scale, base = to(device, mixes_inputs(1, 4, copies, 32))
    prefer_first = torch.where(torch.arange(len(base), device=device) % copies == 0, 20.0, 0.0)
    check_mixes(residual_stream.stream_mixes, [stream, fn, scale, prefer_first], backend=backend)
    check_mixes(residual_stream.stream_mixes, [stream, fn, 8 * scale, base], backend=backend)


def test_one_token_is_as_exact():
    """The decode step's own arithmetic gives what a longer forward gives, to fp32 rounding."""
    stream, *parameters = (value.float() for value in mixes_inputs(1, 40, 4, 64))
    parameters[1] *= 4
    constants = NORM_EPS, HC_EPS, 20
    with torch.no_grad():
        exact = stream_mixes.plain_stream_mixes(stream.double(), *(p.double() for p in parameters), *constants)
        for t in range(stream.shape[1]):
            one = residual_stream.stream_mixes(stream[:, t : t + 1], *parameters, *constants, backend="eager")
            assert all(part.dtype == torch.float32 for part in one)
            assert_close(list(one), [part[:, t : t + 1] for part in exact], 1e-6)
        extreme = [stream[:, :1], 1e4 * parameters[0], *parameters[1:]]
        assert all(torch.isfinite(part).all() for part in residual_stream.stream_mixes(*extreme, *constants))


# Layouts, blocks, autograd


LAYOUTS = {
    "expanded": lambda x: x[:, :, :1].expand_as(x),
    "copies first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "length first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "strided width": lambda x: torch.stack([x, -x], dim=-1)[..., 0],
}


@pytest.mark.parametrize("tokens", [2, 40])
def test_same_bits_without_gradients(backend, device, tokens):
    """What lets a checkpointed layer, run once without and once with gradients, be computed again.

    A single token is left out: `mix_one_token` cannot record gradients.
    """
    for inputs, function in (
        (mixes_inputs(1, tokens, 4, 24), lambda *v: stream_mixes.stream_mixes(*v, NORM_EPS, HC_EPS, ITERS, backend)),
        (update_inputs(1, tokens, 4, 24), lambda *v: stream_update.stream_update(*v, backend)),
    ):
        inputs = to(device, inputs)
        expected = function(*(value.requires_grad_() for value in inputs))
        with torch.no_grad():
            actual = function(*inputs)
        assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(backend, device, layout):
    """Any strides; the first layer's stream is one embedding expanded."""
    stream, *parameters = to(device, mixes_inputs(2, 3, 4, 33))
    stream = LAYOUTS[layout](stream)
    check_mixes(residual_stream.stream_mixes, [stream, *parameters], backend=backend)
    y, _, *others = to(device, update_inputs(2, 3, 4, 33))
    y, others[0] = (torch.stack([value, value], dim=-1)[..., 1] for value in (y, others[0]))
    others[1] = others[1].transpose(-1, -2).contiguous().transpose(-1, -2)
    check_update(residual_stream.stream_update, [y, stream, *others], backend=backend)


def test_blocks_of_tokens(monkeypatch):
    """Many blocks, the last one shorter."""
    monkeypatch.setattr(token_blocks, "CPU_BLOCK_BYTES", 4 * 4 * 24 * 4)
    for dtype in (torch.float32, torch.bfloat16):
        stream, *parameters = (value.float() for value in mixes_inputs(1, 11, 4, 24))
        check_mixes(residual_stream.stream_mixes, [stream.to(dtype), *parameters], backend="eager")
        y, stream, *mixes = (value.float() for value in update_inputs(1, 11, 4, 24))
        inputs = [y.to(dtype), stream.to(dtype), *mixes]
        check_update(residual_stream.stream_update, inputs, backend="eager")


def test_some_outputs_used(backend, device):
    """The last layer's stream is not used, only its collapsed vector; and mixes may be used in part."""
    inputs = to(device, update_inputs(1, 3, 4, 16))
    for index in range(2):
        leaves = [value.clone().requires_grad_() for value in inputs]
        outputs = residual_stream.stream_update(*leaves, backend=backend)
        grads = torch.autograd.grad(outputs[index].sum(), leaves[:2])
        exact_leaves = [value.double().requires_grad_() for value in inputs]
        exact = torch.autograd.grad(plain_update(*exact_leaves)[index].sum(), exact_leaves[:2])
        assert_close(list(grads), list(exact), 1e-5)
    inputs = [value.requires_grad_() for value in to(device, mixes_inputs(1, 3, 4, 16))]
    pre, _, _ = residual_stream.stream_mixes(*inputs, NORM_EPS, HC_EPS, ITERS, backend=backend)
    (grad,) = torch.autograd.grad(pre.sum(), inputs[0])
    assert torch.isfinite(grad).all() and grad.abs().max() > 0


def test_nothing_of_sinkhorn_is_kept():
    """Backward holds on to the stream, the parameters and a few numbers a token."""
    kept = []
    inputs = [value.float().requires_grad_() for value in mixes_inputs(1, 50, 4, 64)]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        residual_stream.stream_mixes(*inputs, NORM_EPS, HC_EPS, 20, backend="eager")
    own = {value.data_ptr() for value in inputs}
    new = {tensor.data_ptr(): tensor.numel() for tensor in kept if tensor.data_ptr() not in own}
    assert sum(new.values()) <= 50 * (24 + 1)


def test_autocast_is_off():
    """Products stay fp32 under autocast, in backward, too."""
    inputs = [value.float() for value in mixes_inputs(1, 6, 4, 32)]
    constants = NORM_EPS, HC_EPS, 20
    expected = run(lambda *args: residual_stream.stream_mixes(*args, *constants), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(lambda *args: residual_stream.stream_mixes(*args, *constants), inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    inputs = [value.float() for value in update_inputs(1, 6, 4, 32)]
    expected = run(residual_stream.stream_update, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(residual_stream.stream_update, inputs)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow
def test_compiles_without_graph_breaks():
    """torch.compile(fullgraph=True), forward and backward, gives the eager numbers."""

    def sublayer(stream, y, fn, scale, base):
        pre, post, comb = residual_stream.stream_mixes(stream, fn, scale, base, NORM_EPS, HC_EPS, 20)
        return residual_stream.stream_update(y, stream, post, comb, pre)

    stream, *parameters = (value.float() for value in mixes_inputs(2, 5, 4, 32))
    y, *_ = (value.float() for value in update_inputs(2, 5, 4, 32))
    inputs = [stream, y, *parameters]
    assert_close(run(torch.compile(sublayer, fullgraph=True), inputs), run(sublayer, inputs), 1e-5)


# Dispatch


def test_dispatch(monkeypatch):
    """fp64 and more than 8 copies are not for the kernels, and asking for them says so."""
    stream, *parameters = mixes_inputs(1, 2, 2, 8)
    for dtype in (torch.float64, torch.float32):
        with pytest.raises(RuntimeError, match="stream_mixes"):
            residual_stream.stream_mixes(stream.to(dtype), *parameters, NORM_EPS, HC_EPS, 2, backend="triton")
    assert "float64" in stream_mixes.unsupported(stream)
    assert "9 copies" in stream_mixes.unsupported(torch.zeros(1, 1, 9, 4))
    assert stream_mixes.unsupported(torch.zeros(1, 1, 8, 4, dtype=torch.bfloat16)) is None


def test_kernels_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


# Ahead of time: every kernel compiles for GPUs that are not there, and keeps its values in registers

# Copies, width, dtype.
COMPILED = [
    (4, 96, torch.bfloat16),
    (4, 5120, torch.bfloat16),
    (1, 257, torch.float16),
    (3, 576, torch.float32),
    (8, 5120, torch.bfloat16),
]


@pytest.mark.parametrize(
    ("target", "copies", "dim", "dtype"),
    [
        pytest.param(target, *case, marks=[pytest.mark.slow] if (target, case) != ("sm_90", COMPILED[0]) else [])
        for target in ("sm_80", "sm_90", "sm_100", "gfx942")
        for case in COMPILED
    ],
)
def test_kernels_compile(tmp_path, target, copies, dim, dtype):
    pytest.importorskip("triton")
    from ahead_of_time import dispatch_compiled, resources, spill_bound

    stream, *parameters = (value.float() for value in mixes_inputs(1, 3, copies, dim))
    y, _, post, comb, pre = (value.float()[0] for value in update_inputs(1, 3, copies, dim))
    stream, y = stream[0].to(dtype), y.to(dtype)
    leaves = [value.requires_grad_() for value in (stream, y, post, comb, pre, *parameters)]
    stream, y, post, comb, pre, *parameters = leaves
    with dispatch_compiled(target) as kernels:
        mixes = stream_mixes_kernels.TritonStreamMixes.apply(stream, *parameters, NORM_EPS, HC_EPS, 20)
        torch.autograd.grad(mixes, leaves[0], mixes)
        for weights in (pre, None):
            outputs = stream_update_kernels.TritonStreamUpdate.apply(y, stream, post, comb, weights)
            outputs = [out for out in outputs if out is not None]
            torch.autograd.grad(outputs, leaves[0], outputs)
        collapsed = stream_update_kernels.TritonStreamCollapse.apply(stream, pre)
        torch.autograd.grad(collapsed, leaves[0], collapsed)
    assert len(kernels) == 10
    for kernel in kernels:
        _, spilled = resources(kernel, tmp_path)
        assert spilled <= spill_bound(target, copies), kernel.metadata.name


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(2, 700, 4, 1024), (1, 300, 8, 576), (1, 64, 4, 5120)], ids=str)
def test_large_on_gpu(shape, dtype):
    """Many tokens and real widths, against the formulas in fp64."""
    stream, *parameters = (value.float().cuda() for value in mixes_inputs(*shape))
    check_mixes(residual_stream.stream_mixes, [stream.to(dtype), *parameters], backend="triton")
    y, stream, *mixes = (value.float().cuda() for value in update_inputs(*shape))
    inputs = [y.to(dtype), stream.to(dtype), *mixes]
    check_update(residual_stream.stream_update, inputs, backend="triton")


@pytest.mark.gpu
def test_same_bits_every_time_on_gpu():
    stream, *parameters = (value.float().cuda() for value in mixes_inputs(1, 999, 4, 512))
    inputs = [value.float().cuda() for value in update_inputs(1, 999, 4, 512)]
    for function, arguments in (
        (lambda *args: residual_stream.stream_mixes(*args, NORM_EPS, HC_EPS, 20), [stream, *parameters]),
        (residual_stream.stream_update, inputs),
    ):
        first, second = run(function, arguments), run(function, arguments)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
def test_memory_on_gpu():
    """Beyond its outputs the single pass takes nothing, and the mixes take less than a tenth of the stream."""
    stream, *parameters = (value.float().cuda() for value in mixes_inputs(1, 4096, 4, 1024))
    y, _, post, comb, pre = (value.float().cuda() for value in update_inputs(1, 4096, 4, 1024))
    stream, y = stream.bfloat16(), y.bfloat16()
    size = stream.numel() * 2
    with torch.no_grad():
        for function, outputs in (
            (lambda: residual_stream.stream_update(y, stream, post, comb, pre), size + y.numel() * 2),
            (lambda: residual_stream.stream_mixes(stream, *parameters, NORM_EPS, HC_EPS, 20), 0),
        ):
            function()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            result = function()
            assert torch.cuda.max_memory_allocated() - before <= outputs + 0.1 * size
            del result


@pytest.mark.parametrize("name", ["hidden_states", "post", "comb", "pre"])
def test_shapes_are_checked(name):
    """Batch and length the wrong way round are as many numbers, and would be read in another order."""
    names = ["hidden_states", "stream", "post", "comb", "pre"]
    inputs = dict(zip(names, update_inputs(2, 3, 4, 8), strict=True))
    inputs[name] = inputs[name].transpose(0, 1)
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        residual_stream.stream_update(**inputs)
    stream, fn, scale, base = mixes_inputs(2, 3, 4, 8)
    with pytest.raises(ValueError, match="fn must be"):
        residual_stream.stream_mixes(stream, fn.t(), scale, base, NORM_EPS, HC_EPS, ITERS)
