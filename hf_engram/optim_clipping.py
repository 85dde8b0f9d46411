"""Clipping of gradients of which some are sparse, or sharded over processes."""

from collections.abc import Iterable

import torch
from torch import nn

from .table_shards import is_sharded, local_part


# What torch has been taught; a library that is let go takes its functions along.
_LIBRARIES: list[torch.library.Library] = []


def coalesced(grad: torch.Tensor) -> torch.Tensor:
    """A sparse gradient with each row once; sums are made in fp32 at least."""
    if grad.is_coalesced():
        return grad
    return grad.to(torch.promote_types(grad.dtype, torch.float32)).coalesce()


def teach_torch_sparse_norms() -> None:
    """Gives `torch.linalg.vector_norm` the sparse tensors that it lacks (torch 2.13), once in a process.

    With it, `torch.nn.utils.clip_grad_norm_` takes sparse gradients, and so do accelerate and the Trainer, which call
    it at each step and offer no other.
    """
    missing = [
        key
        for key in ("SparseCPU", "SparseCUDA")
        if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_vector_norm", key)
    ]
    if not missing:
        return

    def vector_norm(tensor, ord=2, dim=None, keepdim=False, *, dtype=None):
        if dim is not None or keepdim or ord <= 0:
            raise NotImplementedError("Of a sparse tensor there are norms over all elements, of an order above zero.")
        values = coalesced(tensor).values()
        return torch.linalg.vector_norm(values, ord, dtype=dtype or tensor.dtype)

    library = torch.library.Library("aten", "IMPL")
    for key in missing:
        library.impl("linalg_vector_norm", vector_norm, key)
    _LIBRARIES.append(library)


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` for gradients of which some are sparse; the value is that of dense ones. Of
    gradients that are sharded (FSDP2), the norm is that of all parts, and all processes must call it.

    Sparse gradients stay sparse, and coalesced if they were; of those that were not (after accumulation) the sums of
    the rows count, not what they are sums of.

    Args:
        parameters: a model or parameters; those without a gradient are left out.
        max_norm: gradients are scaled down to this norm if theirs is larger; infinity measures only.
        norm_type: order of the norm, above zero; infinity for the largest absolute value.
        error_if_nonfinite: raise if the norm is NaN or infinite, before anything is scaled.

    Returns:
        The norm before clipping, a scalar.
    """
    if not isinstance(norm_type, (int, float)) or not norm_type > 0:
        raise ValueError(f"`norm_type` must be above zero, got {norm_type!r}.")
    if not isinstance(max_norm, (int, float)) or not max_norm >= 0:
        raise ValueError(f"`max_norm` must be at least zero, got {max_norm!r}.")
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    sparse = [parameter.grad for parameter in parameters if parameter.grad.is_sparse]
    sharded = [parameter.grad for parameter in parameters if is_sharded(parameter.grad)]
    dense = [p for p in parameters if not p.grad.is_sparse and not is_sharded(p.grad)]
    norms = []
    for grad in sparse:
        values = coalesced(grad).values()
        dtype = torch.promote_types(values.dtype, torch.float32)
        norms.append(torch.linalg.vector_norm(values, norm_type, dtype=dtype))
    for mesh in dict.fromkeys(grad.device_mesh for grad in sharded):
        # Over the parts that other processes hold.
        parts = [grad for grad in sharded if grad.device_mesh == mesh]
        norms.append(torch.nn.utils.get_total_norm(parts, norm_type).full_tensor())
    if dense or not norms:
        norms.append(torch.nn.utils.get_total_norm([parameter.grad for parameter in dense], norm_type))
    # Not in the dtype of the gradients, which may be bf16.
    dtype = torch.float64 if any(norm.dtype == torch.float64 for norm in norms) else torch.float32
    total = torch.linalg.vector_norm(torch.stack([norm.to(norms[-1].device, dtype) for norm in norms]), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The gradients' norm is {total.item()}; nothing was clipped. Skip this step (`zero_grad()`), or look for "
            "what made the loss not finite."
        )
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total)
    # As torch does; the mark that a gradient is coalesced would not survive `grad.mul_`.
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for values in [*(grad._values() for grad in sparse), *map(local_part, sharded)]:
        values.mul_(factor.to(values.device))
    return total
