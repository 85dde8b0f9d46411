"""The model card: its numbers are the model's, its code runs, and a card that somebody wrote or changed stays."""

import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import hf_engram
from hf_engram import EngramForCausalLM, EngramModel, EngramTokenizer
from hf_engram.modeling_engram.model_card import KINDS, is_generated, renamed, size
from hf_engram.training_record import RecordTraining


WORDS = ["<pad>", "<unk>", *"Once upon a time there was".split()]


@pytest.fixture(scope="module")
def tokenizer() -> EngramTokenizer:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>")
    return EngramTokenizer.from_tokenizer(plain, engram_layer_ids=[0, 2], engram_vocab_size=60)


@pytest.fixture
def bound_model(lively_model, tokenizer):
    """`bound_model(cls, **fields)`: a model with a tokenizer bound to it."""

    def make(cls=EngramForCausalLM, **fields):
        fields = {**tokenizer.engram_fields(), "vocab_size": len(tokenizer), "engram_head_dim": 32, **fields}
        return lively_model(cls, **fields).bind_tokenizer(tokenizer)

    return make


def card_of(folder: Path) -> ModelCard:
    return ModelCard.load(folder / "README.md")


def cell(card: ModelCard, name: str) -> str:
    """What a table says of something."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", card.text, re.MULTILINE)
    return found


def in_bytes(text: str) -> float:
    number, unit = text.split()
    return float(number) * 1024 ** ["B", "KiB", "MiB", "GiB"].index(unit)


def test_numbers(bound_model, tmp_path):
    model = bound_model()
    model.save_pretrained(tmp_path)
    card, config = card_of(tmp_path), model.config
    tables = [table.weight for table in model.model.engram_memory.tables]
    n_table = sum(table.numel() for table in tables)
    n_rest = sum(p.numel() for p in model.parameters()) - n_table
    assert cell(card, "table rows") == ", ".join(f"{len(table):,}" for table in tables)
    assert cell(card, "parameters in the tables").startswith(f"{n_table:,} (float32, ")
    assert cell(card, "parameters in the tables").endswith(f"{4 * n_table:,} bytes)")
    assert cell(card, "parameters outside the tables").startswith(f"{n_rest:,} (float32, ")
    assert cell(card, "share of the parameters in the tables") == f"{100 * n_table / (n_table + n_rest):.1f}%"
    assert cell(card, "Engram layers") == "0, 2"
    assert cell(card, "tokenizer's map to them") == f"sha256 `{config.engram_token_map_sha256}`"


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "fp8", "fp8 on disk"])
def test_what_placements_need(bound_model, tmp_path, kind):
    """Bytes of the tables, scales included, and of the rest, are those that are in the file."""
    model = bound_model()
    if kind == "bfloat16":
        model.to(torch.bfloat16)
    if "fp8" in kind:
        model.quantize_tables()
    model.save_pretrained(tmp_path)
    if kind == "fp8 on disk":
        model = EngramForCausalLM.from_pretrained(tmp_path, engram_placement="disk")
        model.save_pretrained(tmp_path)
    card = card_of(tmp_path)
    elements = sum(rows * 32 for rows in model.config.engram_num_embeddings)
    each = {"float32": 4, "bfloat16": 2}.get(kind, 1 + 1 / 32)
    device, cpu, disk = (re.findall(rf'^\| `"{name}"` \| (.*?) \| (.*?) \|', card.text, re.MULTILINE)[0]
                         for name in ("device", "cpu", "disk"))  # fmt: skip
    assert in_bytes(cpu[1]) == pytest.approx(each * elements, rel=1e-3)
    assert in_bytes(device[0]) - in_bytes(cpu[0]) == pytest.approx(each * elements, rel=1e-2)
    assert device[1] == "none" and disk[0] == cpu[0] and disk[1].endswith(f"up to {cpu[1]}")
    in_file = sum(path.stat().st_size for path in tmp_path.glob("model*.safetensors"))
    assert in_bytes(device[0]) == pytest.approx(in_file, rel=0.1)


@pytest.mark.parametrize("name", KINDS)
def test_its_code_runs(bound_model, tokenizer, tmp_path, monkeypatch, remote_modules, name, capsys):
    """For every class, from the folder that the card names."""
    cls = getattr(hf_engram, name)
    bound_model(cls).save_pretrained(tmp_path / "some-model")
    tokenizer.save_pretrained(tmp_path / "some-model")
    card = card_of(tmp_path / "some-model")
    assert card.data.pipeline_tag == KINDS[name][0]
    assert card.data.tags == ["engram", "custom_code"] and card.data.library_name == "transformers"
    (code,) = re.findall(r"^```python\n(.*?)^```", card.text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    capsys.readouterr()
    namespace: dict = {}
    exec(compile(code, "README.md", "exec"), namespace)
    assert type(namespace["model"]).__name__ == name and capsys.readouterr().out.strip()


def test_without_memory(lively_model, tmp_path):
    lively_model(engram_layer_ids=[]).save_pretrained(tmp_path)
    card = card_of(tmp_path)
    assert cell(card, "Engram layers") == "none" and "engram_placement" not in card.text


def test_our_own_card_follows_the_model(bound_model, tmp_path):
    """A later save brings the numbers up to date, whatever has laid out the metadata anew."""
    bound_model().save_pretrained(tmp_path)
    card_of(tmp_path).save(tmp_path / "README.md")
    bound_model(num_hidden_layers=4).save_pretrained(tmp_path)
    assert cell(card_of(tmp_path), "decoder layers, width") == "4, 32"


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("# ", "# My ", 1),
        lambda text: text.replace("library_name", "license: mit\nlibrary_name", 1),
        lambda text: text.replace("- engram\n", "- engram\n- mine\n", 1),
        lambda text: text + "\nTrained for fun.\n",
        lambda text: text.replace("| table rows |", "| rows |"),
        lambda text: text.replace("digest ", "digest 0"),
        lambda text: text.replace("---\n", "---\n: {broken\n", 1),
        lambda text: "mine",
        lambda text: "",
    ],
    ids=["title", "licence", "tag", "more", "a cell", "digest", "broken", "another", "empty"],
)
def test_a_changed_card_stays(bound_model, tmp_path, change):
    model = bound_model()
    model.save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    text = change(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    model.save_pretrained(tmp_path)
    assert path.read_text(encoding="utf-8") == text


def test_a_card_that_is_not_utf8_stays(bound_model, tmp_path):
    (tmp_path / "README.md").write_bytes("fa\u00e7ade".encode("latin-1"))
    bound_model().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_bytes() == "fa\u00e7ade".encode("latin-1")


def test_renamed(bound_model, tmp_path):
    """The card is still ours, and names nothing else; another's card is left as it is."""
    bound_model().save_pretrained(tmp_path / "some-model")
    text = (tmp_path / "some-model" / "README.md").read_text(encoding="utf-8")
    new = renamed(text, "someone/other")
    assert is_generated(new) and "some-model" not in new and new.count("someone/other") == text.count("some-model")
    assert renamed(new, "some-model") == text
    assert renamed(text + "mine", "someone/other") == text + "mine"


