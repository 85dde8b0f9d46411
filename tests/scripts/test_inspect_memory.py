"""scripts/inspect_memory.py: what it writes and prints, and what it refuses before it loads a model."""

import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_engram import EngramConfig, EngramForCausalLM, EngramTokenizer
from hf_engram.inspect import ablate, row_usage, trace_memory


pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "inspect_memory.py"
FILES = ["gate_frequency.png", "gates.png", "index.html", "inspect.json", "row_norms.png", "row_usage.png"]
TEXT = "The while statement is used for repeated execution as long as an expression is true."


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("inspect_memory", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folders(lively_model, tmp_path_factory) -> Path:
    """A folder with the models `one` and `two` of one tokenizer, and `other` of another, and a text."""
    folder = tmp_path_factory.mktemp("inspect")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    for seed, (name, size, fields) in enumerate(
        (("one", 400, {"hc_mult": 4}), ("two", 400, {"hc_mult": 1}), ("other", 380, {"hc_mult": 1}))
    ):
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
        )
        bpe.train_from_iterator([text for _, text in sorted(topics.items())[:20]], trainer)
        plain = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="<eos>")
        tokenizer = EngramTokenizer.from_tokenizer(plain, engram_layer_ids=[0, 2], engram_vocab_size=150)
        model = lively_model(seed=seed, vocab_size=size, **tokenizer.engram_fields(), **fields)
        model.bind_tokenizer(tokenizer).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture
def call(script, folders, tmp_path, monkeypatch):
    """`call(*arguments)`: the script on model `one`, the text and the folder `out`, unless the arguments say else."""

    def run(*arguments) -> None:
        given = [str(argument) for argument in arguments]
        defaults = {"--model": folders / "one", "--text": folders / "text.txt", "--output": tmp_path / "out"}
        for name, value in defaults.items():
            if name not in given:
                given += [name, str(value)]
        monkeypatch.setattr(sys, "argv", ["inspect_memory.py", *given])
        monkeypatch.setattr(script, "DPI", 40)  # the pictures take most of the time
        script.main()

    return run


def load(folder: Path) -> tuple[EngramForCausalLM, EngramTokenizer]:
    return EngramForCausalLM.from_pretrained(folder), EngramTokenizer.from_pretrained(folder)


def test_what_it_writes(call, folders, tmp_path, capsys):
    call("--ablate", "--max-tokens", "30")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    for name in FILES:
        if name.endswith(".png"):
            assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "out" / "inspect.json").read_text(encoding="utf-8"))
    (mine,) = numbers["models"]
    trace, ablation = trace_memory(*load(folders / "one"), TEXT, 30), ablate(*load(folders / "one"), TEXT, 30)
    assert mine["name"] == "one" and mine["tokens"] == trace.pieces and mine["n_tokens_left_out"] == trace.n_cut
    assert mine["ngrams"]["3"][5] == trace.ngram(5, 3) == trace.pieces[3:6]
    for layer, expected in zip(mine["layers"], trace.layers, strict=True):
        np.testing.assert_allclose(layer["gates"], expected.gates, atol=1e-6)
        np.testing.assert_allclose(layer["shares"], expected.shares, atol=1e-6)
        assert layer["row_ids"] == expected.row_ids.tolist()
        assert layer["copies"][3]["gate_mean"] == pytest.approx(float(expected.gates[:, 3].mean()))
        assert layer["row_norms"]["n_sampled"] == layer["row_norms"]["n_rows"]
    rates = [column["collision_rate"] for layer in mine["layers"] for column in layer["row_usage"]]
    assert rates == pytest.approx([usage.collision_rate for usage in row_usage(trace)])
    assert mine["ablation"]["loss"] == pytest.approx(ablation.loss)
    assert mine["ablation"]["without_layer"]["2"] == pytest.approx(ablation.without_layer[2])

    printed = capsys.readouterr().out
    assert f"{trace.n_cut} of {30 + trace.n_cut} tokens were left out: --max-tokens is 30." in printed
    assert f"loss on 29 tokens: {ablation.loss:.4f}, {ablation.without_layer[0]:.4f} without layer 0" in printed
    first = trace.layers[0].gates[:, 0]
    low, high = np.quantile(first, (0.1, 0.9))
    assert re.search(rf"^ +0 +0 +{first.mean():.3f} +{low:.3f} +{high:.3f} ", printed, re.MULTILINE)
    assert str(tmp_path / "out" / "index.html") in printed


def test_two_models_and_an_earlier_run(call, folders, tmp_path, capsys):
    call()
    before = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    call("--compare", folders / "two", "--engram-placement", "disk")
    after = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "<title>Engram memory: one</title>" in before and "<title>Engram memory: one and two</title>" in after
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    numbers = json.loads((tmp_path / "out" / "inspect.json").read_text(encoding="utf-8"))
    assert [len(model["layers"][0]["copies"]) for model in numbers["models"]] == [4, 1]
    assert "\none\nlayer" in (printed := capsys.readouterr().out) and "\ntwo\nlayer" in printed


def test_long_texts(call, folders, tmp_path, capsys):
    (tmp_path / "long.txt").write_text(TEXT * 12, encoding="utf-8")
    call("--text", tmp_path / "long.txt")
    assert (
        "one reads 256 tokens at most (max_position_embeddings): the text was read in 2 pieces"
        in capsys.readouterr().out
    )


def test_names(script):
    assert script.names_of(["runs/a/"]) == ["a"]
    assert script.names_of(["runs/a", "user/b"]) == ["a", "b"]
    assert script.names_of(["x/last", "y/last"]) == ["x/last", "y/last"]
    with pytest.raises(SystemExit, match="--compare names the same model as --model"):
        script.names_of(["x/last", "x/last"])


