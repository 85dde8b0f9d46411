"""scripts/convert_backbone.py: a folder in, a Hub folder out; what it refuses, and that it then leaves nothing."""

import importlib.util
import os
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert_backbone.py"
SMALL = ["--engram-layer-ids", "1", "3", "--engram-vocab-size=50", "--engram-n-heads=2", "--engram-head-dim=8"]

USE_HUB_FOLDER = """
import sys
sys.modules["hf_engram"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, path = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
batch = tokenizer("The word", return_tensors="pt")
assert batch["hash_ids"].shape[2:] == (2, 4), batch["hash_ids"].shape
assert torch.equal(model(**batch).logits, torch.load(path))
"""


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("convert_backbone", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def call(script, monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["convert_backbone.py", *map(str, arguments)])
    script.main()


def test_it_makes_a_hub_folder(tmp_path, backbone_folder, script, monkeypatch, capsys):
    """Which loads without this package, and gives the backbone's logits."""
    call(script, monkeypatch, backbone_folder, tmp_path / "out", *SMALL)
    printed = capsys.readouterr().out
    assert "memory in layers 1, 3 of 4" in printed
    assert "largest difference from the backbone's logits: 0, on" in printed
    tokens = AutoTokenizer.from_pretrained(backbone_folder)("The word", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        torch.save(AutoModelForCausalLM.from_pretrained(backbone_folder)(tokens).logits, tmp_path / "logits.pt")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "hf_home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USE_HUB_FOLDER, "out", "logits.pt"]
    used = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert used.returncode == 0, used.stderr


def test_several_copies_and_a_seed(tmp_path, backbone_folder, script, monkeypatch, capsys):
    arguments = [backbone_folder, tmp_path / "out", "--hc-mult=4", "--tokenizer", backbone_folder, *SMALL]
    call(script, monkeypatch, *arguments)
    call(script, monkeypatch, backbone_folder, tmp_path / "again", *arguments[2:])
    call(script, monkeypatch, backbone_folder, tmp_path / "other", *arguments[2:], "--seed=1")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again", "other")]
    assert weights[0] == weights[1] != weights[2]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.hc_mult == 4


def test_defaults(tmp_path, backbone_folder, script, monkeypatch):
    call(script, monkeypatch, backbone_folder, tmp_path / "out")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out").config
    assert (config.engram_layer_ids, config.hc_mult, config.engram_vocab_size) == ([1, 2], 1, 20000)


def test_the_size_it_reckons_with(tmp_path, backbone_folder, script, monkeypatch):
    """Within a percent of what is written, in the checkpoint's dtype, with tied embeddings counted once."""
    model = AutoModelForCausalLM.from_pretrained(backbone_folder)
    model.to(torch.bfloat16).save_pretrained(backbone_folder)
    seen = []
    monkeypatch.setattr(script, "check_disk", lambda folder, needed: seen.append(needed - script.OTHER_FILES_BYTES))
    for name in ("1", "4"):
        call(script, monkeypatch, backbone_folder, tmp_path / name, "--hc-mult", name)
        written = (tmp_path / name / "model.safetensors").stat().st_size
        assert abs(seen[-1] - written) < 0.01 * written


def test_it_refuses_to_overwrite(tmp_path, backbone_folder, script, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").write_text("mine")
    for name, message in (("file", "is a file"), ("folder", "would be overwritten")):
        with pytest.raises(SystemExit, match=f"error: .*{name} .*{message}|error: .*{message}"):
            call(script, monkeypatch, backbone_folder, tmp_path / name, *SMALL)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engram-layer-ids", "9"], r"error: `engram_layer_ids` must be layer indices in \[0, 4\)"),
        (["--engram-max-ngram-size", "1"], "error: `engram_max_ngram_size` must be an integer >= 2"),
        (["--tokenizer", "nowhere/nothing"], "error: "),
    ],
)
def test_errors_come_before_any_work(tmp_path, backbone_folder, script, monkeypatch, arguments, message):
    (backbone_folder / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match=message):
        call(script, monkeypatch, backbone_folder, tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_not_enough_disk(tmp_path, backbone_folder, script, monkeypatch):
    (backbone_folder / "model.safetensors").unlink()
    usage = namedtuple("usage", ["total", "used", "free"])(100, 0, 2**20)
    monkeypatch.setattr(script.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(SystemExit, match=r"error: the result takes about 0.\d+ GiB, but .* has 0.00 GiB left"):
        call(script, monkeypatch, backbone_folder, tmp_path / "a" / "b", *SMALL)
    assert not (tmp_path / "a").exists()


def test_a_model_that_differs_is_not_saved(tmp_path, backbone_folder, script, monkeypatch):
    """The comparison can fail."""
    convert = script.convert_backbone

    def wrong(*args, **kwargs):
        model, tokenizer = convert(*args, **kwargs)
        with torch.no_grad():
            model.model.layers[1].engram.wkv.weight.normal_()
        return model, tokenizer

    monkeypatch.setattr(script, "convert_backbone", wrong)
    with pytest.raises(SystemExit, match="nothing saved"):
        call(script, monkeypatch, backbone_folder, tmp_path / "out", *SMALL)
    assert not (tmp_path / "out").exists()


def test_help(script, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        call(script, monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert "seed_oss" in shown and "--engram-vocab-size ROWS" in shown and "(default: 20000)" in shown
