"""A tokenizer, small models whose memory has a large effect, and texts."""

from collections.abc import Callable
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_engram import EngramForCausalLM, EngramTokenizer


TEXT = "The for statement is used to iterate over the elements of a sequence, and the while statement is not."
# Markup, quotes, what could end the page's elements or stand for its places, characters of several bytes (split into
# tokens of one byte each), text that runs from right to left or turns it around, and control characters.
HOSTILE = (
    "<b>bold</b> </script><script>document.title='taken'</script> \"a\" 'b' <!-- <img src=x onerror=alert(1)> "
    "{{data}} {{title}} &amp; \\u003c \\g<0> ${x}\t\ttab\r\nline\n\n "
    "😀👩‍👩‍👧 café שלום مرحبا \u202eevil\u202c \u200b\x07 end"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., EngramTokenizer]:
    """`make_tokenizer(**fields)`: a byte-level tokenizer of 400 tokens; Engram in layers 0 and 2, 4-grams, 3 heads."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([text for _, text in sorted(topics.items())[:20]], trainer)
    plain = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
    fields = {"layer_ids": [0, 2], "max_ngram_size": 4, "n_heads": 3, "vocab_size": 150}
    fields = {f"engram_{name}": value for name, value in fields.items()}
    return lambda **others: EngramTokenizer.from_tokenizer(plain, **{**fields, **others})


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer) -> EngramTokenizer:
    return make_tokenizer()


@pytest.fixture(scope="session")
def make_model(tokenizer, lively_model) -> Callable[..., EngramForCausalLM]:
    """`make_model(tokenizer=tokenizer, cls=EngramForCausalLM, seed=0, dtype=None, **fields)`, with the token map."""

    def make(tokenizer=tokenizer, cls=EngramForCausalLM, seed: int = 0, dtype: torch.dtype | None = None, **fields):
        fields = {"vocab_size": len(tokenizer), **tokenizer.engram_fields(), **fields}
        return lively_model(cls, seed, dtype, **fields).bind_tokenizer(tokenizer)

    return make


@pytest.fixture(scope="session")
def text() -> str:
    return TEXT


@pytest.fixture(scope="session")
def hostile_text() -> str:
    return HOSTILE
