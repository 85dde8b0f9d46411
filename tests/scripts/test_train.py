"""The training script: what it writes, and that a killed run goes on bit for bit."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from train_runs import (
    CONFIG,
    MEMORY,
    RUN,
    SCRIPT,
    TEXTS,
    assert_same,
    assert_same_checkpoint,
    metrics,
    names_in,
    state_of,
)
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_engram import EngramForCausalLM, EngramTokenizer
from hf_engram.adapters import TABLE_DELTA_FILE, TableDelta


def test_checkpoints_are_hub_folders(finished):
    """Each loads by itself, computes what the script computed, and nothing else lies around."""
    folders = [f"checkpoint-{i}" for i in (4, 8, 12)]
    assert names_in(finished) == {*folders, "metrics.jsonl", "run.json", "training_state"}
    assert names_in(finished / "training_state") == {f"{name}.pt" for name in folders}
    folder = finished / "checkpoint-12"
    files = set(os.listdir(folder))
    assert {"config.json", "modeling_engram.py", "tokenization_engram.py", "README.md", "tokenizer.json"} <= files
    assert {Path(name).suffix for name in files} == {".json", ".py", ".md", ".safetensors"}
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, EngramTokenizer) and len(tokenizer) == 300
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    without = {name: value for name, value in batch.items() if name != "hash_ids"}
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**without).logits)


def test_cards_name_their_checkpoint(finished):
    """What the card tells a reader to load is the folder that it lies in."""
    card = (finished / "checkpoint-12" / "README.md").read_text(encoding="utf-8")
    assert "checkpoint-12" in card and ".tmp" not in card


def test_it_learns(finished):
    losses = {line["step"]: line["eval_loss"] for line in metrics(finished) if "eval_loss" in line}
    assert list(losses) == [0, 4, 8, 12]
    assert losses[0] == pytest.approx(5.7, abs=0.1)  # log(300)
    assert losses[12] < losses[4] < losses[0] - 0.05
    assert [line["step"] for line in metrics(finished) if "loss" in line] == list(range(1, 13))
    tables = [load_file(finished / f"checkpoint-{i}" / "model.safetensors") for i in (4, 12)]
    name = "model.engram_memory.tables.1.weight"
    assert not torch.equal(tables[0][name], tables[1][name])


def test_kill_9_and_resume(resume, corpus, finished, tmp_path):
    """Killed while it trains or saves, the run goes on to the same weights, optimizer and losses, to the bit."""
    output = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), str(output), "--data", str(corpus), "--steps=12", *RUN, *CONFIG]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        while not (output / "checkpoint-4").exists():
            assert process.poll() is None, process.stderr.read().decode()
            time.sleep(0.001)
        time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (output / "checkpoint-12").exists()
    # What a kill may leave at worst.
    shutil.copytree(output / "checkpoint-4", output / ".checkpoint-8.tmp", dirs_exist_ok=True)
    (output / ".checkpoint-8.tmp" / "model.safetensors").write_bytes(b"half")
    shutil.copy(state_of(output / "checkpoint-4"), state_of(output / "checkpoint-8"))
    state_of(output / "checkpoint-8").with_name(".checkpoint-12.pt.tmp").write_bytes(b"half")
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    resume(output)
    assert_same_checkpoint(output / "checkpoint-12", finished / "checkpoint-12")
    assert metrics(output) == metrics(finished)
    assert not list(output.rglob(".*"))


def test_resume_takes_the_arguments_of_the_run(run, resume, corpus, finished, tmp_path, monkeypatch):
    """From another folder than the run was started in, and all arguments again are right, too. What changes nothing
    may differ, such as where the text is; and a run that has not come to its first checkpoint begins anew."""
    monkeypatch.chdir(corpus.parent)
    output = tmp_path / "run"
    run(output, "--steps=12", *CONFIG, "--data", corpus.name)
    assert_same(json.loads((output / "run.json").read_text()), json.loads((finished / "run.json").read_text()))
    for name in ("checkpoint-8", "checkpoint-12"):
        shutil.rmtree(output / name)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(corpus, "moved text")
    resume(output, "--save-every=6", "--data", "moved text")
    assert {"checkpoint-4", "checkpoint-6", "checkpoint-12"} < names_in(output) and not (
        output / "checkpoint-8"
    ).exists()
    assert_same_checkpoint(output / "checkpoint-12", finished / "checkpoint-12")
    shutil.rmtree(output / "checkpoint-12")
    run(output, "--steps=12", *CONFIG, "--resume")
    for path in output.glob("checkpoint-*"):
        shutil.rmtree(path)
    resume(output)
    assert_same_checkpoint(output / "checkpoint-12", finished / "checkpoint-12")
    assert metrics(output) == metrics(finished)


def test_accumulation_equals_a_larger_batch(run, tmp_path):
    """Also where batches hold different numbers of tokens to predict."""
    for index, text in enumerate(TEXTS):
        (tmp_path / "corpus" / str(index)).mkdir(parents=True)
        for start in range(0, 30 * index, 30):
            (tmp_path / "corpus" / str(index) / f"{start}.txt").write_text(text[start : start + 30])
    config = [argument for argument in CONFIG if "dropout" not in argument]
    for name, arguments in (("once", ["--batch-size=4"]), ("twice", ["--batch-size=2", "--accumulate=2"])):
        run(tmp_path / name, "--steps=2", "--eval-share=0", "--data", tmp_path / "corpus", *arguments, *config)
    for one, two in zip(metrics(tmp_path / "once"), metrics(tmp_path / "twice"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def test_bf16_and_checkpointing(run, finished, tmp_path):
    """Close to fp32, and weights stay fp32."""
    run(tmp_path / "run", "--steps=2", "--bf16", "--gradient-checkpointing", *CONFIG)
    outputs = (tmp_path / "run", finished)
    losses = [[line["loss"] for line in metrics(output) if "loss" in line][:2] for output in outputs]
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.01)
    weights = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert {value.dtype for name, value in weights.items() if "hasher" not in name} == {torch.float32}


def test_keep(run, tmp_path):
    run(tmp_path / "run", "--steps=4", "--save-every=1", "--keep=2", "--eval-share=0", *CONFIG)
    kept = {"checkpoint-3", "checkpoint-4"}
    assert names_in(tmp_path / "run") == {*kept, "metrics.jsonl", "run.json", "training_state"}
    assert names_in(tmp_path / "run" / "training_state") == {f"{name}.pt" for name in kept}


def test_tensorboard(run, tmp_path):
    pytest.importorskip("tensorboard")
    run(tmp_path / "run", "--steps=1", *CONFIG)
    assert list((tmp_path / "run").glob("logs/run/events.out.tfevents.*"))


def test_a_dataset_and_a_tokenizer(run, backbone, tmp_path):
    """Rows of a JSONL file and of a saved dataset; a plain tokenizer's folder, then the EngramTokenizer made of it."""
    import datasets

    with (tmp_path / "rows.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": text}) + "\n" for text in TEXTS)
    datasets.Dataset.from_dict({"body": TEXTS}).save_to_disk(tmp_path / "saved")
    arguments = ["--steps=1", "--text-column=body", "--eval-share=0"]
    run(tmp_path / "a", *arguments, "--data", tmp_path / "rows.jsonl", "--tokenizer", backbone, *CONFIG)
    first = tmp_path / "a" / "checkpoint-1"
    assert AutoTokenizer.from_pretrained(first).engram_fields()["engram_layer_ids"] == [0, 1]
    with pytest.raises(SystemExit, match=r"error: .*saved has no column 'text', but \['body'\]"):
        run(tmp_path / "b", "--steps=1", "--data", tmp_path / "saved", *CONFIG)
    arguments += ["--data", tmp_path / "saved", "--tokenizer", first]
    with pytest.raises(SystemExit, match=r"error: --tokenizer .* has a layout of its own, other than --config"):
        run(tmp_path / "b", *arguments, *CONFIG, "engram_n_heads=3")
    run(tmp_path / "b", *arguments, *CONFIG)
    second = tmp_path / "b" / "checkpoint-1"
    assert_same(load_file(second / "model.safetensors"), load_file(first / "model.safetensors"))


