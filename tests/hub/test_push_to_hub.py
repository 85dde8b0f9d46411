"""scripts/push_to_hub.py against a Hub on loopback: what it uploads, loads by its id; what it refuses, stays here."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hub_server import HubServer
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from safetensors.torch import load_file, save_file


SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "push_to_hub.py"
REPO = "someone/some-model"

LOAD_BY_ID = """
import sys
sys.modules["hf_engram"] = None  # importing it fails
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

remote = {"trust_remote_code": True}
for repo_id, revision, placement, path in eval(sys.argv[1]):
    expected = torch.load(path)
    tokenizer = AutoTokenizer.from_pretrained(repo_id, revision=revision, **remote)
    model = AutoModelForCausalLM.from_pretrained(repo_id, revision=revision, engram_placement=placement, **remote)
    tables = model.model.engram_memory.tables
    assert {table.placement for table in tables} == {placement}
    inputs = tokenizer("The cat sat on the mat", return_tensors="pt")
    assert torch.equal(inputs["hash_ids"], expected["hash_ids"]), repo_id
    assert torch.equal(model(**inputs).logits, expected["logits"]), repo_id
    model.generate(**inputs, max_new_tokens=2)
"""


@pytest.fixture
def load_by_id(environment, tokenizer, logits_of, tmp_path):
    """`load_by_id((repo_id, revision, placement, model), ...)`: in one process, as said above, and compared."""

    def load(*asked: tuple) -> None:
        hash_ids = tokenizer("The cat sat on the mat", return_tensors="pt")["hash_ids"]
        for i, (*_, model) in enumerate(asked):
            torch.save({"logits": logits_of(model), "hash_ids": hash_ids}, tmp_path / f"{i}.pt")
        request = repr([(*item[:3], str(tmp_path / f"{i}.pt")) for i, item in enumerate(asked)])
        command = [sys.executable, "-c", LOAD_BY_ID, request]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr

    return load


def test_end_to_end(make_folder, load_by_id, hub, environment, tmp_path):
    """The command, and then `from_pretrained("owner/name")` in a process without this package and with an empty cache:
    logits and hash ids are the same bit for bit."""
    model = make_folder(tmp_path / "folder")
    command = [sys.executable, str(SCRIPT), "folder", REPO, "--private"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert f"done: {hub.url}/{REPO}/commit/" in done.stdout
    assert hub.repositories[REPO].private
    load_by_id((REPO, "main", "device", model))


def test_branch_and_tables_on_disk(make_folder, push, load_by_id, tmp_path):
    """The same from a branch, and with fp8 tables that stay in the cache's file."""
    plain, fp8 = make_folder(tmp_path / "plain", seed=1), make_folder(tmp_path / "fp8", fp8=True)
    push(tmp_path / "plain", REPO, "--revision", "step-2")
    push(tmp_path / "fp8", "someone/fp8")
    load_by_id((REPO, "step-2", "cpu", plain), ("someone/fp8", "main", "disk", fp8))


def test_what_is_uploaded(folder, push, hub, tmp_path, capsys):
    """Every file but training state, temporary and hidden ones, which are listed; in one commit; the card under the
    Hub's name, while the folder stays as it is."""
    work = shutil.copytree(folder, tmp_path / "work")
    left_out = ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", ".secret", "half.tmp"]
    for name in left_out:
        (work / name).write_text("x")
    (work / "checkpoint-5").mkdir()
    (work / "checkpoint-5" / "model.safetensors").write_text("x")
    before = {path.name: path.read_bytes() for path in work.iterdir() if path.is_file()}
    push(work, REPO)
    printed = capsys.readouterr().out
    assert hub.files(REPO) == {path.name for path in folder.iterdir()}
    for name in hub.files(REPO) - {"README.md"}:
        assert hub.read(REPO, name) == before[name]
    for name in (*left_out, "checkpoint-5"):
        assert f"left out: {name} (" in printed
    assert "checkpoint-5/" not in printed
    card = hub.read(REPO, "README.md").decode()
    assert f"# {REPO}\n" in card and card.count(f'from_pretrained("{REPO}"') == 2 and "my-engram" not in card
    assert {path.name: path.read_bytes() for path in work.iterdir() if path.is_file()} == before
    assert hub.repositories[REPO].messages == ["initial commit", "Upload work"]


def test_private(folder, push, hub, use_hub, capsys):
    """A private repository is nobody else's; one that is public already is not uploaded to as if it were private."""
    push(folder, REPO, "--private")
    with pytest.raises(RepositoryNotFoundError):
        HfApi(token=False).model_info(REPO)
    push(folder, "someone/public")
    assert HfApi(token=False).model_info("someone/public").private is False
    requests = len(hub.requests)
    with pytest.raises(SystemExit, match="error: --private: someone/public exists and is public"):
        push(folder, "someone/public", "--private")
    assert not any(request.startswith("POST") for request in hub.requests[requests:])


