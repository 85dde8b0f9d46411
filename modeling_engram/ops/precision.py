"""The precision that the stream and the gate are computed in."""

from contextlib import AbstractContextManager, nullcontext

import torch


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32 for every dtype up to it, fp64 for fp64 (with which formulas are checked)."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Switches autocast off, where it is on: it would run fp32 matrix products in 16 bits."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()
