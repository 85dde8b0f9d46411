"""A Hub on loopback, small models with tokenizers, and scripts/push_to_hub.py to bring the one to the other."""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_engram import EngramForCausalLM, EngramTokenizer


sys.path.insert(0, str(Path(__file__).parent))

from hub_server import TOKEN, HubServer


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "push_to_hub.py"
WORDS = ["<pad>", "<unk>", *"The quick brown fox jumps over the lazy dog . cat sat on a mat Once upon time".split()]
LAYOUT = {"engram_layer_ids": [0, 2], "engram_vocab_size": 60, "engram_max_ngram_size": 4, "engram_n_heads": 2}


@pytest.fixture(scope="session")
def tokenizer() -> EngramTokenizer:
    words = list(dict.fromkeys(WORDS))
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    return EngramTokenizer.from_tokenizer(plain, **LAYOUT)


@pytest.fixture(scope="session")
def make_folder(lively_model, tokenizer) -> Callable[..., EngramForCausalLM]:
    """`make_folder(path, seed=0, fp8=False, **fields)`: saves a model with its tokenizer, and returns the model."""

    def make(path: Path, seed: int = 0, fp8: bool = False, save: dict | None = None, **fields) -> EngramForCausalLM:
        sizes = {"vocab_size": len(tokenizer), "engram_head_dim": 32 if fp8 else 8, **fields}
        model = lively_model(seed=seed, **{**tokenizer.engram_fields(), **sizes}).bind_tokenizer(tokenizer)
        if fp8:
            model.quantize_tables()
        model.save_pretrained(path, **(save or {}))
        tokenizer.save_pretrained(path)
        return model

    return make


@pytest.fixture(scope="session")
def folder(make_folder, tmp_path_factory) -> Path:
    """A model's folder, for tests that leave it as it is."""
    path = tmp_path_factory.mktemp("saved") / "my-engram"
    make_folder(path)
    return path


@pytest.fixture
def hub(tmp_path) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        yield server


@pytest.fixture(scope="session")
def script():
    spec = importlib.util.spec_from_file_location("push_to_hub", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def use_hub(monkeypatch, tmp_path) -> Callable[[HubServer], None]:
    """`use_hub(server)`: from here on, huggingface_hub in this process knows no other Hub, and is logged in there."""

    def use(server: HubServer) -> None:
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        # Transformers keeps a client, which would remember another test's Hub; older ones make it anew.
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))

    return use


@pytest.fixture
def push(script, use_hub, hub, monkeypatch) -> Callable[..., None]:
    """`push(folder, repo_id, *options, check=False)`: the script in this process, by default without its check of the
    folder, which takes seconds."""
    own_check = script.check

    def call(folder: Path, repo_id: str, *options: str, check: bool = False, to: HubServer = hub) -> None:
        use_hub(to)
        monkeypatch.setattr(script, "check", own_check if check else lambda *_: None)
        monkeypatch.setattr(sys, "argv", ["push_to_hub.py", str(folder), repo_id, *options])
        script.main()

    return call


@pytest.fixture
def logits_of(tokenizer) -> Callable[[EngramForCausalLM], torch.Tensor]:
    @torch.no_grad()
    def logits(model: EngramForCausalLM) -> torch.Tensor:
        return model.eval()(**tokenizer("The cat sat on the mat", return_tensors="pt")).logits

    return logits


@pytest.fixture
def environment(hub, tmp_path) -> dict[str, str]:
    """Of a process that knows this Hub alone and has an empty cache."""
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGINGFACE_"))}
    return {**kept, **ours, "HF_HUB_DISABLE_XET": "1", "TOKENIZERS_PARALLELISM": "false"}
