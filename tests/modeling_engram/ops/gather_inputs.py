"""Tables and row ids, for the tests of `gather_rows`, and how its results are compared."""

import torch

import hf_engram.modeling_engram.ops.backend as backend_module


def make_table(rows, dim, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, dim, generator=generator).to(device, dtype)


def make_quantised(rows, dim, block=32, device="cpu", seed=0):
    """Any byte but NaN's, and scales whose products are finite."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(0, 255, (rows, dim), generator=generator, dtype=torch.uint8)
    table[table == 0x7F] = 0
    scales = torch.randint(0, 246, (rows, dim // block), generator=generator, dtype=torch.uint8)
    return table.view(torch.float8_e4m3fn).to(device), scales.view(torch.float8_e8m0fnu).to(device)


def make_ids(rows, *shape, device="cpu", dtype=torch.int64, seed=1):
    """Some rows more often than others."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator).square() * rows).to(device, dtype)


def assert_same(actual, expected):
    """Bit for bit, signs of zeros too, except for the payload of NaN; one step of a 16-bit type in the interpreter,
    which truncates where a GPU rounds."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = actual.nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf)
    if backend_module.INTERPRETED and actual.itemsize == 2:
        info = torch.finfo(actual.dtype)
        torch.testing.assert_close(actual, expected, rtol=info.eps, atol=info.smallest_normal)
        return
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.itemsize]
    assert torch.equal(actual.contiguous().view(integer), expected.contiguous().view(integer))
