"""The roundings of DeepSeek-V4.1: values that share a scale, rounded to fp8 or fp4 and back.

    scale = 2^ceil(log2(max(amax, floor) * fp32(1 / largest)))       a power of two (E8M0)
    y = round(x / scale) * scale

| what | values | group | scale |
| --- | --- | --- | --- |
| window keys; inputs of linears | e4m3, largest 448 | 32 | power of two, floor 1e-4 |
| index keys and queries | e2m1, largest 6 | 32 | power of two, floor 6 * 2^-126 |
| compressed entries | e2m1 | 16 | e4m3(max(amax, 6 * 2^-9) / 6): to nearest, so x / scale may exceed 6 |

All to nearest, halves to even, saturating; e2m1 is 0, .5, 1, 1.5, 2, 3, 4, 6 and their negatives. Gradients pass as if
nothing had been rounded.
"""

import torch


FP8 = torch.float8_e4m3fn
FP8_MAX, FP4_MAX = 448.0, 6.0
# Halfway between neighbours of e2m1: on it, the even neighbour, which has an even place in the list, wins.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def power_of_two_scale(amax: torch.Tensor, floor: float, largest: float) -> torch.Tensor:
    """The smallest power of two with which `amax` (fp32) fits into `largest`, as the release rounds that quotient."""
    quotient = amax.clamp_min(floor) * torch.tensor(1 / largest, dtype=torch.float32, device=amax.device)
    # quotient = mantissa * 2^exponent with mantissa in [0.5, 1): its logarithm is whole where mantissa is 0.5.
    mantissa, exponent = torch.frexp(quotient)
    return torch.ldexp(torch.ones_like(quotient), exponent - (mantissa == 0.5).int())


def to_e2m1(values: torch.Tensor) -> torch.Tensor:
    """fp32 values to the nearest e2m1, as fp32; a zero keeps its sign."""
    size = values.abs().clamp_max(FP4_MAX)
    # The step is 0.5 below 2, 1 below 4, 2 from there on; torch.round takes halves to even.
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.copysign(torch.round(size / step) * step, values)


class _StraightThrough(torch.autograd.Function):
    """A rounding whose gradient is that of the identity."""

    @staticmethod
    def forward(ctx, values, rounding):
        return rounding(values)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def _in_groups(values: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = values.float().unflatten(-1, (-1, group))
    return groups, groups.abs().amax(-1, keepdim=True)


def _fp8(values: torch.Tensor) -> torch.Tensor:
    groups, amax = _in_groups(values, 32)
    scale = power_of_two_scale(amax, 1e-4, FP8_MAX)
    rounded = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8).float() * scale
    return rounded.flatten(-2).to(values.dtype)


def _fp4(values: torch.Tensor) -> torch.Tensor:
    groups, amax = _in_groups(values, 32)
    scale = power_of_two_scale(amax, FP4_MAX * 2.0**-126, FP4_MAX)
    return (to_e2m1(groups / scale) * scale).flatten(-2).to(values.dtype)


def _fp4_fine(values: torch.Tensor) -> torch.Tensor:
    groups, amax = _in_groups(values, 16)
    scale = (amax.clamp_min(FP4_MAX * 2.0**-9) / FP4_MAX).clamp_max(FP8_MAX).to(FP8).float()
    return (to_e2m1(groups / scale) * scale).flatten(-2).to(values.dtype)


def round_fp8(values: torch.Tensor) -> torch.Tensor:
    """As window keys are rounded, and inputs of linears: `[..., 32 k]`, any float dtype, to the same."""
    return _StraightThrough.apply(values, _fp8)


def round_fp4(values: torch.Tensor) -> torch.Tensor:
    """As index keys and queries are rounded: `[..., 32 k]`, any float dtype, to the same."""
    return _StraightThrough.apply(values, _fp4)


def round_fp4_fine(values: torch.Tensor) -> torch.Tensor:
    """As compressed entries are rounded: `[..., 16 k]`, any float dtype, to the same."""
    return _StraightThrough.apply(values, _fp4_fine)
