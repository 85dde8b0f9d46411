"""The hash, without kernels and with them, against the formula in tokenization/ and Python's own integers."""

from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import hf_engram.modeling_engram.ops.ngram_hash as hash_module
from hf_engram.modeling_engram.ops.ngram_hash import ngram_hash, ngram_hash_reference
from hf_engram.tokenization.ngram_hashing import DEAD, build_layout, build_multipliers


COMPRESSED, VOCAB = 99092, 129280
AHEAD_OF_TIME = ["sm_80", "sm_90", "sm_100", "gfx942"]
# Bytes of local memory a thread may spill: a register or two, which ptxas parks while it has others to spare.
SPILL_BOUND = 16
# Of the ranges for which the divisions are proved, first and last numbers, primes or not, and the layouts' own.
CPU_PRIMES = (2**13, 8209, 20011, 65537, 16000057, 384006167, 2**31 - 1)
ANY_PRIMES = (2, 3, 5, 97, 8191, *CPU_PRIMES, 2**31 + 11, 2**32, 2**40 - 87, 2**62)
# The fixtures are names here: they need not be made anew for every example.
HYPOTHESIS = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make_layout(max_ngram_size=4, heads=8, rows=16_000_000, layers=(1, 14), device="cpu"):
    """multipliers, primes, offsets."""
    layout = build_layout(len(layers), rows, max_ngram_size, heads)
    multipliers = build_multipliers(layers, COMPRESSED, max_ngram_size)
    return [torch.tensor(array, device=device) for array in (multipliers, layout.primes, layout.offsets)]