def test_from_a_backbone_memory_only(run, backbone, tmp_path):
    """A decoder without memory starts as what it was; with --memory-only it stays, and its memory learns."""
    run(tmp_path / "run", "--steps=4", "--model", backbone, "--config", *MEMORY, "--memory-only")
    before = load_file(backbone / "model.safetensors")
    after = load_file(tmp_path / "run" / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert after["model.layers.0.engram.wkv.weight"][16:].abs().max() > 0


def test_lora_and_resume(run, train, backbone, tmp_path, monkeypatch):
    """Adapter, full modules and table rows: an interrupted run goes on to the bit, wherever its folder was moved, and
    the adapter's base is kept."""
    arguments = ["--steps=6", "--save-every=2", "--model", backbone, "--lora=2", "--config", *MEMORY]
    run(tmp_path / "whole", *arguments)
    save = train.save_checkpoint

    def save_then_stop(args, accelerator, model, tokenizer, optimizer, state):
        save(args, accelerator, model, tokenizer, optimizer, state)
        if state["step"] == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(train, "save_checkpoint", save_then_stop)
        run(tmp_path / "cut", *arguments)
    assert not (tmp_path / "cut" / "checkpoint-6").exists()
    (tmp_path / "cut").rename(tmp_path / "moved")
    run(tmp_path / "moved", *arguments, "--resume")
    folder = tmp_path / "moved" / "checkpoint-6"
    assert_same_checkpoint(folder, tmp_path / "whole" / "checkpoint-6")
    assert metrics(tmp_path / "moved") == metrics(tmp_path / "whole")
    assert not (folder / "model.safetensors").exists() and not (folder / TABLE_DELTA_FILE).exists()
    assert sum(len(rows) for rows in TableDelta.load(folder).rows) > 10

    base_folder = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base_folder == str(tmp_path / "moved" / "base")
    base = EngramForCausalLM.from_pretrained(base_folder).eval()
    assert all(torch.equal(base.state_dict()[n], v) for n, v in load_file(backbone / "model.safetensors").items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS[:2], truncation=True, max_length=32, return_tensors="pt")
    with torch.no_grad():
        before = base(**batch).logits
        model = PeftModel.from_pretrained(base, folder)
        after = model.eval()(**batch).logits
        assert not torch.allclose(before, after, atol=1e-3)
        assert torch.allclose(model.merge_and_unload()(**batch).logits, after, atol=1e-4)


def test_lora_beside_engram_layers_in_full(run, backbone, tmp_path):
    """The adapter holds the Engram layers themselves and LoRA of the others; rows change, and the base does not."""
    run(tmp_path / "run", "--steps=4", "--model", backbone, "--lora=2", "--lora-full", "engram", "--config", *MEMORY)
    folder = tmp_path / "run" / "checkpoint-4"
    adapter = load_file(folder / "adapter_model.safetensors")
    kinds = {name.split(".layers.")[1].partition(".")[2] for name in adapter if "engram_memory" not in name}
    engram = {f"engram.{name}" for name in ("wkv.weight", "q_weight", "k_weight")}
    assert engram < kinds and all("lora_" in name for name in kinds - engram)
    assert any(value.any() for name, value in adapter.items() if name.endswith("wkv.weight"))
    assert len(TableDelta.load(folder).rows[0]) > 10
    base = load_file(tmp_path / "run" / "base" / "model.safetensors")
    assert all(torch.equal(base[name], value) for name, value in load_file(backbone / "model.safetensors").items())
    model = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained(tmp_path / "run" / "base"), folder)
    found = model.base_model.model.model.layers[0].engram.modules_to_save["default"].wkv.weight
    assert torch.equal(found, adapter["base_model.model.model.layers.0.engram.wkv.weight"])


