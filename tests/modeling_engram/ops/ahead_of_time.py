"""Compiles Triton kernels for GPUs that are not there: all that a launch would compile, without the launch.

    with compile_only("sm_90") as compiled:
        operation(tensors_on_the_cpu)          # reaches kernel[grid](...), past the dispatch
    assert max(resources(kernel, tmp_path)[1] for kernel in compiled) == 0

The kernels get the very arguments of a real launch, so every specialisation is the one that dispatch would choose.
What they would have written is zero.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from hf_engram.modeling_engram.ops import backend, stream_mixes_kernels


TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
# Where Triton keeps the device's driver: before 3.5 and since.
ACTIVE = "_active" if hasattr(triton.runtime.driver, "_active") else "active"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentDevice:
    """As much of a Triton driver as compilation asks for. A name per device keeps the targets' caches apart."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_target(self) -> GPUTarget:
        return TARGETS[self.name]

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0


def absent_device(name: str) -> AbstractContextManager:
    """Inside, Triton takes the target `name` for the device that is there."""
    return mock.patch.object(triton.runtime.driver, ACTIVE, AbsentDevice(name))


def linker_that_may_be_absent() -> AbstractContextManager:
    """Triton before 3.5 links with ROCm's linker. Where there is none, kernels are assembled, and not linked."""
    amd = backends["amd"].compiler
    places = [os.environ.get("TRITON_HIP_LLD_PATH", ""), "/opt/rocm/llvm/bin/ld.lld", "/usr/bin/ld.lld"]
    if not hasattr(amd, "path_to_rocm_lld") or any(os.path.isfile(place) for place in places):
        return nullcontext()
    return mock.patch.object(amd, "path_to_rocm_lld", staticmethod(lambda: "true"))


class ZeroedMemory(TorchDispatchMode):
    """New tensors hold zeros: row ids that no kernel has written must not lead astray what does run."""

    ZEROED = {
        torch.ops.aten.empty.memory_format: torch.ops.aten.zeros.default,
        torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
        torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.ops.aten.empty.memory_format:
            kwargs.pop("memory_format", None)
        return self.ZEROED.get(func, func)(*args, **kwargs)


@contextmanager
def compile_only(name: str) -> Iterator[list]:
    """Kernels launched inside are compiled for the target `name` and not run; yields the list of compiled kernels."""
    compiled = []
    run = JITFunction.run

    def compile_instead(self, *args, grid, warmup, **kwargs):
        compiled.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return compiled[-1]

    with (
        mock.patch.object(JITFunction, "run", compile_instead),
        linker_that_may_be_absent(),
        absent_device(name),
        ZeroedMemory(),
    ):
        yield compiled


@contextmanager
def dispatch_compiled(name: str) -> Iterator[list]:
    """`compile_only`, of what operations launch by themselves, as they do on a GPU, for tensors on the CPU."""
    precision = "ieee" if name.startswith("gfx") else "tf32x3"
    with (
        mock.patch.object(backend, "TRITON_DEVICES", ("cpu",)),
        mock.patch.object(stream_mixes_kernels, "dot_precision", lambda device: precision),
        compile_only(name) as compiled,
    ):
        yield compiled


def spill_bound(target: str, copies: int = 1) -> int:
    """Bytes of local memory that a thread may spill.

    A register or two, which ptxas parks while it has others to spare; and on NVIDIA, with eight copies, some of the
    128 x 32 sums of a program of `project_backward_kernel` (264 bytes at most, in fp32 on sm_80; none with columns by
    16, but then rows are read in pieces of 32 bytes).
    """
    return 264 if copies == 8 and target.startswith("sm_") else 16


def resources(kernel, tmp_path: Path) -> tuple[int, int]:
    """Registers of a thread, and bytes of local memory that it spills to (AMD: spilled vector registers times 4)."""
    if "amdgcn" in kernel.asm:
        registers, spilled = (
            int(re.search(rf"\.{name}:\s+(\d+)", kernel.asm["amdgcn"])[1])
            for name in ("vgpr_count", "vgpr_spill_count")
        )
        return registers, spilled * 4
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    report = subprocess.run(
        [CUOBJDUMP, "--dump-resource-usage", cubin], capture_output=True, text=True, timeout=600, check=True
    ).stdout
    registers, stack, local = (int(re.search(rf"\b{name}:(\d+)", report)[1]) for name in ("REG", "STACK", "LOCAL"))
    return registers, stack + local
