"""What is refused before anything is computed: tokenizers of nothing, fields and files of the wrong kind."""

import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, Qwen3Config

from hf_engram import EngramTokenizer


def test_tokenizer_without_a_vocabulary_is_refused(tmp_path):
    """Made from one that Transformers has made up, from the folder that it made it up for, or from nothing."""
    Qwen3Config(vocab_size=1000).save_pretrained(tmp_path)
    made_up = AutoTokenizer.from_pretrained(tmp_path)
    assert len(made_up) == 1
    with pytest.raises(ValueError, match=r"has 1 tokens"):
        EngramTokenizer.from_tokenizer(made_up, engram_pad_token_id=0)
    with pytest.raises((ValueError, OSError)):
        EngramTokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has 0 tokens"):
        EngramTokenizer(tokenizer_object=Tokenizer(models.BPE()))


def test_tokens_that_are_all_one_are_refused():
    """One compressed id for all means the same rows for all."""
    backend = Tokenizer(models.WordLevel({"yes": 0, "Yes": 1, "YES": 2, " yes ": 3}, unk_token="yes"))
    tokenizer = EngramTokenizer(tokenizer_object=backend, engram_pad_token_id=0)
    for use in (tokenizer.engram_fields, lambda: tokenizer("yes"), lambda: tokenizer.token_map):
        with pytest.raises(ValueError, match=r"All 4 tokens normalise alike"):
            use()