@pytest.mark.parametrize(
    "memory", [["--tables=freeze", "--config", *MEMORY], ["--config", "engram_layer_ids=[]"]], ids=str
)
def test_lora_alone(run, backbone, tmp_path, memory):
    """Without memory, or with frozen tables: an adapter and nothing else, which is resumed, too."""
    arguments = ["--steps=2", "--save-every=1", "--model", backbone, "--lora=2", "--lora-targets", "q_proj", *memory]
    run(tmp_path / "run", *arguments)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoint-2")
    run(tmp_path / "again", *arguments, "--resume")
    assert_same_checkpoint(tmp_path / "again" / "checkpoint-2", tmp_path / "run" / "checkpoint-2")
    names = set(load_file(tmp_path / "run" / "checkpoint-2" / "adapter_model.safetensors"))
    assert names and all("q_proj.lora_" in name for name in names)


def test_the_smallest_vocabulary(run, tmp_path):
    run(tmp_path / "run", "--steps=1", "--vocab-size=257", *CONFIG)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "run" / "checkpoint-1")) == 257


def test_tables_elsewhere_are_trained(run, finished, tmp_path):
    """A model whose config has its tables on disk or in host memory is loaded as one that has not."""
    model = EngramForCausalLM.from_pretrained(finished / "checkpoint-4", engram_placement="disk")
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(finished / "checkpoint-4").save_pretrained(tmp_path / "model")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["engram_placement"] == "disk"
    run(tmp_path / "run", "--steps=2", "--model", tmp_path / "model")
    after = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    name = "model.engram_memory.tables.1.weight"
    assert not torch.equal(load_file(finished / "checkpoint-4" / "model.safetensors")[name], after[name])
