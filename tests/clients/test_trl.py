"""TRL's SFTTrainer."""

import itertools
from pydoc_data.topics import topics

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


TEXTS = [text[:300] for text in topics.values()][:32]


def make_trainer(model_folder, output_dir, dataset: Dataset, peft_config=None, **arguments) -> SFTTrainer:
    model = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=True)
    settings = {
        "output_dir": str(output_dir),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "learning_rate": 5e-3,
        "logging_steps": 1,
        "max_length": 64,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
    }
    arguments = SFTConfig(**{**settings, **arguments})
    return SFTTrainer(
        model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer, peft_config=peft_config
    )


def losses(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.fixture(scope="module")
def text_dataset() -> Dataset:
    return Dataset.from_dict({"text": TEXTS})


@pytest.mark.parametrize("packing", [False, True])
def test_sft(model_folder, tmp_path, text_dataset, packing):
    """Plain text, one example a row or packed: the loss falls, and the tables learn."""
    trainer = make_trainer(model_folder, tmp_path, text_dataset, packing=packing, max_steps=8)
    before = trainer.model.model.engram_memory.tables[0].weight.detach().clone()
    trainer.train()
    history = losses(trainer)
    assert len(history) == 8 and sum(history[-3:]) < sum(history[:3])
    assert not torch.equal(trainer.model.model.engram_memory.tables[0].weight, before)


def test_sft_batch_equals_model(model_folder, tmp_path, text_dataset):
    """What the trainer's collator gives the model yields the loss of the same tokens, given directly."""
    trainer = make_trainer(model_folder, tmp_path, text_dataset)
    batch = next(iter(trainer.get_train_dataloader()))
    model = trainer.model.eval()
    with torch.no_grad():
        loss = trainer.compute_loss(model, dict(batch))
        direct = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"])
    torch.testing.assert_close(loss, direct.loss)


def test_packed_documents_stay_apart(model_folder, tmp_path, text_dataset):
    """Packed into one row, each document gets the logits that it gets alone."""
    trainer = make_trainer(model_folder, tmp_path, text_dataset, packing=True)
    batch = next(iter(trainer.get_train_dataloader()))
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 2
    model = trainer.model.eval()
    with torch.no_grad():
        packed = model(**inputs).logits
        for start, end in itertools.pairwise([*starts, packed.shape[1]]):
            alone = model(input_ids=batch["input_ids"][:, start:end]).logits
            torch.testing.assert_close(packed[:, start:end], alone, rtol=1e-4, atol=1e-5)


def test_sft_chat(model_folder, tmp_path):
    """Prompts and completions as messages go through the chat template; the loss is on completions."""
    rows = [
        {
            "prompt": [{"role": "user", "content": text[:60]}],
            "completion": [{"role": "assistant", "content": text[60:160]}],
        }
        for text in TEXTS
    ]
    trainer = make_trainer(model_folder, tmp_path, Dataset.from_list(rows), max_steps=4)
    trainer.train()
    assert len(losses(trainer)) == 4


def test_sft_lora(model_folder, tmp_path, text_dataset):
    """A LoRA adapter trains, is saved, and loads onto the model again."""
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "wkv"], task_type="CAUSAL_LM")
    trainer = make_trainer(model_folder, tmp_path, text_dataset, peft_config=adapter)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    model = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=True)
    model.load_adapter(str(tmp_path / "adapter"))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids).logits, trainer.model.eval()(ids).logits)


def test_checkpoint_is_complete(model_folder, tmp_path, text_dataset):
    """A checkpoint that the trainer saves loads by itself, tokenizer and code included."""
    trainer = make_trainer(model_folder, tmp_path, text_dataset, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    folder = tmp_path / "checkpoint-2"
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    without = {name: value for name, value in batch.items() if name != "hash_ids"}
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**without).logits)
        torch.testing.assert_close(model(**without).logits, trainer.model.eval()(**without).logits)
