"""A saved model folder, as clients load it: by path, with `trust_remote_code`."""

from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer


CHAT_TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"


def make_tokenizer() -> EngramTokenizer:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(topics.values(), trainer)
    plain = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )
    return EngramTokenizer.from_tokenizer(
        plain, engram_layer_ids=[0, 1], engram_vocab_size=500, engram_max_ngram_size=3, engram_n_heads=2
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A small model in which Engram has a large effect, with its tokenizer and code."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    model = EngramForCausalLM(
        EngramConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=512,
            initializer_range=0.1,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            hc_mult=2,
            engram_head_dim=8,
            **tokenizer.engram_fields(),
        )
    ).bind_tokenizer(tokenizer)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.engram.wkv.weight.normal_(std=0.3)
        for table in model.model.engram_memory.tables:
            table.weight.normal_(std=1.0)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
