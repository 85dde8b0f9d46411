"""Which implementation the operations' tests run, and on what: every test that takes `backend` runs on each.

- "eager" on the CPU;
- "triton" on a GPU: `pytest -m gpu`;
- "triton" on the CPU, in Triton's interpreter: Triton reads TRITON_INTERPRET when it is imported, so such tests need a
  process of their own, and each test file starts one for itself (see `run_interpreted`).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


# Test modules are imported by path (see pyproject.toml); for the helpers beside them their folder must be on the path.
sys.path.insert(0, str(Path(__file__).parent))

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@pytest.fixture(params=["triton"] if INTERPRETED else ["eager", pytest.param("triton", marks=pytest.mark.gpu)])
def backend(request) -> str:
    return request.param


@pytest.fixture
def device(backend) -> str:
    return "cuda" if backend == "triton" and not INTERPRETED else "cpu"


@pytest.fixture(scope="session")
def run_interpreted() -> Callable[[str], None]:
    """`run_interpreted(__file__)`: that file's tests of "triton" pass in Triton's interpreter."""
    pytest.importorskip("triton")

    def run(path: str) -> None:
        command = [sys.executable, "-m", "pytest", path, "-q", "-k", "triton", "-p", "no:cacheprovider"]
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]

    return run
