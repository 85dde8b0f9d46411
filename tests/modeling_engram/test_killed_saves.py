"""Saves whose process is killed before any one of the changes that it makes to the file system, and two at a time:
what loads is one whole model, and the next save leaves nothing of it."""

import json
import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from placement_helpers import load
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_engram import EngramForCausalLM, EngramTokenizer
from hf_engram.configuration import folder_update, remote_code
from hf_engram.configuration.folder_update import LOCK_FILE, FolderUpdate


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are killed after a fork")
# What Python says before it changes a file system; whatever else writes does so in the save's own folder.
CHANGES = {"open", "os.rename", "os.remove", "os.link", "os.mkdir", "os.rmdir", "os.truncate", "shutil.copyfile"}


class Killer:
    """Ends the process when it is about to make its n-th change."""

    def __init__(self, count: int, from_commit: bool) -> None:
        self.left, self.counts = count, not from_commit
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple) -> None:
        if event not in CHANGES:
            return
        if event == "open":
            # Of the moving in place, opening the lock's file is the first.
            self.counts |= str(args[0]).endswith(LOCK_FILE)
            if not args[2] & (os.O_WRONLY | os.O_RDWR):
                return
        if self.counts:
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            self.left -= 1


def killed_at(count: int, save: Callable[[], object], from_commit: bool) -> bool:
    """Whether a process that saves was killed at its n-th change; it comes to its end if it makes fewer."""
    child = os.fork()
    if child == 0:
        try:
            Killer(count, from_commit)
            save()
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def write_code(version: str) -> Callable:
    """A package of three modules that belong together, to be exported in the place of ours."""
    head = f"# {version}\n"
    modules = {
        "configuration_engram": f"{head}from .folder_update import x\n",
        "modeling_engram": f"{head}from .configuration_engram import x\n    from .folder_update import x\n",
        "tokenization_engram": f"{head}from .folder_update import x\n",
        "folder_update": head,
    }

    def write(sources: dict, folder: Path) -> None:
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)

    return write


def code_of(folder: Path, config: str) -> set[str]:
    """The versions of the modules that a config names, and of those that they import."""
    versions, known = set(), set()
    queue = re.findall(r"(\w+)\.\w+", json.dumps(json.loads((folder / config).read_text())["auto_map"]))
    while queue:
        name = queue.pop()
        if name not in known:
            known.add(name)
            text = (folder / f"{name}.py").read_text()
            versions.add(text.splitlines()[0])
            queue += re.findall(r"^\s*from \.(\w+) import", text, re.MULTILINE)
    return versions


def contents(model: EngramForCausalLM) -> tuple:
    """Config and weights, wherever they are."""
    fields = {"hidden_size", "num_hidden_layers", "tie_word_embeddings", "engram_vocab_size"}
    for table in model.engram_memory.tables:
        table.to_placement("cpu", torch.device("cpu"), torch.float32)()
    tensors = {name: tensor.double().sum().item() for name, tensor in model.state_dict().items()}
    return tuple(getattr(model.config, name) for name in sorted(fields)), tuple(sorted(tensors.items()))


# By name: how the old model is saved (None: there is none), how the new one is, and what differs in its config.
OLD_AND_NEW = {
    "nothing": (None, {}, {}),
    "same config": ({}, {}, {}),
    "another config": ({}, {}, {"hidden_size": 48}),
    "as many shards": ({"max_shard_size": "20KB"}, {"max_shard_size": "20KB"}, {}),
    "other shards": ({"max_shard_size": "20KB"}, {"max_shard_size": "30KB"}, {"num_hidden_layers": 4}),
    "into shards": ({}, {"max_shard_size": "20KB"}, {}),
    "into shards, another config": ({}, {"max_shard_size": "20KB"}, {"hidden_size": 48}),
    "into one file": ({"max_shard_size": "20KB"}, {}, {}),
    "into one file, another config": ({"max_shard_size": "20KB"}, {}, {"num_hidden_layers": 4}),
}


def check_all_points(folder: Path, save, allowed: Callable[[Path], bool], saved_names: set[str], from_commit: bool):
    """Kills a save into a copy of a folder at every point, checks what is left, and saves again."""
    target = folder.with_name("target")
    count = 0
    while True:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target, dirs_exist_ok=True)
        killed = killed_at(count, lambda: save(target), from_commit)
        assert allowed(target), f"killed at change {count}"
        if count % 9 == 0 or not killed:
            save(target)
            assert names_in(target) == saved_names
        if not killed:
            return count
        count += 1


def names_in(folder: Path) -> set[str]:
    """The files of a folder; shards as they are called where no others were in their way."""
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {re.sub(r"^model-\d+-(\d{5}-of-)", r"model-\1", name) for name in names}