@pytest.fixture
def without_weights(folders, tmp_path) -> Path:
    """Copies of the models whose weights are gone: what works with them loads none."""
    for name in ("one", "two", "other"):
        shutil.copytree(folders / name, tmp_path / name, ignore=shutil.ignore_patterns("*model*.safetensors"))
    return tmp_path


def test_what_it_refuses_before_any_work(call, without_weights, tmp_path, monkeypatch):
    here = without_weights
    LlamaConfig().save_pretrained(here / "llama")
    (here / "empty.txt").write_text("")
    (here / "latin.txt").write_bytes("café".encode("latin-1"))
    (here / "full").mkdir()
    (here / "run" / "checkpoint-1").mkdir(parents=True)
    (here / "full" / "notes.txt").write_text("mine")
    EngramConfig(engram_layer_ids=[]).save_pretrained(here / "bare")
    for arguments, message in (
        (["--text", here / "nowhere.txt"], "--text .*nowhere.txt cannot be read"),
        (["--text", here / "empty.txt"], "--text .*empty.txt is empty"),
        (["--text", here / "latin.txt"], "--text .*latin.txt is not UTF-8"),
        (["--output", here / "full"], "--output .*full holds files that are not an earlier run's"),
        (["--output", here / "empty.txt"], "--output .*empty.txt is a file"),
        (["--output", here / "empty.txt" / "deep" / "down"], "--output .*down: .*empty.txt is a file"),
        (["--model", here / "llama"], r"llama \(llama\) has no Engram layers"),
        (["--model", here / "run"], "run is the folder of a training run: name one of its checkpoints"),
        (["--model", here / "bare"], r"bare \(engram\) has no Engram layers"),
        (["--compare", here / "other"], "have different tokenizers or token maps"),
        (["--compare", here / "one"], "--compare names the same model as --model"),
        (["--screenshot", here / "picture.jpg"], r"--screenshot .*picture.jpg does not end in .png"),
        (["--screenshot", here / "no" / "picture.png"], "lies in a folder that does not exist"),
    ):
        with pytest.raises(SystemExit, match=f"^error: .*{message}"):
            call("--model", here / "one", *arguments) if "--model" not in arguments else call(*arguments)
    with pytest.raises(SystemExit) as refused:
        call("--model", here / "one", "--device", "nowhere")
    assert refused.value.code == 2
    monkeypatch.setenv("PATH", str(here))
    with pytest.raises(SystemExit, match="A screenshot needs a Chromium browser, and none of chromium"):
        call("--model", here / "one", "--screenshot", here / "picture.png")
    assert not (here / "out").exists() and [path.name for path in (here / "full").iterdir()] == ["notes.txt"]


def test_missing_weights_leave_no_folder(call, without_weights):
    with pytest.raises(SystemExit, match=r"error: .*safetensors"):
        call("--model", without_weights / "one")
    assert not (without_weights / "out").exists()


@pytest.mark.parametrize("what", ["gates", "table rows", "the loss"])
def test_a_model_without_numbers(call, folders, tmp_path, what):
    """Training that has diverged, or a damaged file: no half a report."""
    model, tokenizer = load(folders / "one")
    weights = {
        "gates": model.model.layers[0].mlp.up_proj.weight,
        "table rows": model.model.engram_memory.tables[1].weight,
        "the loss": model.model.norm.weight,
    }
    weight = weights[what].detach()
    # Of a table, only rows that the text does not use: a sample of all is shown, too.
    used = trace_memory(model, tokenizer, TEXT).layers[1].row_ids if what == "table rows" else []
    weight[[row for row in range(len(weight)) if row not in used]] = float("nan")
    model.save_pretrained(tmp_path / "broken")
    tokenizer.save_pretrained(tmp_path / "broken")
    with pytest.raises(SystemExit, match=rf"error: .*broken: {what} .*(finite|is nan).*: its weights are damaged"):
        call("--model", tmp_path / "broken", "--ablate")
    assert not (tmp_path / "out").exists()


def test_a_plain_model(call, tmp_path):
    """One with weights and a tokenizer, but without memory."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=16, **sizes)).save_pretrained(tmp_path / "plain")
    with pytest.raises(SystemExit, match=r"plain \(llama\) has no Engram layers: there is nothing to inspect"):
        call("--model", tmp_path / "plain")


def test_the_token_in_the_picture(script, folders):
    trace = trace_memory(*load(folders / "one"), TEXT)
    fields = dict(part.split("=") for part in script.fragment_for(trace).split("&"))
    assert fields["layer"] == "0" and 0 <= int(fields["token"]) < len(trace)
    assert "token=0&" in script.fragment_for(trace_memory(*load(folders / "one"), "x"))
    # Not one that is out of sight.
    many_lines = trace_memory(*load(folders / "one"), "while\n" * 99)
    token = int(re.search(r"token=(\d+)", script.fragment_for(many_lines))[1])
    assert many_lines.pieces[:token].count("\n") < script.FIRST_LINES


def test_the_readmes_command(script, monkeypatch):
    """Its arguments are the script's, its text is in the repository, and its picture is the README's."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python scripts/inspect_memory.py (?:.*\\\n)*.*", readme, re.MULTILINE)
    monkeypatch.setattr(sys, "argv", shlex.split(command.replace("\\\n", " "))[1:])
    args = script.parse_args()
    assert (ROOT / args.text).is_file() and args.model == "runs/quickstart" and args.ablate
    # Not over the picture that is in the repository.
    picture = Path("docs/images") / args.screenshot
    assert f"]({picture.as_posix()})" in readme
    picture = (ROOT / picture).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) < 300_000