def test_revision(folder, make_folder, push, hub, tmp_path):
    """A branch is made if it is missing, written to again if it is there, and main stays."""
    push(folder, REPO)
    main = hub.read(REPO, "model.safetensors")
    for seed in (1, 2):
        make_folder(tmp_path / "other", seed=seed)
        push(tmp_path / "other", REPO, "--revision", "try/other")
        assert hub.read(REPO, "model.safetensors", "try/other") == (tmp_path / "other/model.safetensors").read_bytes()
    assert hub.read(REPO, "model.safetensors") == main


def test_second_push(folder, make_folder, push, hub, tmp_path):
    """Files and card are brought up to date, and shards that are no longer part of the checkpoint are removed, as is
    a single file that would be loaded in their place; other files stay."""
    push(folder, REPO)
    hub.write(REPO, "notes.txt", "kept")
    make_folder(tmp_path / "sharded", seed=1, save={"max_shard_size": "20KB"}, num_hidden_layers=4)
    push(tmp_path / "sharded", REPO)
    shards = {name for name in hub.files(REPO) if name.endswith(".safetensors")} - {"engram_token_map.safetensors"}
    index = json.loads(hub.read(REPO, "model.safetensors.index.json"))
    assert shards == set(index["weight_map"].values()) and len(shards) > 1
    assert "| decoder layers, width | 4, 32 |" in hub.read(REPO, "README.md").decode()
    push(folder, REPO)
    assert hub.files(REPO) == {path.name for path in folder.iterdir()} | {"notes.txt"}
    assert "| decoder layers, width | 3, 32 |" in hub.read(REPO, "README.md").decode()


def test_cards_that_somebody_wrote(folder, push, hub, tmp_path, capsys):
    """One in the folder is uploaded as it is; one on the Hub is not replaced by one that was generated, but is by one
    that somebody wrote."""
    push(folder, REPO)
    edited = hub.read(REPO, "README.md").decode() + "\nMore about it.\n"
    hub.write(REPO, "README.md", edited)
    capsys.readouterr()
    push(folder, REPO)
    assert hub.read(REPO, "README.md").decode() == edited
    assert "README.md on the Hub was written by somebody, and stays" in capsys.readouterr().out
    work = shutil.copytree(folder, tmp_path / "work")
    (work / "README.md").write_text("---\nlicense: mit\n---\n\n# Mine\n")
    push(work, REPO)
    assert hub.read(REPO, "README.md").decode() == (work / "README.md").read_text()


def test_large_files(folder, push, tmp_path):
    """A file that the Hub wants in parts arrives whole, and what is there is not sent again."""
    with HubServer(tmp_path / "parts", part_bytes=20_000) as hub:
        push(folder, REPO, to=hub)
        content = (folder / "model.safetensors").read_bytes()
        assert hub.read(REPO, "model.safetensors") == content
        assert sum("/parts/" in request for request in hub.requests) == -(-len(content) // 20_000)
        push(folder, "someone/again", to=hub)
        assert sum("/parts/" in request for request in hub.requests) == -(-len(content) // 20_000)


def test_interrupted(folder, push, hub):
    """An upload that fails before its commit leaves no file on the Hub, and the same command completes it."""
    hub.takes_commits = False
    with pytest.raises(SystemExit, match=r"error: (?s:.*)no commits today(?s:.*)was not finished\. When the cause"):
        push(folder, REPO)
    assert hub.files(REPO) == set()
    hub.takes_commits = True
    push(folder, REPO)
    assert hub.files(REPO) == {path.name for path in folder.iterdir()}


def test_dry_run(folder, script, push, hub, tmp_path, monkeypatch, capsys):
    """Lists files and sizes, checks the folder, contacts nobody, and needs no token."""
    work = shutil.copytree(folder, tmp_path / "work")
    (work / "optimizer.pt").write_text("x")
    monkeypatch.setattr(script, "get_token", lambda: None)
    push(work, REPO, "--dry-run", check=True)
    printed = capsys.readouterr().out
    assert hub.requests == []
    assert "it loads, runs, and computes the same without this package" in printed
    listed = {line.split()[-1] for line in printed.splitlines() if line.startswith("  ")}
    assert listed == {path.name for path in folder.iterdir()}
    assert re.search(rf"{(work / 'config.json').stat().st_size / 1024:.4g} KiB  config\.json", printed)
    assert "left out: optimizer.pt (training state)" in printed


def without(name: str):
    return lambda folder: (folder / name).unlink()


def changed(name: str, change):
    def apply(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))

    return apply


def lacks_a_shard(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(weights, "model-00001-of-00002.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def is_an_output(folder: Path) -> None:
    (folder / "checkpoint-7").mkdir()
    (folder / "config.json").rename(folder / "checkpoint-7" / "config.json")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("config.json"), "has no config.json: save a model there"),
        (is_an_output, "has no config.json: name one of its checkpoints, such as .*checkpoint-7"),
        (without("tokenizer_config.json"), "has no tokenizer"),
        (without("modeling_engram.py"), r"lacks the code that loads it \(modeling_engram.py\)"),
        (without("model.safetensors"), r"lacks weights \(model.safetensors\)"),
        (lacks_a_shard, r"lacks weights \(model-00001-of-00002.safetensors\)"),
        (changed("config.json", lambda text: text[:-5]), "config.json is not valid JSON"),
        (changed("config.json", lambda text: text.replace('"engram"', '"llama"')), "holds a llama model"),
    ],
    ids=["config", "run's output", "tokenizer", "code", "weights", "shard", "broken", "another model"],
)
def test_incomplete_folders_are_refused(folder, push, hub, tmp_path, damage, message):
    """With what is missing, before anything is loaded or sent."""
    work = shutil.copytree(folder, tmp_path / "work")
    damage(work)
    with pytest.raises(SystemExit, match=f"error: .*{message}"):
        push(work, REPO)
    assert hub.requests == []


