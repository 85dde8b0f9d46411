"""Which implementation the row updates' tests run, as in tests/modeling_engram/ops, whose helpers they use."""

import os
import sys
from pathlib import Path

import pytest


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "modeling_engram" / "ops")]

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@pytest.fixture(params=["triton"] if INTERPRETED else ["eager", pytest.param("triton", marks=pytest.mark.gpu)])
def backend(request) -> str:
    return request.param


@pytest.fixture
def device(backend) -> str:
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"
