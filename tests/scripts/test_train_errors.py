"""What scripts/train.py refuses, and what it leaves when it fails."""

import json
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from train_runs import CONFIG, assert_same_checkpoint, state_of

from hf_engram import EngramForCausalLM


@pytest.mark.parametrize("in_hub_folder", [False, True], ids=["state", "hub_folder"])
def test_a_full_disk_leaves_the_last_checkpoint(resume, finished, tmp_path, monkeypatch, in_hub_folder):
    """Files that cannot be written whole: the run stops with an error, what was there before stays, and goes on."""
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    for name in ("checkpoint-4", "checkpoint-12"):
        shutil.rmtree(output / name)
        state_of(output / name).unlink()
    before = sorted(path for path in output.rglob("*") if "logs" not in path.parts)

    def full(model, folder, **_) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError("No space left on device")

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            if in_hub_folder:
                patch.setattr(EngramForCausalLM, "save_pretrained", full)
            else:
                resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
            with pytest.raises(
                SystemExit, match=r"error: .*checkpoint-12(.pt)? could not be written, with .*checkpoint-8: continue"
            ):
                resume(output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path for path in output.rglob("*") if "logs" not in path.parts) == before
    resume(output)
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
        (
            ["--block-size=65", "--model", "backbone"],
            "--block-size 65 exceeds the model's max_position_embeddings, 64",
        ),
        (["--config", "engram_layer_ids=[9]"], "`engram_layer_ids` must be layer indices"),
        (["--tokenizer", "nowhere/nothing"], "nowhere/nothing"),
        (["--model", "nowhere/nothing"], "nowhere/nothing"),
        (["--data", "nowhere.parquet"], "nowhere.parquet"),
        (["--model", "backbone", "--lora=2", "--lora-full", "engrams"], "names engrams, but the model has no such"),
        (["--model", "backbone", "--lora=2", "--lora-targets", "q_projj", "--block-size=32"], "names q_projj"),
    ],
    ids=str,
)
def test_errors(run, backbone, tmp_path, monkeypatch, arguments, message):
    """Named in one line, before any step, and before anything is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text(" \n\n")
    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "backbone").symlink_to(backbone)
    with pytest.raises(SystemExit, match=f"(?i)^error: .*{message}"):
        run(tmp_path / "run", "--steps=1", *arguments)
    assert not (tmp_path / "run").exists()


def test_errors_come_before_work(run, train, backbone, tmp_path, monkeypatch):
    """Blocks for which the model has no positions are refused before the text is read."""

    def read(*_):
        raise AssertionError

    monkeypatch.setattr(train, "read_documents", read)
    for arguments in (["--model", backbone], ["--config", "max_position_embeddings=64"]):
        with pytest.raises(SystemExit, match="error: --block-size 65 exceeds"):
            run(tmp_path / "run", "--block-size=65", *arguments)


def test_a_tokenizer_that_does_not_fit(run, finished, backbone, tmp_path):
    model = finished / "checkpoint-12"
    with pytest.raises(SystemExit, match=r"error: --tokenizer .*backbone0 does not fit .*checkpoint-12: Token '"):
        run(tmp_path / "run", "--steps=1", "--model", model, "--tokenizer", backbone)
    with pytest.raises(
        SystemExit, match=r"error: The tokenizer has 300 token ids, but the model has `vocab_size` 713"
    ):
        run(tmp_path / "run", "--steps=1", "--model", backbone, "--tokenizer", model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora=4"], "--lora needs a --model"),
        (["--lora=4", "--model=x", "--memory-only"], "choose one of --lora and --memory-only"),
        (["--config", "hidden"], "'hidden' is not FIELD=VALUE"),
        (["--config", "hiden_size=3"], "EngramConfig has no field 'hiden_size'; the nearest are hidden_size"),
        (["--config", "engram_heads=3"], "EngramConfig has no field 'engram_heads'; the nearest are engram_n_heads"),
        (["--resume", "--data"], "expected at least one argument"),
        (["--stps=1"], "unrecognized arguments: --stps=1"),
        (["--vocab-size=256"], "--vocab-size must be at least 257 (256 bytes, and <|endoftext|>), got 256"),
        (["--steps=0"], "0 is below 1"),
        (["--block-size=1"], "--block-size must be at least 2"),
        (["--eval-share=1"], r"--eval-share must be in \[0, 1\)"),
    ],
)
def test_arguments(run, tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "run", *arguments)
    error = capsys.readouterr().err
    assert message.replace("\\", "") in error
    assert error.startswith("error: ") and error.count("\n") == 1 and len(error) < 250
    assert not (tmp_path / "run").exists()


def test_help_says_how_texts_are_split(train):
    words = " ".join(train.make_parser().format_help().split())
    assert "a text file is one document, and so is a dataset's row" in words
    assert "is held out; where that is less than one, the end of each" in words


def test_no_run_to_resume(resume, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        resume(tmp_path / "run")
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'run'} holds no run to resume")


def test_what_is_not_there(run, tmp_path):
    """A mistyped path is no dataset on the Hub, and an adapter no model."""
    with pytest.raises(SystemExit, match="does not exist"):
        run(tmp_path / "run", "--data", "nofile.txt", *CONFIG)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(SystemExit):
        run(tmp_path / "run", "--model", tmp_path / "adapter")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE = {
    "half a run.json": (lambda run: truncate(run / "run.json"), "run.json is not JSON"),
    "no run in run.json": (lambda run: (run / "run.json").write_text("[1]"), "run.json holds no arguments of a run"),
    "a number for a name": (lambda run: edit_json(run / "run.json", model=5), "not int"),
    "no processes": (lambda run: edit_json(run / "run.json", processes=None), "processes was None, is 1"),
    "an empty state": (lambda run: state_of(run / "checkpoint-12").write_bytes(b""), "12.pt is damaged"),
    "half a state": (lambda run: truncate(state_of(run / "checkpoint-12")), "12.pt is damaged .* or remove .*-12"),
    "no state": (lambda run: torch.save({}, state_of(run / "checkpoint-12")), "12.pt holds no state of a run"),
    "no weights": (
        lambda run: (run / "checkpoint-12" / "model.safetensors").unlink(),
        "not written with the weights in",
    ),
    "half the weights": (
        lambda run: truncate(run / "checkpoint-12" / "model.safetensors"),
        "not written with the weights",
    ),
    "no config": (lambda run: (run / "checkpoint-12" / "config.json").unlink(), "--resume .*-12 cannot be loaded"),
    "metrics": (lambda run: (run / "metrics.jsonl").write_text('{"loss": 1}\n'), "has a line that is none of a run's"),
}


def edit_json(path: Path, **fields) -> None:
    """Changes fields; None removes them."""
    changed = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files(resume, finished, tmp_path, case):
    """Named in one line; what is there stays as it is."""
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    damage, message = DAMAGE[case]
    damage(output)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        resume(output)
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


def test_memory_only_without_memory(run, backbone, tmp_path):
    with pytest.raises(SystemExit, match="error: --memory-only: the model has no memory to train"):
        run(tmp_path / "run", "--model", backbone, "--memory-only", "--config", "engram_layer_ids=[]")
    assert not (tmp_path / "run").exists()


def test_resume_of_another_run_is_refused(run, resume, finished, tmp_path):
    output = tmp_path / "run"
    shutil.copytree(finished, output)
    before = sorted(output.rglob("*"))
    with pytest.raises(SystemExit, match=r"error: .*run holds checkpoint-12: add --resume"):
        run(output, "--steps=12", *CONFIG)
    with pytest.raises(SystemExit, match=r"error: --resume continues the same run, but steps was 12, is 13: restore"):
        run(output, "--steps=13", *CONFIG, "--resume")
    with pytest.raises(
        SystemExit, match=r"error: --resume continues .* but bf16 was False, is True, lr was 0.01, is 1"
    ):
        resume(output, "--lr=1", "--bf16")
    state = torch.load(state_of(output / "checkpoint-12"), weights_only=True)
    torch.save({**state, "data_sha256": "0"}, state_of(output / "checkpoint-12"))
    with pytest.raises(SystemExit, match=r"error: --data has changed since .*checkpoint-12 was written"):
        resume(output)
    state_of(output / "checkpoint-12").unlink()
    with pytest.raises(SystemExit, match=r"error: .*checkpoint-12.pt is missing, .* begin another with --model .*-12"):
        resume(output)
    (output / "run.json").unlink()
    with pytest.raises(SystemExit, match=r"error: .*run.json is missing, .* begin another with --model .*-12"):
        run(output, "--steps=12", *CONFIG, "--resume")
    assert sorted(output.rglob("*")) == [p for p in before if p.name not in ("run.json", "checkpoint-12.pt")]
