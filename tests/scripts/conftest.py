"""Runs of scripts/train.py: in this process, on a corpus of a dozen texts."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


sys.path.insert(0, str(Path(__file__).parent))

from train_runs import CONFIG, RUN, SCRIPT, TEXTS


@pytest.fixture(scope="session")
def train():
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for index, text in enumerate(TEXTS):
        (folder / f"{index:02d}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def run(train, corpus, monkeypatch):
    """`run(output, *arguments)`: the script in this process, on the corpus if nothing else is said."""

    def call(output: Path, *arguments: object) -> None:
        arguments = [*RUN, *map(str, arguments)]
        if "--data" not in arguments:
            arguments += ["--data", str(corpus)]
        monkeypatch.setattr(sys, "argv", ["train.py", str(output), *arguments])
        AcceleratorState._reset_state(reset_partial_state=True)
        train.main()

    yield call
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def resume(train, run, monkeypatch):
    """`resume(output, *arguments)`: the script with --resume and nothing else."""

    def call(output: Path, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", str(output), "--resume", *map(str, arguments)])
        AcceleratorState._reset_state(reset_partial_state=True)
        train.main()

    return call


@pytest.fixture(scope="session")
def finished(train, corpus, tmp_path_factory) -> Path:
    """The output of an uninterrupted run of twelve steps."""
    output = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", str(output), "--data", str(corpus), "--steps=12", *RUN, *CONFIG])
        AcceleratorState._reset_state(reset_partial_state=True)
        train.main()
    return output


@pytest.fixture(scope="session")
def backbone(tmp_path_factory) -> Path:
    """A small Llama with a tokenizer of words."""
    words = sorted({word for text in TEXTS for word in text.split()})
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "<eos>", *words])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("backbone")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
