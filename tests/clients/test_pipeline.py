"""`pipeline("text-generation")`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline


PROMPTS = ["The for statement", "An assignment", "The while statement is used for repeated execution"]


@pytest.fixture(scope="module")
def generator(model_folder):
    return pipeline("text-generation", model=str(model_folder), trust_remote_code=True, device="cpu")


@pytest.fixture(scope="module")
def expected(model_folder) -> list[str]:
    """What `generate` says to each prompt alone, without the tokenizer's hash ids."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=True)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        output_ids = model.generate(ids, max_new_tokens=12, do_sample=False)
        texts.append(tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_text_generation(generator, expected, batch_size):
    """Batches of prompts of different lengths give what each prompt gives alone."""
    outputs = generator(PROMPTS, batch_size=batch_size, max_new_tokens=12, do_sample=False, return_full_text=False)
    assert [output[0]["generated_text"] for output in outputs] == expected


def test_chat(generator):
    """Messages go through the chat template."""
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    alone = [generator(chat, max_new_tokens=8, do_sample=False)[0]["generated_text"] for chat in chats]
    together = generator(chats, batch_size=3, max_new_tokens=8, do_sample=False)
    assert [output[0]["generated_text"] for output in together] == alone
    assert all(chat[-1]["role"] == "assistant" for chat in alone)


def test_num_return_sequences(generator):
    outputs = generator(PROMPTS, batch_size=3, max_new_tokens=4, num_return_sequences=2, do_sample=True)
    assert [len(output) for output in outputs] == [2, 2, 2]


def test_features_in_batches(model_folder):
    """The collator of this pipeline pads `hash_ids`, which it does not know, with zeros: nobody looks there."""
    extract = pipeline("feature-extraction", model=str(model_folder), trust_remote_code=True, device="cpu")
    together = extract(PROMPTS, batch_size=3, return_tensors=True)
    for prompt, features in zip(PROMPTS, together, strict=True):
        alone = extract(prompt, return_tensors=True)
        assert torch.allclose(features[:, : alone.shape[1]], alone, atol=1e-4)
