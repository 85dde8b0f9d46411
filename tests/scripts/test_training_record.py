"""What the cards of scripts/train.py say of a run."""

import json
import re

from huggingface_hub import ModelCard
from train_runs import metrics

from hf_engram.training_record import data_record


def cell(card: ModelCard, name: str) -> str:
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", card.text, re.MULTILINE)
    return found


def test_a_checkpoints_card(finished):
    """Data by name, steps, tokens, and the losses that were logged up to this checkpoint."""
    arguments = json.loads((finished / "run.json").read_text(encoding="utf-8"))
    for checkpoint in finished.glob("checkpoint-*"):
        card, step = ModelCard.load(checkpoint / "README.md"), int(checkpoint.name.rpartition("-")[2])
        held_out = [line for line in metrics(finished) if "eval_loss" in line and line["step"] <= step]
        assert cell(card, "data") == "corpus0" and str(finished.parent) not in card.text
        assert cell(card, "steps") == str(step)
        tokens = step * arguments["batch_size"] * arguments["accumulate"] * arguments["block_size"]
        assert cell(card, "tokens") == f"{tokens:,}"
        said = cell(card, "held-out loss, nats per token")
        assert said.startswith(f"{held_out[-1]['eval_loss']:.4f} at step {held_out[-1]['step']}")
        assert said.endswith(f", {held_out[0]['eval_loss']:.4f} before")


def test_an_adapters_card(run, finished, tmp_path):
    """The same, beside how to load it; its base is a folder here, which is no id on the Hub."""
    base = finished / "checkpoint-12"
    run(tmp_path / "out", "--model", base, "--lora=2", "--steps=2", "--save-every=2")
    card = ModelCard.load(tmp_path / "out" / "checkpoint-2" / "README.md")
    assert cell(card, "steps") == "2" and cell(card, "training loss, nats per token").endswith("at step 2")
    assert card.data.library_name == "peft" and card.data.tags == ["engram", "lora"] and card.data.base_model is None
    assert 'PeftModel.from_pretrained(model, "checkpoint-2")' in card.text


def test_sources(tmp_path):
    """Files and folders by their last part, what is on the Hub by its id."""
    (tmp_path / "notes.txt").write_text("x")
    record = data_record([str(tmp_path), f"{tmp_path}/notes.txt", f"{tmp_path}/gone", "owner/texts:en"])
    assert record == {"data": f"{tmp_path.name}, notes.txt, gone, owner/texts:en", "datasets": ["owner/texts"]}
