"""The quick start: what it writes, that it repeats itself, and (slow) that the memory pays."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "quickstart.py"
TINY = ["--steps=4", "--batch-size=2", "--block-size=64", "--max-files=12", "--held-out-blocks=4", "--vocab-size=400",
        "--new-tokens=4"]  # fmt: skip

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


def run_quickstart(folder: Path, *arguments: str, timeout: int = 300) -> subprocess.CompletedProcess:
    """Runs the script in `folder`, with the copies of remote code that Transformers makes inside it too."""
    environment = {**os.environ, "HF_HOME": str(folder / "hf_home")}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """A tiny run's working folder and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    run = run_quickstart(folder, *TINY, "--output=out")
    assert run.returncode == 0, run.stderr
    return folder, run.stdout


@pytest.fixture(scope="module")
def quickstart():
    """The script as a module. It sets two variables for its own process; here they are put back."""
    spec = importlib.util.spec_from_file_location("quickstart", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        spec.loader.exec_module(module)
    return module


def test_it_writes_a_hub_folder_a_plot_and_figures(finished):
    folder, _ = finished
    names = {path.name for path in (folder / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert any(name.endswith(".safetensors") and name.startswith("model") for name in names)
    assert {"configuration_engram.py", "modeling_engram.py", "tokenization_engram.py"} <= names
    assert (folder / "out" / "quickstart.png").read_bytes().startswith(b"\x89PNG")
    assert len(AutoTokenizer.from_pretrained(folder / "out")) == 400


def test_its_figures_agree_with_its_verdict(finished):
    folder, printed = finished
    figures = json.loads((folder / "out" / "quickstart.json").read_text())
    first, last = figures["curves"][0], figures["curves"][-1]
    assert [point["step"] for point in figures["curves"]] == [0, 1, 2, 3, 4]
    # The twins start as the same function.
    assert first["with memory"] == pytest.approx(first["without memory"], abs=1e-5)
    assert figures["gain"] == pytest.approx(last["without memory"] - last["with memory"])
    *_, losses, difference, output = printed.splitlines()
    assert f"{last['with memory']:.3f} with memory, {last['without memory']:.3f} without memory" in losses
    assert f"{figures['gain']:.3f} nats" in difference
    assert output == f"output folder: {(folder / 'out').resolve()}"
    assert figures["fresh_process"]["text"] in printed


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_and_text_in_the_same_folder(finished):
    folder, _ = finished
    before = json.loads((folder / "out" / "quickstart.json").read_text())
    run = run_quickstart(folder, *TINY, "--output=out")
    assert run.returncode == 0, run.stderr
    after = json.loads((folder / "out" / "quickstart.json").read_text())
    for name in ("curves", "fresh_process", "train_files", "held_out_files"):
        assert after[name] == before[name]


def test_it_refuses_a_folder_that_holds_something_else(quickstart, tmp_path):
    (tmp_path / "precious.txt").write_text("keep me")
    with pytest.raises(SystemExit, match="holds files that are not an earlier run's"):
        quickstart.prepare_output(tmp_path)
    with pytest.raises(SystemExit, match="is a file"):
        quickstart.prepare_output(tmp_path / "precious.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["precious.txt"]


def test_no_file_is_both_trained_on_and_held_out(quickstart):
    names = [f"module_{i}.py" for i in range(95)] + [quickstart.TOPICS]
    train, held_out = quickstart.split_files(names, seed=0)
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(names)
    assert len(held_out) == 10 and quickstart.TOPICS in train
    assert quickstart.split_files(names[::-1], seed=0) == (train, held_out)
    assert quickstart.split_files(names, seed=1) != (train, held_out)


def test_the_corpus_is_the_standard_librarys_own_modules(quickstart):
    corpus = quickstart.read_corpus()
    assert {quickstart.TOPICS, "argparse.py", "json/decoder.py"} <= corpus.keys()
    assert not [name for name in corpus if "site-packages" in name or "/test" in name or "_sysconfigdata" in name]
    assert sum(map(len, corpus.values())) > 4_000_000


def test_a_block_lies_in_one_file(quickstart):
    texts = ["alpha beta " * 30, "", "gamma delta " * 20]
    tokenizer = quickstart.train_tokenizer(texts, vocab_size=300)
    blocks = quickstart.cut_blocks(tokenizer, texts, length=8)
    assert blocks.shape[1] == 8 and len(blocks) > 4
    for block in tokenizer.batch_decode(blocks.tolist()):
        assert any(block in text for text in texts)


@pytest.mark.slow
def test_the_memory_saves_at_least_0_4_nats(tmp_path):
    run = run_quickstart(tmp_path, timeout=3600)
    assert run.returncode == 0, run.stderr
    figures = json.loads((tmp_path / "runs" / "quickstart" / "quickstart.json").read_text())
    assert figures["gain"] >= 0.4
