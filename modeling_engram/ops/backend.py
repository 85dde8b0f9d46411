"""Which implementation an operation runs: the eager one, or its Triton kernels.

Every file in this folder holds one operation: a plain reference that reads like the formula, the eager implementation,
the Triton kernels where there are some, their autograd function, and the function that chooses among them.
"""

import inspect
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


# Optional at run time; the flat copies in Hub folders need the import guarded.
try:
    import triton
except ImportError:
    triton = None


BACKENDS = ("eager", "triton")
# Switches every operation that is not told otherwise by its `backend` argument.
BACKEND_VARIABLE = "HF_ENGRAM_BACKEND"
# Device types whose Triton builds are known; on others, and on CPU without the interpreter, kernels cannot run.
TRITON_DEVICES = ("cuda", "xpu")
# What an operation without kernels gives as the reason.
NO_KERNEL = "it has no kernels in this version"
# Annotations of a kernel's parameters; names, where its module defers them.
ANY_VALUE = (int, float, torch.Tensor, "int", "float", "torch.Tensor")
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """`triton.jit`, or the function as it is where Triton is not installed.

    A kernel's parameters are annotated

    - `tl.constexpr`: compiled for the value;
    - `int`, `float`: a number, compiled for any value. Left to itself, Triton makes a constant of a one, and compiles
      anew for multiples of 16. `torch.compile` makes that constant nevertheless, and it has no `.to`: use `tl.cast`;
    - `torch.Tensor`: one read number by number, compiled for any address. A view may begin anywhere;
    - not at all: a tensor read in rows, compiled for whether its address is a multiple of 16. For the compiler to know
      that all rows begin at one, strides are counted in rows, and the width of a row is a constexpr.
    """
    if triton is None:
        return function
    parameters = inspect.signature(function).parameters.values()
    general = [each.name for each in parameters if each.annotation in ANY_VALUE]
    return triton.jit(function, do_not_specialize=general)


def device_guard(tensor: torch.Tensor) -> AbstractContextManager:
    """Makes the tensor's device the current one, on which Triton launches kernels; nothing to do on CPU."""
    if tensor.device.type == "cpu":
        return nullcontext()
    return torch.get_device_module(tensor.device).device(tensor.device)


def resolve_backend(op: str, backend: str | None, tensor: torch.Tensor, unsupported: str | None = None) -> str:
    """The implementation of `op` to run.

    Args:
        op (`str`): the operation's name, for messages.
        backend (`str`, *optional*): `"eager"` or `"triton"`; None takes the environment variable `HF_ENGRAM_BACKEND`,
            and without it Triton where it can run.
        tensor: an input, for its device.
        unsupported (`str`, *optional*): why the kernels cannot take these inputs, or None if they can.

    Returns:
        `"eager"` or `"triton"`.

    Raises:
        ValueError: unknown backend.
        RuntimeError: Triton was asked for where it cannot run; the message says why.
    """
    source = "`backend`"
    if backend is None:
        backend = os.environ.get(BACKEND_VARIABLE) or None
        source = f"the environment variable {BACKEND_VARIABLE}"
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"{source} must be one of {BACKENDS} (or left out, to choose), got {backend!r}.")
    if backend == "eager":
        return "eager"
    obstacle = unsupported
    if triton is None:
        obstacle = "Triton is not installed"
    elif tensor.device.type not in TRITON_DEVICES and not INTERPRETED:
        obstacle = f"it needs a GPU, and the inputs are on {tensor.device}"
    if obstacle is None and (backend == "triton" or not INTERPRETED):
        return "triton"
    if backend == "triton":
        raise RuntimeError(f"`{op}` cannot run with Triton, which {source} asks for: {obstacle}.")
    return "eager"
