"""Work on the residual stream block by block, so that what a block needs stays in the cache."""

from collections.abc import Iterator
from itertools import repeat

import torch


# fp32 bytes of the stream in a block: what fits a core's L2 cache, and, elsewhere, a bound on the fp32 copies.
CPU_BLOCK_BYTES = 2**20
DEVICE_BLOCK_BYTES = 2**26


def token_blocks(stream: torch.Tensor, *others: torch.Tensor | None) -> Iterator[tuple[torch.Tensor | None, ...]]:
    """Blocks of tokens: views of the stream `[T, H, D]` and of the other tensors `[T, ...]` (None stays None)."""
    block_bytes = CPU_BLOCK_BYTES if stream.device.type == "cpu" else DEVICE_BLOCK_BYTES
    tokens, copies, dim = stream.shape
    size = max(1, block_bytes // (4 * max(1, copies * dim)))
    if tokens <= size:
        # The decode step comes here, where every view costs as much as a product.
        yield stream, *others
        return
    yield from zip(
        stream.split(size), *(repeat(None) if other is None else other.split(size) for other in others), strict=False
    )


def as_rows(stream: torch.Tensor) -> torch.Tensor:
    """A stream `[T, H, D]` whose tokens and copies are rows of D, in memory whole rows apart (or none: copies that are
    one in memory stay one), which is how the kernels count."""
    dim = stream.shape[2]
    is_rows = stream.stride(2) == 1 and stream.stride(1) in (0, dim) and stream.stride(0) % dim == 0
    return stream if is_rows else stream.contiguous()


def row_strides(stream: torch.Tensor) -> tuple[int, int]:
    """Of what `as_rows` gives: rows from token to token, and from copy to copy."""
    return stream.stride(0) // stream.shape[2], stream.stride(1) // stream.shape[2]


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd must record an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
