"""Test modules are imported by path (see pyproject.toml); the helper beside them needs its folder on the path."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file


sys.path.insert(0, str(Path(__file__).parent))

from v41_helpers import CHECKPOINT, INPUTS, load_model

from hf_engram import DeepseekV41Config, DeepseekV41ForCausalLM


@pytest.fixture(scope="session")
def golden() -> dict[str, torch.Tensor]:
    return load_file(CHECKPOINT / "golden.safetensors")


@pytest.fixture(scope="session")
def input_ids() -> torch.Tensor:
    return torch.tensor(INPUTS["input_ids"])


@pytest.fixture(scope="session")
def model() -> DeepseekV41ForCausalLM:
    """Without roundings."""
    return load_model(cache_rounding=False)


@pytest.fixture(scope="session")
def rounded_model() -> DeepseekV41ForCausalLM:
    return load_model()


@pytest.fixture
def config() -> DeepseekV41Config:
    return DeepseekV41Config.from_pretrained(CHECKPOINT)
