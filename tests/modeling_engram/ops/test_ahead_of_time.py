"""The kernels that a model launches, compiled for GPUs that are not there: all of them, and none twice."""

import sys
from collections import Counter
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch

from hf_engram import EngramConfig, EngramForCausalLM
from hf_engram.optim import EngramOptimizer


pytest.importorskip("triton")

from ahead_of_time import TARGETS, dispatch_compiled, resources, spill_bound
from triton.runtime.jit import JITFunction


TOKENS = (1, 2, 3, 16, 257)
# Kernels that come in more than one kind, and what tells the kinds apart.
KINDS = {
    # With a history of tokens before, and without: a decode step, and a prompt.
    "_hash_kernel": 2,
    # Sums in the table's dtype, and those of pieces of a long run, in fp32.
    "_sum_runs_kernel": 2,
}


def make_model(copies: int, dtype: torch.dtype = torch.bfloat16) -> EngramForCausalLM:
    config = EngramConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        hc_mult=copies,
        engram_layer_ids=[0, 1],
        engram_vocab_size=101,
        engram_head_dim=16,
    )
    model = EngramForCausalLM(config).to(dtype)
    model.model.engram_memory.sparse_grad = True
    return model


def masks(batch: int, tokens: int) -> dict[str, dict[str, torch.Tensor]]:
    """What a forward may be given beside its ids."""
    positions = torch.arange(tokens).expand(batch, -1)
    padding = (positions >= tokens // 2).long()
    packed = torch.where(positions < tokens // 2, positions, positions - tokens // 2)
    return {"none": {}, "padding": {"attention_mask": padding}, "packed": {"position_ids": packed}}


@torch.no_grad()
def generate(model: EngramForCausalLM, batch: int, tokens: int, **options: torch.Tensor) -> None:
    """A prompt, and two decode steps."""
    ids = torch.zeros(batch, tokens, dtype=torch.long)
    cache = model(ids, use_cache=True, **options).cache
    for _ in range(2):
        if "attention_mask" in options:
            seen = options["attention_mask"]
            options["attention_mask"] = torch.cat([seen, seen.new_ones(batch, 1)], dim=1)
        if "position_ids" in options:
            options["position_ids"] = options["position_ids"][:, -1:] + 1
        model(ids[:, -1:], cache=cache, use_cache=True, **options)


def train(model: EngramForCausalLM, tokens: int, **options: torch.Tensor) -> None:
    """A step of training, down to the tables' rows."""
    optimizer = EngramOptimizer(model, lr=1e-3)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    logits = model(ids, **options).logits
    # Not the loss: of one token there is none.
    logits.backward(torch.ones_like(logits))
    optimizer.step()
    optimizer.zero_grad()


def our_modules() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith("hf_engram.") and module]


def count(compiled: list) -> Counter:
    """Different kernels of each name."""
    return Counter(kernel.metadata.name for kernel in {kernel.hash: kernel for kernel in compiled}.values())


def specialised_numbers(kernel) -> list[str]:
    """Numbers among the arguments of a launch that the kernel was compiled for."""
    names = []
    for index, param in enumerate(kernel.src.fn.params):
        kind = kernel.src.signature[param.name]
        if param.is_constexpr or kind.startswith("*"):
            continue
        is_one = kind == "constexpr" and kernel.src.constants[(index,)] is not None
        if is_one or (kind != "constexpr" and not param.do_not_specialize):
            names.append(param.name)
    return names


def test_one_kernel_for_all_lengths():
    """A typical run: prompts of 1 to 300 tokens, alone and three at a time, decode steps, and steps of training."""
    model = make_model(4).eval()
    with dispatch_compiled("sm_90") as compiled:
        for batch in (1, 3):
            for tokens in (1, 2, 3, 15, 16, 17, 64, 100, 128, 255, 256, 257, 300):
                generate(model, batch, tokens)
        for tokens in TOKENS:
            train(model, tokens)
    counts = count(compiled)
    # Hash and gather; the gate's three, the sums and the row updates; eight of the stream.
    assert len(counts) == 2 + 5 + 8
    assert counts == {name: KINDS.get(name, 1) for name in counts}
    assert not any(specialised_numbers(kernel) for kernel in compiled)


def test_every_launch_is_on_its_tensors_device(monkeypatch):
    """Backward and the optimizer, too, may be called while another device is the current one."""
    guarded = []

    @contextmanager
    def guard(tensor):
        guarded.append(tensor)
        yield
        guarded.pop()

    def run(kernel, *args, **kwargs):
        launched.append(kernel.__name__)
        assert guarded, f"{kernel.__name__} is launched on the device that happens to be the current one"
        return run_kernel(kernel, *args, **kwargs)

    launched, run_kernel = [], JITFunction.run
    monkeypatch.setattr(JITFunction, "run", run)
    for module in our_modules():
        if hasattr(module, "device_guard"):
            monkeypatch.setattr(module, "device_guard", guard)
    model = make_model(4)
    with dispatch_compiled("sm_90"):
        train(model, 3)
    assert len(set(launched)) == 2 + 5 + 8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("copies", [1, 2, 4, 8])
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target, copies, dtype, tmp_path):
    """Forward, backward, decode step and optimizer step, for every number of tokens and every mask."""
    counts = {}
    for mask in masks(1, 2):
        model = make_model(copies, dtype)
        with dispatch_compiled(target) as compiled:
            for tokens in TOKENS:
                train(model, tokens, **masks(1, tokens)[mask])
                for batch in (1, 2):
                    generate(model, batch, tokens, **masks(batch, tokens)[mask])
        counts[mask] = count(compiled)
        # A stream of one copy is a plain residual, and needs none of the stream's kernels.
        assert len(counts[mask]) == 2 + 5 + (8 if copies > 1 else 0)
        for kernel in {kernel.hash: kernel for kernel in compiled}.values():
            _, spilled = resources(kernel, tmp_path)
            assert spilled <= spill_bound(target, copies), kernel.metadata.name
    # In fp32 the sums of pieces are those of whole runs.
    kinds = {**KINDS, "_sum_runs_kernel": 1} if dtype == torch.float32 else KINDS
    assert counts["none"] == {name: kinds.get(name, 1) for name in counts["none"]}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_ones_may_be_constants(target, monkeypatch):
    """As torch.compile makes them, whatever a kernel asks of Triton."""
    launchable = [
        (module, name, value)
        for module in our_modules()
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    ]
    assert len({value for _, _, value in launchable}) == 2 + 5 + 8 + 3
    for module, name, value in launchable:
        monkeypatch.setattr(module, name, JITFunction(value.fn))
    model = make_model(4)
    with dispatch_compiled(target) as compiled:
        train(model, 1)
        generate(model.eval(), 1, 1)
    assert any(specialised_numbers(kernel) for kernel in compiled)
