"""One Engram table, wherever it lives: beside the model, in host memory, or on disk; float or fp8."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .ops.gather_rows import SCALE_DTYPE, TABLE_DTYPE, gather_rows
from .table_storage import CHUNK_BYTES, DiskTable, TensorEntry, open_table


# The largest number of e4m3.
FP8_MAX = 448.0


def host_empty(rows: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Host memory for a table; pinned where an accelerator may read it."""
    return torch.empty(rows, dim, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())


def host_copy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy in host memory."""
    return host_empty(*tensor.shape, dtype or tensor.dtype).copy_(tensor.detach())


class EngramTable(nn.Embedding):
    """A table `[rows, dim]`, and for a quantised one, its scales.

    As `nn.Embedding`, but it may hold no weight: on disk, the table is no part of the state dict, nor of anything
    that moves, casts or initialises weights. In host memory it stays where it is and as it is, whatever `.to()` or
    `.half()` do to the model. A quantised table stays so, and takes no gradient.

    Args:
        rows, dim (`int`): the table's shape.
        placement (`str`): `"device"`, `"cpu"` or `"disk"`.

    Attributes:
        sparse (`bool`): whether the weight gets sparse gradients; by this, DDP knows which gradients to expect.
        weight (`nn.Parameter`, *optional*): `[rows, dim]`, float, or float8_e4m3fn; None on disk.
        scale (`nn.Parameter`, *optional*): float8_e8m0fnu `[rows, dim / block]` for a weight of float8_e4m3fn.
        disk ([`DiskTable`], *optional*): the open file of a table on disk.
        source (`tuple[TensorEntry, ...]`, *optional*): where weight and scale were loaded from or saved to.
        pending (*optional*): while the model is loaded, weight and scale as the checkpoint has them, and the dtype
            that float tables are loaded in.
    """

    def __init__(self, rows: int, dim: int, placement: str = "device") -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = rows, dim
        self.padding_idx = self.max_norm = None
        self.norm_type, self.scale_grad_by_freq, self.sparse = 2.0, False, False
        self.placement = placement
        self.disk: DiskTable | None = None
        self.source: tuple[TensorEntry, ...] | None = None
        self.pending: tuple[list[TensorEntry | torch.Tensor], torch.dtype] | None = None
        self.register_parameter("weight", None)
        self.register_parameter("scale", None)
        # On the meta device, `from_pretrained` is at work: what it should neither place nor load is added afterwards.
        if placement == "device" or (placement == "cpu" and not torch.empty(0).is_meta):
            self.weight = nn.Parameter(torch.empty(rows, dim))
            self.reset_parameters()

    @property
    def is_quantised(self) -> bool:
        holder = self.disk if self.weight is None else self.weight
        return holder is not None and holder.dtype == TABLE_DTYPE

    @property
    def is_float_parameter(self) -> bool:
        """Whether the weight is in memory and can be initialised and trained."""
        return self.weight is not None and self.weight.dtype != TABLE_DTYPE

    def extra_repr(self) -> str:
        kind = "no table yet" if self.weight is None and self.disk is None else "fp8" if self.is_quantised else "float"
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.placement}, {kind}"

    def forward(self, row_ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Rows of a table in memory, see `gather_rows`: row ids `[..., C]` to `[..., C * dim]`.

        Called as a module, so that accelerate's hooks can bring a weight that they have offloaded.
        """
        return gather_rows(self.weight, row_ids, self.scale, dtype, sparse_grad=self.sparse)

    # What is done to a module's tensors.

    def _apply(self, fn: Any, recurse: bool = True) -> "EngramTable":
        if self.placement != "device":
            return self
        if not self.is_quantised:
            return super()._apply(fn, recurse)
        for name in ("weight", "scale"):
            parameter = getattr(self, name)
            # As bytes, which are moved but not cast.
            data = parameter.detach().view(torch.uint8)
            moved = fn(data)
            if moved is not data:
                setattr(self, name, nn.Parameter(moved.view(parameter.dtype), requires_grad=False))
        return self

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors) -> None:
        weight = state_dict.get(f"{prefix}weight")
        if weight is not None and self.weight is not None:
            if (weight.dtype == TABLE_DTYPE) != self.is_quantised:
                errors.append(
                    f"{prefix}weight is {weight.dtype}, the model's table is {self.weight.dtype}: an fp8 table and a "
                    "float one do not convert by copying. Use `quantize_tables()`, or load the other checkpoint."
                )
                return
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    # Contents.

    def set_weights(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Takes tensors as the table's own; quantised ones are frozen."""
        trains = weight.dtype != TABLE_DTYPE and (self.weight is None or self.weight.requires_grad)
        self.weight = nn.Parameter(weight, requires_grad=trains)
        self.scale = None if scale is None else nn.Parameter(scale, requires_grad=False)
        for parameter in (self.weight, self.scale):
            if parameter is not None:
                parameter._is_hf_initialized = True

    def prepare_quantised(self, block_size: int) -> None:
        """Turns a weight that is yet to be loaded into a quantised one, on the same device."""
        rows, dim, device = self.num_embeddings, self.embedding_dim, self.weight.device
        check_block_size(dim, block_size)
        self.set_weights(
            torch.empty(rows, dim, dtype=TABLE_DTYPE, device=device),
            torch.empty(rows, dim // block_size, dtype=SCALE_DTYPE, device=device),
        )
        for parameter in (self.weight, self.scale):
            parameter._is_hf_initialized = False

    def load_pending(self) -> None:
        """Ends the loading of a model: what Transformers was not to load is opened or read."""
        if self.pending is None:
            return
        (parts, dtype), self.pending = self.pending, None
        if self.placement == "device":
            for parameter in (self.weight, self.scale) if self.is_quantised else ():
                parameter.requires_grad_(False)
            if all(isinstance(part, TensorEntry) for part in parts):
                self.source = tuple(parts)
        elif all(isinstance(part, TensorEntry) for part in parts):
            disk = open_table({part.name: part for part in parts}, *(part.name for part in parts))
            self._check_shape(disk)
            if self.placement == "disk":
                self.open(disk)
            else:
                self.source = tuple(parts)
                self.set_weights(*(read_tensor(tensor, dtype) for tensor in disk.tensors))
        else:
            self.set_weights(*(host_copy(part, part.dtype if len(parts) > 1 else dtype) for part in parts))

    def open(self, disk: DiskTable) -> None:
        """Puts the table on disk: this one, which must have the table's shape."""
        self._check_shape(disk)
        self.weight = self.scale = None
        self.disk, self.placement = disk, "disk"
        self.source = tuple(tensor.entry for tensor in disk.tensors)

    def _check_shape(self, disk: DiskTable) -> None:
        if (disk.rows, disk.dim) != (self.num_embeddings, self.embedding_dim):
            entry = disk.weight.entry
            raise ValueError(
                f"{entry.name} in {entry.path} is {[disk.rows, disk.dim]}, the config asks for a table of "
                f"{[self.num_embeddings, self.embedding_dim]}: it is another model's, or config.json was changed."
            )

    def to_placement(self, placement: str, device: torch.device, dtype: torch.dtype) -> Callable[[], None]:
        """Prepares to move the table; see [`EngramMemory.to_placement`]. `dtype` is that of a float table beside the
        model.

        Returns:
            a function that moves it; what can go wrong has been done by then.
        """
        if placement == self.placement:
            return lambda: None
        if self.weight is None and self.disk is None:
            raise ValueError(
                f"The table is not loaded yet, so it cannot move to {placement!r}: use `from_pretrained`."
            )
        if placement == "disk":
            return partial(self.open, self._same_on_disk())
        if self.disk is not None:
            weight, scale = (read_tensor(tensor) for tensor in (*self.disk.tensors, None)[:2])
        else:
            weight, scale = self.weight.detach(), None if self.scale is None else self.scale.detach()
        if placement == "device":
            weight = weight.to(device, dtype if weight.dtype != TABLE_DTYPE else None)
            scale = None if scale is None else scale.to(device)
        else:
            weight, scale = (None if tensor is None else host_copy(tensor) for tensor in (weight, scale))

        def move() -> None:
            self.disk, self.placement = None, placement
            self.set_weights(weight, scale)

        return move

    def _same_on_disk(self) -> DiskTable:
        """The file that the table came from, if the table is still what it says."""
        remedy = "call `save_pretrained` first, and it can be read from there."
        if self.source is None:
            raise ValueError(f"The table has no file yet, so it cannot move to disk: {remedy}")
        disk = open_table({entry.name: entry for entry in self.source}, *(entry.name for entry in self.source))
        if disk.scale is None and self.scale is not None:
            raise ValueError(f"The table was quantised since it was read from {disk.weight.entry.path}: {remedy}")
        for tensor, parameter in zip(disk.tensors, (self.weight, self.scale), strict=False):
            row = 0
            for block in tensor.chunks():
                own = parameter[row : row + len(block)].detach().to("cpu")
                row += len(block)
                # Bytes, since numbers that are not numbers are not equal to themselves.
                if not torch.equal(block.to(own.dtype).view(torch.uint8), own.view(torch.uint8)):
                    raise ValueError(f"The table is not what {tensor.entry.path} holds (any more): {remedy}")
        return disk

    def check_can_quantise(self, block_size: int) -> None:
        """Raises unless it is a float table in memory whose rows divide into blocks."""
        if self.is_quantised:
            raise ValueError("The table is quantised already.")
        if self.weight is None:
            raise ValueError("A table on disk is never written to: `to_placement('cpu')` first, then quantise.")
        check_block_size(self.embedding_dim, block_size)

    @torch.no_grad()
    def quantised(self, block_size: int) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
        """A float table in fp8, and its scales, see [`EngramMemory.quantize_tables`]; the table stays as it is.

        Returns:
            `weight` float8_e4m3fn `[rows, dim]`, `scale` float8_e8m0fnu `[rows, dim / block_size]`, and a `dict`:
            `max_abs_error`, `rms_error`, and `relative_rms_error`, which is rms_error over the table's rms.
        """
        rows, dim = self.weight.shape
        place = {"device": self.weight.device} if self.placement == "device" else None
        new = torch.empty if place else host_empty
        weight = new(rows, dim, dtype=TABLE_DTYPE, **(place or {}))
        scale = new(rows, dim // block_size, dtype=SCALE_DTYPE, **(place or {}))
        largest, squares, signal = 0.0, 0.0, 0.0
        step = max(1, CHUNK_BYTES // (4 * dim))
        for at in range(0, rows, step):
            part = slice(at, at + step)
            values = self.weight[part].float()
            quantised, scales = quantise_rows(values, block_size)
            # Copied as bytes: not every device copies these types.
            weight[part].view(torch.uint8).copy_(quantised.view(torch.uint8))
            scale[part].view(torch.uint8).copy_(scales.view(torch.uint8))
            error = dequantise_rows(quantised, scales) - values
            largest = max(largest, error.abs().max().item())
            squares += error.double().square().sum().item()
            signal += values.double().square().sum().item()
        size = rows * dim
        return (
            weight,
            scale,
            {
                "max_abs_error": largest,
                "rms_error": (squares / size) ** 0.5,
                "relative_rms_error": (squares / signal) ** 0.5 if signal else 0.0,
            },
        )


def check_block_size(dim: int, block_size: int) -> None:
    if dim % block_size:
        raise ValueError(
            f"`engram_scale_block_size` ({block_size}) does not divide `engram_head_dim` ({dim}), so rows cannot be "
            "quantised: set it in the config to a divisor."
        )


def quantise_rows(values: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `[n, d]` -> float8_e4m3fn `[n, d]` and scales float8_e8m0fnu `[n, d / block_size]`.

    A block's scale is the smallest power of two with which its largest magnitude is at most 448, the largest e4m3.

    Raises:
        ValueError: an infinite number or NaN.
    """
    blocks = values.unflatten(-1, (-1, block_size))
    largest = blocks.abs().amax(-1)
    if not torch.isfinite(largest).all():
        raise ValueError("The table holds infinite numbers or NaN, which cannot be quantised.")
    # largest = mantissa * 2^exponent with mantissa in [0.5, 1), and 448 = 0.875 * 2^9.
    mantissa, exponent = torch.frexp(largest)
    exponent = torch.where(largest == 0, 0, exponent - 9 + (mantissa > FP8_MAX / 512).int()).clamp(-127, 127)
    rows = torch.ldexp(blocks, -exponent.unsqueeze(-1)).to(TABLE_DTYPE)
    return rows.flatten(-2), (exponent + 127).to(torch.uint8).view(SCALE_DTYPE)


def dequantise_rows(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What [`quantise_rows`] gave, in fp32, exactly."""
    blocks = rows.float().unflatten(-1, (scales.shape[-1], -1))
    return (blocks * scales.float().unsqueeze(-1)).flatten(-2)


def read_tensor(tensor: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """A whole tensor of a file into host memory, block by block; `dtype` is what float ones are cast to."""
    if tensor is None:
        return None
    is_fp8 = tensor.dtype in (TABLE_DTYPE, SCALE_DTYPE)
    out, row = host_empty(*tensor.shape, tensor.dtype if is_fp8 or dtype is None else dtype), 0
    for block in tensor.chunks():
        target = out[row : row + len(block)]
        if is_fp8:
            target, block = target.view(torch.uint8), block.view(torch.uint8)
        target.copy_(block)
        row += len(block)
    return out