WITH_NEW_CODE = ("same config", "into shards", "into one file, another config")


@pytest.mark.parametrize(
    ("case", "new_code"), [(case, False) for case in OLD_AND_NEW] + [(case, True) for case in WITH_NEW_CODE]
)
def test_killed(lively_model, tmp_path, monkeypatch, case, new_code):
    """Old or new, with the code that belongs to it or newer one, whole."""
    old_options, new_options, fields = OLD_AND_NEW[case]
    folder, whole = tmp_path / "folder", []
    monkeypatch.setattr(remote_code, "_write_flat", write_code("old"))
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    if old_options is not None:
        old = lively_model()
        old.save_pretrained(folder, **old_options)
        whole.append(contents(old))
    if new_code:
        monkeypatch.setattr(remote_code, "_write_flat", write_code("new"))
    new = lively_model(seed=1, **fields)
    new.save_pretrained(tmp_path / "fresh", **new_options)
    expected = names_in(tmp_path / "fresh") | {"mine.txt"}
    whole.append(contents(new))

    def allowed(target: Path) -> bool:
        assert (target / "mine.txt").read_text() == "mine"
        try:
            found = contents(EngramForCausalLM.from_pretrained(target))
        except OSError:
            return old_options is None and not (target / "model.safetensors").exists()
        versions = code_of(target, "config.json")
        assert len(versions) == 1 and (found == whole[0] or versions == {f"# {'new' if new_code else 'old'}"})
        json.loads((target / "generation_config.json").read_text())
        return found in whole

    points = check_all_points(folder, lambda d: new.save_pretrained(d, **new_options), allowed, expected, True)
    assert points > 5


@pytest.mark.slow
def test_killed_anywhere(lively_model, tmp_path):
    """The same with all of the code, from the first change on."""
    folder, old, new = tmp_path / "folder", lively_model(), lively_model(seed=1, hidden_size=48)
    old.save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.write_text(f"# older\n{path.read_text()}")
    new.save_pretrained(tmp_path / "fresh")
    whole = [contents(old), contents(new)]

    def allowed(target: Path) -> bool:
        return contents(EngramForCausalLM.from_pretrained(target)) in whole

    assert check_all_points(folder, new.save_pretrained, allowed, names_in(tmp_path / "fresh"), False) > 100


def test_killed_with_tables_on_disk_in_the_folder(lively_model, tmp_path, monkeypatch):
    """The tables' files stay, whatever else is new; also where the model is then read from what a kill has left."""
    monkeypatch.setattr(remote_code, "_write_flat", write_code("old"))
    folder, old = tmp_path / "folder", lively_model()
    old.save_pretrained(tmp_path / "first")
    load(tmp_path / "first", "disk").save_pretrained(folder)
    new = lively_model()
    with torch.no_grad():
        new.lm_head.weight.mul_(2)
    whole = [contents(old), contents(new)]

    def save(target: Path) -> None:
        model = load(target, "disk")
        model.config.use_cache = not model.config.use_cache
        with torch.no_grad():
            model.lm_head.weight.copy_(new.lm_head.weight)
        model.save_pretrained(target)

    def allowed(target: Path) -> bool:
        assert contents(load(target, "disk")) == contents(load(target, "device"))
        return contents(load(target, "disk")) in whole

    expected = {re.sub("00001-of-00003", "00001-of-00001", name) for name in names_in(folder)}
    target, count = tmp_path / "target", 0
    while True:
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder, target)
        killed = killed_at(count, lambda: save(target), True)
        assert allowed(target), f"killed at change {count}"
        if not killed:
            break
        count += 1
    assert count > 5 and names_in(target) == expected


def tokenizer_of(words: list[str]) -> EngramTokenizer:
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    plain = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", pad_token="<unk>")
    return EngramTokenizer.from_tokenizer(plain, engram_layer_ids=[0, 2], engram_vocab_size=60)


@pytest.mark.parametrize("words", [["<unk>", "a", "B", "b"], ["<unk>", "b", "a", "c"], ["<unk>", "x", "X", "y", "z"]])
def test_killed_saves_of_a_tokenizer(lively_model, tmp_path, monkeypatch, words):
    """Over a model and its tokenizer, with new code: old or new, and the model loads by code that is whole."""
    monkeypatch.setattr(remote_code, "_write_flat", write_code("old"))
    folder, model = tmp_path / "folder", lively_model()
    old, new = tokenizer_of(["<unk>", "a", "B", "b"]), tokenizer_of(words)
    model.save_pretrained(folder)
    old.save_pretrained(folder)
    expected, whole = names_in(folder), contents(model)

    def answers(tokenizer: EngramTokenizer) -> tuple:
        return tokenizer.engram_fields(), dict(tokenizer("a b B x y z"))

    known = [answers(old), answers(new)]
    monkeypatch.setattr(remote_code, "_write_flat", write_code("new"))

    def allowed(target: Path) -> bool:
        assert contents(EngramForCausalLM.from_pretrained(target)) == whole
        assert len(code_of(target, "config.json")) == len(code_of(target, "tokenizer_config.json")) == 1
        return answers(EngramTokenizer.from_pretrained(target)) in known

    assert check_all_points(folder, new.save_pretrained, allowed, expected, True) > 5
    assert answers(EngramTokenizer.from_pretrained(folder.with_name("target"))) == known[1]


