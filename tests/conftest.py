"""Fixtures that several test files share. Each builds something small: a config, a model, a tokenizer's stand-in."""

import os


# Before what reads them is imported, and for the processes that tests start: no network, and since test processes run
# side by side, one thread, unless the caller wants more.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open

from hf_engram import EngramConfig, EngramForCausalLM
from hf_engram.modeling_engram.engram_layer import EngramLayer
from hf_engram.modeling_engram.hyper_connection import HyperConnection
from hf_engram.tokenization.token_map import token_map_sha256


DATA = Path(__file__).parent / "data"

TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "engram_layer_ids": [0, 2],
    "engram_max_ngram_size": 4,
    "engram_vocab_size": 60,
    "engram_n_heads": 2,
    "engram_head_dim": 8,
}


@pytest.fixture(autouse=True, scope="session")
def threads() -> None:
    """Set, for a plugin may have imported torch before this file was read."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def make_config(**overrides) -> EngramConfig:
    return EngramConfig(**{**TINY, **overrides})


def make_model(cls=EngramForCausalLM, seed: int = 0, dtype: torch.dtype | None = None, **overrides):
    torch.manual_seed(seed)
    model = cls(make_config(**overrides)).eval()
    return model if dtype is None else model.to(dtype)


@torch.no_grad()
def enliven(model, seed: int = 0) -> None:
    """Random values for what starts without an effect: `wkv`, the gate's weights, `scale`, `base`, table rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(weight: torch.Tensor, mean: float, std: float) -> None:
        weight.copy_(mean + std * torch.randn(weight.shape, generator=generator))

    for module in model.modules():
        if isinstance(module, EngramLayer):
            normal(module.wkv.weight, 0.0, 0.3)
            normal(module.q_weight, 1.0, 0.3)
            normal(module.k_weight, 1.0, 0.3)
        elif isinstance(module, HyperConnection) and module.hc_mult > 1:
            normal(module.fn, 0.0, 0.1)
            normal(module.scale, 1.0, 0.3)
            module.base.add_(torch.randn(module.base.shape, generator=generator), alpha=0.5)
    if model.base_model.engram_memory is not None:
        for table in model.base_model.engram_memory.tables:
            normal(table.weight, 0.0, 1.0)


def make_lively_model(cls=EngramForCausalLM, seed: int = 0, dtype: torch.dtype | None = None, **overrides):
    model = make_model(cls, seed, **{"initializer_range": 0.1, **overrides})
    enliven(model, seed)
    return model if dtype is None else model.to(dtype)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., EngramConfig]:
    """`tiny_config(**fields)`: a config of three layers, Engram in the first and the last, 4-grams."""
    return make_config


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., EngramForCausalLM]:
    """`tiny_model(cls=EngramForCausalLM, seed=0, dtype=None, **fields)`: a model as it is initialised."""
    return make_model


@pytest.fixture(scope="session")
def lively_model() -> Callable[..., EngramForCausalLM]:
    """`lively_model(...)`, as `tiny_model`: a model in which Engram and the stream's copies have a large effect."""
    return make_lively_model


@pytest.fixture(scope="session")
def random_ids() -> Callable[..., torch.Tensor]:
    """`random_ids(batch, length, seed=0, vocab_size=96)`: token ids without the special ones (0 to 2)."""

    def draw(batch: int, length: int, seed: int = 0, vocab_size: int = TINY["vocab_size"]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, vocab_size, (batch, length), generator=generator)

    return draw


@pytest.fixture
def remote_modules(tmp_path, monkeypatch) -> Iterator[None]:
    """Code from Hub folders is kept in `tmp_path` and forgotten afterwards: the next test's folders are others."""
    import transformers.dynamic_module_utils as dynamic

    def forget() -> None:
        for name in [
            name for name in sys.modules if name.partition(".")[0] == dynamic.TRANSFORMERS_DYNAMIC_MODULE_NAME
        ]:
            del sys.modules[name]

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    forget()
    yield
    forget()


@pytest.fixture(scope="session")
def golden() -> Callable[[str], tuple[dict[str, torch.Tensor], dict[str, float]]]:
    """`golden(name)`: tensors and numbers of tests/data/<name>.safetensors."""

    def load(name: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        with safe_open(DATA / f"{name}.safetensors", framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}
            numbers = {key: float(value) if "eps" in key else int(value) for key, value in file.metadata().items()}
        return tensors, numbers

    return load


@pytest.fixture(scope="session")
def golden_hashing() -> dict:
    """Rows of hash ids, made with the DeepSeek tokenizer, for two layouts."""
    return json.loads((DATA / "hashing.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def stand_in_tokenizer() -> Callable[..., SimpleNamespace]:
    """`stand_in_tokenizer(config, token_map, **fields)`: what `bind_tokenizer` asks of a tokenizer, and no more."""

    def make(config: EngramConfig, token_map: np.ndarray, **fields) -> SimpleNamespace:
        token_map = np.asarray(token_map, dtype=np.int32)
        names = ("layer_ids", "vocab_size", "max_ngram_size", "n_heads", "pad_token_id", "compressed_vocab_size")
        values = {f"engram_{name}": getattr(config, f"engram_{name}") for name in names}
        values["engram_token_map_size"] = len(token_map)
        values["engram_token_map_sha256"] = token_map_sha256(token_map)
        values.update(fields)
        return SimpleNamespace(token_map=token_map, engram_fields=lambda: dict(values))

    return make