def other_logits(folder: Path) -> None:
    path = folder / "modeling_engram.py"
    text = path.read_text()
    line = "        logits = self.lm_head(hidden_states[:, kept, :])\n"
    assert line in text
    path.write_text(text.replace(line, f"{line}        logits = logits * (1 + 2**-20)\n"))


def not_a_number(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed("decoder_layer.py", lambda text: f"import hf_engram\n{text}"), "cannot be used without this package"),
        (other_logits, "`logits` is not what this package computes"),
        (not_a_number, r"`logits` is not what this package computes \(or not a number\)"),
    ],
    ids=["needs the package", "other logits", "not a number"],
)
def test_folders_that_do_not_work_are_refused(folder, push, hub, tmp_path, damage, message):
    """The check runs the folder's code without the package, and compares."""
    work = shutil.copytree(folder, tmp_path / "work")
    damage(work)
    with pytest.raises(SystemExit, match=f"error: (?s:.*)was not uploaded: (?s:.*){message}"):
        push(work, REPO, check=True)
    assert hub.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", REPO], "nowhere is not a folder"),
        (["FOLDER", "only-a-name"], "is not of the form owner/name"),
        (["FOLDER", "someone/bad..name"], "bad..name"),
        (["FOLDER", REPO, "--revision", "a b"], "is not the name of a branch"),
        (["FOLDER", REPO, "--revision", "f" * 40], "is not the name of a branch"),
    ],
    ids=str,
)
def test_arguments_are_refused(folder, push, hub, arguments, message, capsys):
    with pytest.raises(SystemExit):
        push(*(str(folder) if argument == "FOLDER" else argument for argument in arguments))
    assert message in capsys.readouterr().err
    assert hub.requests == []


def test_not_logged_in(folder, script, push, hub, monkeypatch):
    monkeypatch.setattr(script, "get_token", lambda: None)
    with pytest.raises(SystemExit, match="error: not logged in: run `hf auth login`, or set HF_TOKEN"):
        push(folder, REPO)
    assert hub.requests == []


def test_errors_of_the_hub(folder, script, push, hub, use_hub, monkeypatch):
    """A token that may not write, and a Hub that cannot be reached: one line, and the repository is not made."""
    use_hub(hub)
    monkeypatch.setattr("hub_server.TOKEN", "another")
    with pytest.raises(SystemExit, match=r"error: (?s:.*)401"):
        push(folder, REPO)
    assert hub.repositories == {}
    hub.shutdown()
    hub.server_close()
    with pytest.raises(SystemExit, match=r"error: .*\nThe upload to someone/some-model was not finished"):
        push(folder, REPO)


def test_the_readmes_command(folder, push, hub, tmp_path, monkeypatch):
    readme = (SCRIPT.parents[1] / "README.md").read_text(encoding="utf-8")
    (arguments,) = re.findall(r"^python scripts/push_to_hub.py (.*)$", readme, re.MULTILINE)
    shutil.copytree(folder, tmp_path / "my-engram")
    monkeypatch.chdir(tmp_path)
    push(*arguments.split())
    assert "config.json" in hub.files("someone/my-engram") and hub.repositories["someone/my-engram"].private


def test_help_names_every_option(tmp_path):
    command = [sys.executable, str(SCRIPT), "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and all(name in done.stdout for name in ("--private", "--revision", "--dry-run"))