def test_two_saves(lively_model, tmp_path, monkeypatch):
    """A save that begins while another moves its files in place waits for it, or fails after a while; whole is one."""
    models = [lively_model(seed=seed) for seed in range(3)]
    whole = [contents(model) for model in models]
    folder = tmp_path / "folder"
    models[2].save_pretrained(folder, max_shard_size="20KB")
    rename, waiting = os.rename, threading.Event()
    threads = []

    def save_second() -> None:
        waiting.set()
        models[1].save_pretrained(folder, max_shard_size="20KB")

    def begin_another(source, target):
        if not threads and Path(target).parent == folder:
            threads.append(threading.Thread(target=save_second))
            threads[0].start()
            waiting.wait()
            # From the same thread, waiting would never end.
            with pytest.raises(TimeoutError, match=r"Another save into .*folder is moving"):
                models[1].save_pretrained(folder)
        return rename(source, target)

    monkeypatch.setattr(folder_update.os, "rename", begin_another)
    models[0].save_pretrained(folder, max_shard_size="20KB")
    threads[0].join()
    assert contents(EngramForCausalLM.from_pretrained(folder)) == whole[1]
    monkeypatch.setattr(folder_update.os, "rename", rename)
    models[0].save_pretrained(folder)
    assert contents(EngramForCausalLM.from_pretrained(folder)) == whole[0]
    assert not [name for name in names_in(folder) if name.startswith((".", "model-"))]


def test_another_process_does_not_let_go(lively_model, tmp_path, monkeypatch):
    """Then the save says so, and has changed nothing."""
    folder = tmp_path / "folder"
    lively_model().save_pretrained(folder)
    before = {name: (folder / name).read_bytes() for name in names_in(folder)}
    monkeypatch.setattr(folder_update, "LOCK_SECONDS", 0.1)
    child = os.fork()
    if child == 0:
        try:
            with folder_update.sole_commit(folder):
                signal.pause()
        finally:
            os._exit(0)
    try:
        while not (folder / LOCK_FILE).exists():
            pass
        with pytest.raises(TimeoutError, match="changed nothing"):
            while True:
                lively_model(seed=1).save_pretrained(folder)
                before = {name: (folder / name).read_bytes() for name in names_in(folder) - {LOCK_FILE}}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert {name: (folder / name).read_bytes() for name in names_in(folder) - {LOCK_FILE}} == before
    lively_model(seed=1).save_pretrained(folder)
    assert LOCK_FILE not in names_in(folder)


def test_variants_and_links(lively_model, tmp_path, monkeypatch):
    """A variant beside the weights without one; a target that is a link, relative, or the working directory."""
    folder, model = tmp_path / "folder", lively_model()
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    model.save_pretrained("link")
    monkeypatch.chdir(folder)
    other = lively_model(seed=1)
    other.save_pretrained(".", variant="fp16", max_shard_size="20KB")
    assert contents(EngramForCausalLM.from_pretrained("../link")) == contents(model)
    assert contents(EngramForCausalLM.from_pretrained(".", variant="fp16")) == contents(other)
    assert (tmp_path / "link").is_symlink()
    stat = (folder / "modeling_engram.py").stat()
    other.save_pretrained("../link")
    assert contents(EngramForCausalLM.from_pretrained(folder)) == contents(other)
    assert (folder / "modeling_engram.py").stat() == stat


def test_no_hard_links(lively_model, tmp_path, monkeypatch):
    """Where there are none, weights are copied for the time being."""

    def refuse(*args, **kwargs):
        raise OSError("not here")

    monkeypatch.setattr(folder_update.os, "link", refuse)
    lively_model().save_pretrained(tmp_path)
    other = lively_model(seed=1, hidden_size=48)
    other.save_pretrained(tmp_path)
    assert contents(EngramForCausalLM.from_pretrained(tmp_path)) == contents(other)


def test_an_update_that_raises_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), FolderUpdate(tmp_path / "made") as update:
        (update.folder / "x").write_text("x")
        raise KeyError
    assert not (tmp_path / "made").exists()