def test_origin_and_training(bound_model, tmp_path):
    """What is known of backbone, licence and training is on the card; what is not known is not."""
    model = bound_model(cls=EngramForCausalLM, backbone_name="owner/base", backbone_license="apache-2.0")
    model.training_record = {"data": "corpus", "steps": 1500, "held-out loss": 4.145, "datasets": ["owner/texts"]}
    model.save_pretrained(tmp_path / "one")
    card = card_of(tmp_path / "one")
    assert card.data.base_model == "owner/base" and card.data.license == "apache-2.0"
    assert card.data.datasets == ["owner/texts"] and "`owner/base`" in card.text
    assert (cell(card, "data"), cell(card, "steps"), cell(card, "held-out loss")) == ("corpus", "1,500", "4.145")
    again = EngramForCausalLM.from_pretrained(tmp_path / "one")
    again.save_pretrained(tmp_path / "two")
    assert card_of(tmp_path / "two").data.base_model == "owner/base"
    bound_model(EngramModel).save_pretrained(tmp_path / "three")
    plain = card_of(tmp_path / "three")
    assert plain.data.base_model is None and plain.data.license is None and plain.data.datasets is None
    assert "## Training" not in plain.text and "add `license` to the metadata" in plain.text


def test_a_name_that_would_end_a_cell(bound_model, tmp_path):
    model = bound_model()
    model.training_record = {"data": "a|b\nc.txt", "steps": 1}
    model.save_pretrained(tmp_path)
    content = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "| data | a\\|b c.txt |\n| steps | 1 |\n" in content and is_generated(content)


def test_trainer_records(bound_model, tmp_path):
    """With `RecordTraining`, checkpoints' and final cards hold the Trainer's figures; a user's card in the output
    stays."""
    from transformers import Trainer, TrainingArguments, default_data_collator

    dataset = [{"input_ids": [2, 3, 4, 5], "labels": [2, 3, 4, 5]}] * 8
    arguments = TrainingArguments(
        output_dir=tmp_path / "out",
        max_steps=4,
        logging_steps=2,
        eval_steps=2,
        save_steps=4,
        eval_strategy="steps",
        per_device_train_batch_size=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    (tmp_path / "corpus.txt").write_text("x")
    trainer = Trainer(
        model=bound_model(),
        args=arguments,
        train_dataset=dataset,
        eval_dataset=dataset,
        data_collator=default_data_collator,
        callbacks=[RecordTraining([tmp_path / "corpus.txt", "owner/texts"])],
    )
    trainer.train()
    card = card_of(tmp_path / "out" / "checkpoint-4")
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert cell(card, "held-out loss, nats per token") == f"{logged[-1]:.4f} at step 4"
    assert cell(card, "data") == "corpus.txt, owner/texts" and card.data.datasets == ["owner/texts"]
    assert cell(card, "steps") == "4" and str(tmp_path) not in card.text
    (tmp_path / "out" / "README.md").write_text("mine")
    trainer.save_model()
    assert (tmp_path / "out" / "README.md").read_text() == "mine"


def test_record_training_wants_a_list():
    with pytest.raises(TypeError, match="`data` must be a list"):
        RecordTraining("corpus.txt")


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * 2**30, "200 GiB"), (2**52, "4096 TiB")],
)
def test_sizes(n_bytes, text):
    assert size(n_bytes) == text
