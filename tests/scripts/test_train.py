"""The training script: what it writes, that a killed run goes on bit for bit, and what it refuses."""

import ast
import contextlib
import importlib.util
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_engram import EngramForCausalLM, EngramTokenizer
from hf_engram.adapters import TABLE_DELTA_FILE, load_table_delta


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"
TEXTS = [text[:1200] for text in list(topics.values())[:12]]
MEMORY = ["engram_layer_ids=[0,1]", "engram_vocab_size=60", "engram_n_heads=2", "engram_head_dim=8"]
CONFIG = ["--config", "hidden_size=16", "intermediate_size=32", "num_hidden_layers=2", "num_attention_heads=2",
          "attention_dropout=0.1", "hc_mult=2", *MEMORY]  # fmt: skip
RUN = ["--vocab-size=300", "--block-size=32", "--batch-size=2", "--warmup=2", "--lr=0.01", "--log-every=1",
       "--eval-every=4", "--eval-blocks=4", "--save-every=4", "--keep=9"]  # fmt: skip


@pytest.fixture(scope="module")
def train():
    spec = importlib.util.spec_from_file_location("train", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def finished(train, corpus, tmp_path_factory) -> Path:
    """The output of an uninterrupted run of twelve steps."""
    output = tmp_path_factory.mktemp("finished") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py", str(output), "--data", str(corpus), "--steps=12", *RUN, *CONFIG])
        AcceleratorState._reset_state(reset_partial_state=True)
        train.main()
    return output


@pytest.fixture(scope="module")
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


def names_in(output: Path) -> set[str]:
    """Of what a run leaves, apart from TensorBoard's logs, where that is installed."""
    return {path.name for path in output.iterdir()} - {"logs"}


def metrics(output: Path) -> list[dict]:
    """Everything that was logged, but for the speed."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def assert_same(actual, expected, where: str = "") -> None:
    """Equal to the bit, through dicts and lists."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, values in enumerate(zip(actual, expected, strict=True)):
            assert_same(*values, f"{where}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(actual, expected), where
    else:
        assert actual == expected, where


def assert_same_checkpoint(actual: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir()}
    assert {path.name for path in actual.iterdir()} == names
    weights = sorted(name for name in names if name.endswith(".safetensors"))
    assert weights
    for name in weights:
        assert_same(load_file(actual / name), load_file(expected / name), name)
    states = [torch.load(folder / "training_state.pt", weights_only=True) for folder in (actual, expected)]
    assert states[1]["optimizer"]["state"]
    assert_same(*({k: v for k, v in state.items() if k != "base"} for state in states))


def test_checkpoints_are_hub_folders(finished):
    """Each loads by itself, computes what the script computed, and nothing else lies around."""
    assert names_in(finished) == {*(f"checkpoint-{i}" for i in (4, 8, 12)), "metrics.jsonl"}
    folder = finished / "checkpoint-12"
    assert {"config.json", "modeling_engram.py", "tokenization_engram.py", "README.md"} <= set(os.listdir(folder))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, EngramTokenizer) and len(tokenizer) == 300
    batch = tokenizer(TEXTS[:2], padding=True, return_tensors="pt")
    without = {name: value for name, value in batch.items() if name != "hash_ids"}
    with torch.no_grad():
        assert torch.equal(model(**batch).logits, model(**without).logits)


def test_it_learns(finished):
    losses = {line["step"]: line["eval_loss"] for line in metrics(finished) if "eval_loss" in line}
    assert list(losses) == [0, 4, 8, 12]
    assert losses[0] == pytest.approx(5.7, abs=0.1)  # log(300)
    assert losses[12] < losses[4] < losses[0] - 0.05
    assert [line["step"] for line in metrics(finished) if "loss" in line] == list(range(1, 13))
    tables = [load_file(finished / f"checkpoint-{i}" / "model.safetensors") for i in (4, 12)]
    name = "model.engram_memory.tables.1.weight"
    assert not torch.equal(tables[0][name], tables[1][name])


def test_evaluation_equals_documents_alone(train, finished):
    """The loss of packed blocks is that of their documents, each alone: nothing is seen across a boundary."""
    model = AutoModelForCausalLM.from_pretrained(finished / "checkpoint-12").eval()
    tokenizer = AutoTokenizer.from_pretrained(finished / "checkpoint-12")
    with torch.no_grad():
        for table in model.model.engram_memory.tables:  # so that n-grams matter
            table.weight.normal_()
        for layer in model.model.layers:
            layer.engram.wkv.weight.normal_(std=0.3)
    texts = [text[:40] for text in TEXTS]
    blocks = train.pack(tokenizer, texts, 64, "text")
    n_blocks = len(blocks["input_ids"])
    assert n_blocks >= 2
    batch = train.make_batch(blocks, list(range(n_blocks)), torch.device("cpu"))
    assert (batch["position_ids"] == 0).sum() > 2 * n_blocks
    total, targets = 0.0, 0
    with torch.no_grad():
        packed = model(**batch, use_cache=False)
        for ids, positions, logits in zip(batch["input_ids"], batch["position_ids"], packed.logits, strict=True):
            starts = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
            for start, stop in itertools.pairwise(starts):
                alone = model(input_ids=ids[None, start:stop], labels=ids[None, start:stop])
                torch.testing.assert_close(logits[start:stop], alone.logits[0], rtol=1e-4, atol=1e-4)
                if stop - start > 1:
                    total += alone.loss.item() * (stop - start - 1)
                    targets += stop - start - 1
    assert packed.loss.item() == pytest.approx(total / targets, abs=1e-4)


def test_packing(train, finished):
    """Documents follow each other with an end of text, positions restart with documents and blocks."""
    tokenizer = AutoTokenizer.from_pretrained(finished / "checkpoint-4")
    eos = tokenizer.eos_token_id
    rows = [tokenizer(text)["input_ids"] for text in ("a b c", "d", "e f g h i j")]
    stream = [token for row in rows for token in [*row, eos]]
    blocks = train.pack(tokenizer, ["a b c", "d", "e f g h i j"], 7, "text")
    n = len(stream) // 7
    assert blocks["input_ids"].flatten().tolist() == stream[: 7 * n]
    positions = [i for row in rows for i in range(len(row) + 1)][: 7 * n]
    expected = []
    for i, position in enumerate(positions):
        expected.append(0 if position == 0 or i % 7 == 0 else expected[-1] + 1)
    assert blocks["position_ids"].flatten().tolist() == expected
    labels = train.make_batch(blocks, [1, 0], torch.device("cpu"))["labels"]
    assert (labels == -100).tolist() == (blocks["position_ids"][[1, 0]] == 0).tolist()


def test_every_epoch_takes_every_block_once(train):
    taken = [train.step_indices(10, 3, step, 4) for step in range(5)]
    flat = [index for step in taken for index in step]
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert taken[0] != train.step_indices(10, 4, 0, 4)


def test_kill_9_and_resume(run, corpus, finished, tmp_path):
    """Killed while it trains or saves, the run goes on to the same weights, optimizer and losses, to the bit."""
    output = tmp_path / "run"
    command = [sys.executable, str(SCRIPT), str(output), "--data", str(corpus), "--steps=12", *RUN, *CONFIG]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
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
    with (output / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    run(output, "--steps=12", *CONFIG, "--resume")
    assert_same_checkpoint(output / "checkpoint-12", finished / "checkpoint-12")
    assert metrics(output) == metrics(finished)
    assert not list(output.glob(".*"))


def test_resume_of_another_run_is_refused(run, finished, corpus, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    with pytest.raises(SystemExit, match=r"error: .*run holds checkpoint-12: add --resume"):
        run(output, "--steps=12", *CONFIG)
    with pytest.raises(SystemExit, match=r"error: --resume continues the same run, but steps was 12, is 13: restore"):
        run(output, "--steps=13", *CONFIG, "--resume")
    changed = tmp_path / "corpus"
    shutil.copytree(corpus, changed)
    state = torch.load(output / "checkpoint-12" / "training_state.pt", weights_only=True)
    state["data_sha256"] = "0"
    torch.save(state, output / "checkpoint-12" / "training_state.pt")
    with pytest.raises(SystemExit, match=r"error: --data has changed since .*checkpoint-12 was written"):
        run(output, "--steps=12", *CONFIG, "--resume")


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
    assert names_in(tmp_path / "run") == {"checkpoint-3", "checkpoint-4", "metrics.jsonl"}


def test_hold_out(train):
    """By document, and of few documents by their ends."""
    many = [str(i) * 10 for i in range(40)]
    kept, held_out = train.hold_out(many, 0.05, 0)
    assert len(held_out) == 2 and sorted(kept + held_out) == sorted(many)
    assert (kept, held_out) == train.hold_out(many, 0.05, 0) != train.hold_out(many, 0.05, 1)
    assert train.hold_out(["a" * 19 + "b", "c" * 38 + "dd"], 0.05, 0) == (["a" * 19, "c" * 38], ["b", "dd"])


def test_folders(train, tmp_path, capsys):
    """All text below, in order; nothing hidden; files that are no text are named."""
    for name in ("b.txt", "a/z.md", "a/b.py", ".git/config", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    assert train.read_documents([str(tmp_path)], "text", "train") == ["a/b.py", "a/z.md", "b.txt"]
    assert "skipped 1 files that are not UTF-8 text" in capsys.readouterr().out
    assert train.read_documents([str(tmp_path / ".hidden")], "text", "train") == [".hidden"]


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
    """Adapter, full modules and table rows: an interrupted run goes on to the bit, and the adapter's base is kept."""
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
    run(tmp_path / "cut", *arguments, "--resume")
    folder = tmp_path / "cut" / "checkpoint-6"
    assert_same_checkpoint(folder, tmp_path / "whole" / "checkpoint-6")
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert not (folder / "model.safetensors").exists() and (folder / TABLE_DELTA_FILE).is_file()

    base_folder = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    base = EngramForCausalLM.from_pretrained(base_folder).eval()
    assert all(torch.equal(base.state_dict()[n], v) for n, v in load_file(backbone / "model.safetensors").items())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(TEXTS[:2], truncation=True, max_length=32, return_tensors="pt")
    with torch.no_grad():
        before = base(**batch).logits
        model = PeftModel.from_pretrained(base, folder)
        load_table_delta(model, folder)
        after = model.eval()(**batch).logits
        assert not torch.allclose(before, after, atol=1e-3)
        assert torch.allclose(model.merge_and_unload()(**batch).logits, after, atol=1e-4)


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
    assert not (tmp_path / "run" / "checkpoint-2" / TABLE_DELTA_FILE).exists()


def test_a_full_disk_leaves_the_last_checkpoint(run, finished, tmp_path):
    """Files that cannot be written whole: the run stops with an error, what was there before stays, and goes on."""
    output = tmp_path / "run"
    output.mkdir()
    shutil.copytree(finished / "checkpoint-8", output / "checkpoint-8")
    shutil.copy(finished / "metrics.jsonl", output)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(
            SystemExit, match=r"error: .*checkpoint-12 could not be written, with .*checkpoint-8: continue"
        ):
            run(output, "--steps=12", *CONFIG, "--resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names_in(output) == {"checkpoint-8", "metrics.jsonl"}
    run(output, "--steps=12", *CONFIG, "--resume")
    assert_same_checkpoint(output / "checkpoint-12", finished / "checkpoint-12")


def test_a_loss_that_is_not_finite(run, tmp_path):
    """The step is not taken, and the checkpoint before it is whole."""
    with pytest.raises(SystemExit, match=r"error: at step \d the loss is .*nan.*Lower --lr .*checkpoint-1"):
        run(tmp_path / "run", "--steps=4", "--save-every=1", "--lr=1e30", "--warmup=0", "--eval-share=0", *CONFIG)
    EngramForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "empty"], "empty holds no text"),
        (["--data", "blank.txt"], r"blank.txt holds no text"),
        (["--data", "short.txt"], r"the training text has \d+ tokens, fewer than one block: give more text"),
        (["--eval-data", "short.txt"], r"the held-out text has \d+ tokens, fewer than one block"),
        (["--block-size=4096", "--config", "max_position_embeddings=64"], "--block-size 4096 exceeds"),
        (["--config", "engram_layer_ids=[9]"], "`engram_layer_ids` must be layer indices"),
        (["--tokenizer", "nowhere/nothing"], "nowhere/nothing"),
        (["--model", "nowhere/nothing"], "nowhere/nothing"),
        (["--data", "nowhere.parquet"], "nowhere.parquet"),
    ],
    ids=str,
)
def test_errors(run, tmp_path, monkeypatch, arguments, message):
    """Named in one line, before any step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(SystemExit, match=f"(?i)error: .*{message}"):
        run(tmp_path / "run", "--steps=1", *arguments)
    assert not list((tmp_path / "run").glob("*"))


def test_a_tokenizer_that_does_not_fit(run, finished, backbone, tmp_path):
    model = finished / "checkpoint-12"
    with pytest.raises(SystemExit, match=r"error: --tokenizer .*backbone0 does not fit .*checkpoint-12: Token '"):
        run(tmp_path / "run", "--steps=1", "--model", model, "--tokenizer", backbone)
    with pytest.raises(SystemExit, match=r"error: The tokenizer's `eos_token_id` is 0, the backbone's is"):
        run(tmp_path / "run", "--steps=1", "--model", backbone, "--tokenizer", model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora=4"], "--lora needs a --model"),
        (["--lora=4", "--model=x", "--memory-only"], "choose one of --lora and --memory-only"),
        (["--config", "hidden=3"], "'hidden=3' is not FIELD=VALUE"),
        (["--steps=0"], "0 is below 1"),
        (["--block-size=1"], "--block-size must be at least 2"),
        (["--eval-share=1"], r"--eval-share must be in \[0, 1\)"),
    ],
)
def test_arguments(run, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "run", *arguments)
    assert message.replace("\\", "") in capsys.readouterr().err


@pytest.mark.slow
def test_two_processes(run, corpus, tmp_path):
    """Data parallel on two processes: the losses of one process with twice the batch."""
    config = [argument for argument in CONFIG if "dropout" not in argument]
    arguments = ["--data", str(corpus), *RUN, "--steps=2", *config]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command = [*launch, str(SCRIPT), str(tmp_path / "two"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    run(tmp_path / "one", "--steps=2", "--batch-size=4", *config)
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert one == pytest.approx(two, rel=1e-5)


def test_trainer_example(finished, tmp_path):
    """examples/trainer.py, as a person runs it: the loss falls, rows change, and the output is a Hub folder."""
    script = SCRIPT.parents[1] / "examples" / "trainer.py"
    (tmp_path / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    folder = finished / "checkpoint-12"
    command = [sys.executable, str(script), str(folder), "text.txt", "out"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(ast.literal_eval(line)["loss"]) for line in done.stdout.splitlines() if line.startswith("{'loss'")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.1
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "out"))
    name = "model.engram_memory.tables.0.weight"
    changed = (before[name] != after[name]).any(1)
    assert changed.any()
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) == 300
    assert (tmp_path / "out" / "modeling_engram.py").is_file()


def test_cards_name_their_checkpoint(finished):
    """What the card tells a reader to load is the folder that it lies in."""
    card = (finished / "checkpoint-12" / "README.md").read_text(encoding="utf-8")
    assert "checkpoint-12" in card and ".tmp" not in card


def test_what_is_not_there(run, tmp_path):
    """A mistyped path is no dataset on the Hub, and an adapter no model."""
    with pytest.raises(SystemExit, match="does not exist"):
        run(tmp_path / "run", "--data", "nofile.txt", *CONFIG)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", "--model", tmp_path / "adapter")