def make_inputs(batch, length, max_ngram_size=4, device="cpu", seed=0, dtype=torch.int64):
    """input_ids, token_map, and dead, position_ids, history."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high, *shape):
        return torch.randint(high, shape, generator=generator)

    input_ids, token_map = draw(VOCAB, batch, length).to(dtype), draw(COMPRESSED, VOCAB).int()
    dead = draw(5, batch, length) == 0
    # Documents of any length; some rows continue what was before.
    restarts = (draw(4, batch, length) == 0).int()
    position_ids = torch.arange(length) - torch.cummax(restarts * torch.arange(length), 1).values + draw(2, batch, 1)
    history = draw(COMPRESSED, batch, max_ngram_size - 1)
    kind = draw(4, batch, max_ngram_size - 1)
    history = torch.where(kind == 0, -2 - history, torch.where(kind == 1, DEAD, history))
    return [tensor.to(device) for tensor in (input_ids, token_map, dead, position_ids, history)]


def assert_equals_formula(input_ids, token_map, layout, *options, backend=None, pad_id=7):
    actual = ngram_hash(input_ids, token_map, pad_id, *layout, *options, backend=backend)
    expected = ngram_hash_reference(input_ids, token_map, pad_id, *layout, *options)
    for result, truth in zip(actual, expected, strict=True):
        assert result.dtype == torch.int64
        assert torch.equal(result, truth)
    assert actual[0].is_contiguous()
    return actual


@pytest.fixture(params=["few tokens", "blocks"])
def path(request, backend, monkeypatch):
    """On CPU: NumPy, or blocks, whatever the number of tokens. Kernels have one path."""
    if backend == "triton" and request.param == "blocks":
        pytest.skip("one path")
    monkeypatch.setattr(hash_module, "FEW_TOKENS", 2**40 if request.param == "few tokens" else 0)
    return request.param


def divide(values, primes, backend, device):
    """Remainders [values, primes], each value the only token of a window."""
    token_map = torch.tensor(values, device=device)  # int64, so that a "compressed id" may be any number
    layout = [torch.tensor(numbers, device=device) for numbers in ([[1, 0]], [[primes]], [[[0] * len(primes)]])]
    input_ids = torch.arange(len(values), device=device).unsqueeze(0)
    with mock.patch.object(hash_module, "FEW_TOKENS", 0):
        hash_ids, _ = ngram_hash(input_ids, token_map, 0, *layout, backend=backend)
    return hash_ids[0, :, 0].tolist()


def hard_values(prime):
    """Where a quotient that is off by one, or rounded, shows: multiples, their neighbours, and the ends."""
    last = (2**63 - 1) // prime
    quotients = {0, 1, 2, last // 3, last // 2, last - 1, last, *(2**k for k in range(1, 62, 7) if 2**k <= last)}
    values = {quotient * prime + d for quotient in quotients for d in (-1, 0, 1, prime // 2, prime // 2 + 1)}
    # Some round up to the next power of two in fp64.
    values |= {2**k + d for k in range(50, 64) for d in (-1, 0, -(2 ** max(k - 54, 0)), 1)}
    return sorted(value for value in values if 0 <= value < 2**63)


@pytest.mark.parametrize("prime", ANY_PRIMES)
def test_exact_remainders_in_hard_cases(backend, device, prime):
    values = hard_values(prime)
    assert divide(values, [prime], backend, device) == [[value % prime] for value in values]


@HYPOTHESIS
@given(
    primes=st.lists(st.integers(2, 2**40) | st.integers(2**13, 2**31 - 1), min_size=1, max_size=9),
    values=st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=20),
    quotients=st.lists(st.integers(0, 2**50), max_size=20),
)
def test_exact_remainders(backend, device, primes, values, quotients):
    near = [quotient * prime + d for quotient in quotients for prime in primes for d in (-1, 0, 1)]
    values = values + [value for value in near if 0 <= value < 2**63]
    assert divide(values, primes, backend, device) == [[value % prime for prime in primes] for value in values]


@HYPOTHESIS
@given(
    primes=st.lists(st.integers(2**13, 2**31 - 1) | st.integers(2**13, 2**14), min_size=1, max_size=9),
    values=st.lists(st.integers(2**62, 2**63 - 1) | st.integers(0, 2**63 - 1), min_size=1, max_size=50),
)
@example(primes=list(CPU_PRIMES), values=[value for prime in CPU_PRIMES for value in hard_values(prime)])
def test_exact_remainders_from_reciprocals(primes, values):
    """The blocks on CPU, which these divisors must reach."""
    with mock.patch.object(hash_module, "ngram_hash_reference", side_effect=AssertionError("not in blocks")):
        actual = divide(values, primes, "eager", "cpu")
    assert actual == [[value % prime for prime in primes] for value in values]


@pytest.mark.parametrize("present", ["nothing", "dead", "positions", "history", "all", "positions of one row"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (3, 1), (1, 2), (2, 3), (3, 41), (0, 3), (2, 0)])
def test_any_window(backend, device, path, batch, length, present):
    """Dead tokens, documents and history, alone and together, also where there is less than a window of them."""
    input_ids, token_map, dead, position_ids, history = make_inputs(batch, length, device=device)
    options = {
        "nothing": (None, None, None),
        "dead": (dead, None, None),
        "positions": (None, position_ids, None),
        "history": (None, None, history),
        "all": (dead, position_ids, history),
        "positions of one row": (dead, position_ids[:1] if batch else position_ids, history),
    }
    assert_equals_formula(input_ids, token_map, make_layout(device=device), *options[present], backend=backend)


@pytest.mark.parametrize("rows", [20, 20_000, 16_000_000])
@pytest.mark.parametrize(
    ("layers", "max_ngram_size", "heads"),
    [((1,), 2, 1), ((0, 3, 7), 3, 5), ((1, 14), 4, 8), ((2,), 7, 3), ((4,), 2, 37)],
)
def test_any_layout(backend, device, path, layers, max_ngram_size, heads, rows):
    input_ids, token_map, *options = make_inputs(2, 19, max_ngram_size, device)
    layout = make_layout(max_ngram_size, heads, rows, layers, device)
    assert_equals_formula(input_ids, token_map, layout, *options, backend=backend)


def test_rows_beyond_int32(backend, device, path):
    input_ids, token_map, *options = make_inputs(2, 19, device=device)
    layout = make_layout(rows=2**28, device=device)
    hash_ids, _ = assert_equals_formula(input_ids, token_map, layout, *options, backend=backend)
    assert hash_ids.max() > 2**31


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_inputs_that_are_not_contiguous(backend, device, path, dtype):
    inputs = make_inputs(3, 14, device=device, dtype=dtype)
    token_map = inputs.pop(1)
    turned = [tensor.t().contiguous().t() for tensor in inputs]
    apart = [torch.stack([tensor, tensor], -1)[..., 0] for tensor in inputs]
    halves = [torch.cat([tensor, tensor], 1)[:, tensor.shape[1] :] for tensor in inputs]
    for ids, *options in (turned, apart, halves):
        assert_equals_formula(ids, token_map, make_layout(device=device), *options, backend=backend)
    options = [tensor[:1].expand_as(tensor) for tensor in inputs[1:]]
    assert_equals_formula(
        inputs[0][:1].expand(3, -1), token_map, make_layout(device=device), *options, backend=backend
    )


def test_positions_in_int32(backend, device, path):
    input_ids, token_map, dead, position_ids, history = make_inputs(2, 9, device=device)
    options = (dead, position_ids.int(), history)
    assert_equals_formula(input_ids, token_map, make_layout(device=device), *options, backend=backend)


@pytest.mark.parametrize("pad_id", [0, 1, COMPRESSED - 1])
def test_nothing_negative_is_divided(backend, device, path, pad_id):
    """Where every entry is negative, windows are of pad tokens, or of one token; row ids lie in their ranges."""
    input_ids, token_map, dead, position_ids, _ = make_inputs(2, 30, device=device)
    token_map[:] = COMPRESSED - 1  # the largest products there are
    layout = make_layout(device=device)
    low, high = layout[2].flatten(1), (layout[2] + layout[1]).flatten(1)
    history = torch.full((2, 3), -2 - (COMPRESSED - 1), device=device)
    for options in (
        (torch.ones_like(dead), None, None),
        (None, torch.zeros_like(position_ids), history),
        (dead, torch.zeros_like(position_ids), torch.full_like(history, DEAD)),
        (None, None, history),
    ):
        hash_ids, _ = assert_equals_formula(input_ids, token_map, layout, *options, backend=backend, pad_id=pad_id)
        assert ((hash_ids >= low) & (hash_ids < high)).all()


@pytest.mark.parametrize("pieces", [[1] * 13, [5, 8], [1, 2, 10]], ids=str)
def test_in_pieces(backend, device, path, pieces):
    """The last encoded tokens of a piece are the history of the next."""
    input_ids, token_map, dead, _, history = make_inputs(2, 13, device=device)
    layout = make_layout(device=device)
    position_ids = torch.tensor([[3, 4, 5, 0, 1, 0, 0, 1, 2, 3, 4, 0, 1]], device=device)
    whole, encoded = ngram_hash(input_ids, token_map, 7, *layout, dead, position_ids, history, backend=backend)
    start = 0
    for piece in pieces:
        now = slice(start, start + piece)
        hash_ids, more = ngram_hash(
            input_ids[:, now], token_map, 7, *layout, dead[:, now], position_ids[:, now], history, backend=backend
        )
        assert torch.equal(hash_ids, whole[:, now])
        assert torch.equal(more, encoded[:, now])
        history = torch.cat([history, more], 1)[:, -3:]
        start += piece


@pytest.mark.parametrize("tokens", [1, 2, 3, 6, 7, 50])
def test_last_block_may_be_shorter(monkeypatch, tokens):
    monkeypatch.setattr(hash_module, "FEW_TOKENS", 0)
    monkeypatch.setattr(hash_module, "CPU_BLOCK", 2 * 48)
    monkeypatch.setattr(hash_module, "CPU_BLOCK_THREADS", 1)
    input_ids, token_map, *options = make_inputs(1, tokens)
    assert_equals_formula(input_ids, token_map, make_layout(), *options)


def test_blocks_of_real_size():
    input_ids, token_map, *options = make_inputs(2, 2001)
    assert_equals_formula(input_ids, token_map, make_layout(), *options)


@pytest.mark.parametrize(
    ("tokens", "rows", "chosen"),
    [
        (1, 20_000, "_numpy_hash"),
        (512, 16_000_000, "_numpy_hash"),
        (513, 16_000_000, "_hash_blocks"),
        (513, 2**13, "_hash_blocks"),
        (513, 8000, "ngram_hash_reference"),  # The first primes are too small.
        (513, 2**28, "ngram_hash_reference"),  # Row ids are too large.
    ],
)
def test_which_path_is_taken_on_cpu(monkeypatch, tokens, rows, chosen):
    monkeypatch.delenv("HF_ENGRAM_BACKEND", raising=False)
    calls = []
    for name in ("_numpy_hash", "_hash_blocks", "ngram_hash_reference"):
        monkeypatch.setattr(hash_module, name, lambda *_, name=name: calls.append(name))
    input_ids, token_map, *_ = make_inputs(1, tokens)
    ngram_hash(input_ids, token_map, 7, *make_layout(rows=rows))
    assert calls == [chosen]


def test_inputs_are_left_alone(backend, device, path):
    """Nothing is written to them, and no result is a view of one."""
    inputs = make_inputs(2, 9, device=device)
    layout = make_layout(device=device)
    before = [tensor.clone() for tensor in (*inputs, *layout)]
    input_ids, token_map, *options = inputs
    results = ngram_hash(input_ids, token_map, 7, *layout, *options, backend=backend)
    for result in results:
        result.zero_()
    assert all(torch.equal(a, b) for a, b in zip((*inputs, *layout), before, strict=True))


def test_meta_tensors():
    input_ids, token_map, *options = make_inputs(2, 9, device="meta")
    hash_ids, encoded = ngram_hash(input_ids, token_map, 7, *make_layout(device="meta"), *options)
    assert hash_ids.is_meta
    assert hash_ids.shape == (2, 9, 2, 24)
    assert encoded.shape == (2, 9)


@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("length", [1, 700])
def test_compiles_into_one_graph(compiler, length):
    input_ids, token_map, *options = make_inputs(2, length)
    arguments = (input_ids, token_map, 7, *make_layout(), *options)
    torch._dynamo.reset()
    compiled = torch.compile(ngram_hash, fullgraph=True, backend=compiler)
    for result, truth in zip(compiled(*arguments), ngram_hash(*arguments), strict=True):
        assert torch.equal(result, truth)


@pytest.mark.parametrize("dynamic", [False, True])
def test_kernel_is_traced_into_one_graph(monkeypatch, dynamic):
    """torch.compile takes the one launch into its graph; traced without a GPU."""
    pytest.importorskip("triton")
    from ahead_of_time import absent_device
    from torch._dynamo.backends.common import aot_autograd

    class TracedError(Exception):
        pass

    def stop(graph, inputs):
        launches.extend(node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target))
        raise TracedError

    launches = []
    torch._dynamo.reset()
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(hash_module, "resolve_backend", lambda *args: "triton")
    input_ids, token_map, *options = make_inputs(2, 9)
    compiled = torch.compile(ngram_hash, fullgraph=True, dynamic=dynamic, backend=aot_autograd(fw_compiler=stop))
    with absent_device("sm_90"), pytest.raises(Exception, match="TracedError"):
        compiled(input_ids, token_map, 7, *make_layout(), *options)
    assert len(launches) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"`input_ids` must be \[B, L\].*\(3,\)"),
        ({"multipliers": torch.ones(2, 3, dtype=torch.long)}, r"\[2, 3\].*\[2, 3, 8\].*one layout"),
        ({"offsets": torch.ones(2, 3, 7, dtype=torch.long)}, r"\[2, 3, 8\] and \[2, 3, 7\]"),
        ({"dead": torch.zeros(2, 4, dtype=torch.bool)}, r"`dead` must be bool \[2, 5\].*\[2, 4\]"),
        ({"dead": torch.zeros(2, 5)}, r"`dead` must be bool.*float32"),
        ({"position_ids": torch.zeros(3, 5, dtype=torch.long)}, r"`position_ids`.*\[2 or 1, 5\].*\[3, 5\]"),
        ({"history": torch.zeros(2, 4, dtype=torch.long)}, r"`history` must be int64 \[2, 3\].*\[2, 4\]"),
        ({"history": torch.zeros(2, 3)}, r"`history` must be int64.*float32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_inputs_that_do_not_fit(change, message):
    input_ids, token_map, dead, position_ids, history = make_inputs(2, 5)
    arguments = {"input_ids": input_ids, "token_map": token_map, "pad_id": 7, "dead": dead}
    arguments |= {"position_ids": position_ids, "history": history}
    arguments |= dict(zip(("multipliers", "primes", "offsets"), make_layout(), strict=True))
    with pytest.raises(ValueError, match=message):
        ngram_hash(**{**arguments, **change})


def test_kernel_where_there_is_no_gpu():
    input_ids, token_map, *_ = make_inputs(2, 5)
    with pytest.raises(RuntimeError, match=r"ngram_hash.*(needs a GPU|not installed)"):
        ngram_hash(input_ids, token_map, 7, *make_layout(), backend="triton")


def test_kernel_in_the_interpreter(run_interpreted):
    run_interpreted(__file__)


def assert_compiles(target, tmp_path, max_ngram_size, heads, dtype, *present):
    """One launch for all layers, with no more than SPILL_BOUND spilled."""
    from ahead_of_time import compile_only, resources

    input_ids, token_map, *options = make_inputs(2, 9, max_ngram_size, dtype=dtype)
    options = [
        option if name in present else None for name, option in zip(("dead", "at", "past"), options, strict=True)
    ]
    layout = make_layout(max_ngram_size, heads)
    with compile_only(target) as compiled:
        hash_module.triton_ngram_hash(input_ids, token_map, 7, *layout, *options)
    (kernel,) = compiled
    assert resources(kernel, tmp_path)[1] <= SPILL_BOUND, (target, max_ngram_size, heads, dtype, present)


@pytest.mark.parametrize("target", AHEAD_OF_TIME)
def test_compiles_ahead_of_time(target, tmp_path):
    pytest.importorskip("triton")
    assert_compiles(target, tmp_path, 4, 8, torch.int64, "dead", "at", "past")


@pytest.mark.slow
@pytest.mark.parametrize("target", AHEAD_OF_TIME)
def test_compiles_every_tile_ahead_of_time(target, tmp_path):
    """Every number of heads in a tile, whole and ragged, with and without each option."""
    pytest.importorskip("triton")
    for max_ngram_size, heads in ((2, 1), (3, 2), (3, 4), (4, 5), (4, 8), (8, 16), (3, 32), (3, 33)):
        for dtype, present in (
            (torch.int64, ()),
            (torch.int32, ("dead",)),
            (torch.int64, ("at",)),
            (torch.int64, ("past",)),
            (torch.int64, ("dead", "at", "past")),
        ):
            assert_compiles(target, tmp_path, max_ngram_size, heads, dtype, *present)
