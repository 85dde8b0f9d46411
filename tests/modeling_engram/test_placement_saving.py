"""Saving models whose tables are on disk, in host memory or on the device: nothing copied twice, nothing lost."""

import errno
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from placement_helpers import MIXED, PLACEMENTS, contents, load, logits_of, weight_map
from safetensors import safe_open
from safetensors.torch import load_file

from hf_engram.configuration import folder_update
from hf_engram.configuration.folder_update import FolderUpdate
from hf_engram.modeling_engram import table_saving, table_storage


@pytest.fixture
def model(lively_model):
    return lively_model()


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def ids(random_ids):
    return random_ids(2, 9)


def test_tables_get_shards_of_their_own(model, folder, ids, tmp_path, monkeypatch):
    """Tables on disk always, those in memory from a size on; the index names every tensor."""
    for placement, least in (("disk", 2**25), ("cpu", 1), ("device", 1)):
        monkeypatch.setattr("hf_engram.modeling_engram.placement_mixin.TABLE_SHARD_BYTES", least)
        target = tmp_path / placement
        load(folder, placement).save_pretrained(target)
        names = weight_map(target)
        assert not (target / "model.safetensors").exists()
        for index in range(2):
            key = f"model.engram_memory.tables.{index}.weight"
            with safe_open(target / names[key], "pt") as file:
                assert list(file.keys()) == [key]
        assert set(names) == set(load_file(folder / "model.safetensors"))
        assert len(set(names.values())) == 3 and all((target / name).is_file() for name in names.values())
        for again in PLACEMENTS:
            assert torch.equal(logits_of(load(target, again), ids), logits_of(model, ids))


def test_unchanged_tables_are_not_copied(folder, ids, model, monkeypatch):
    """In the folder that they lie in, files of tables on disk stay as they are when they hold nothing else."""
    load(folder, "disk").save_pretrained(folder)
    names = {weight_map(folder)[f"model.engram_memory.tables.{index}.weight"] for index in range(2)}
    before = {name: (folder / name).stat() for name in names}
    monkeypatch.setattr(table_saving, "write_table", None)
    loaded = load(folder, "disk")
    with torch.no_grad():
        loaded.lm_head.weight.mul_(2)
    for size in ("50GB", "20KB"):
        loaded.save_pretrained(folder, max_shard_size=size)
        assert names < set(weight_map(folder).values())
        assert all(os.path.samestat((folder / name).stat(), stat) for name, stat in before.items())
        assert {path.name for path in folder.glob("model*-of-*")} == set(weight_map(folder).values())
        for placement in ("disk", "device"):
            assert torch.equal(logits_of(load(folder, placement), ids), 2 * logits_of(model, ids))


def test_a_saved_table_is_a_file_of_its_own(folder, ids, model, tmp_path):
    """Who writes into one folder's file, in place, does not write into another's: files are cloned or copied."""
    load(folder, "disk").save_pretrained(tmp_path / "one")
    load(tmp_path / "one", "disk").save_pretrained(tmp_path / "two")
    for index in range(2):
        name = weight_map(tmp_path / "one")[f"model.engram_memory.tables.{index}.weight"]
        (tmp_path / "one" / name).write_bytes(b"x" * (tmp_path / "one" / name).stat().st_size)
    assert torch.equal(logits_of(load(tmp_path / "two", "disk"), ids), logits_of(model, ids))


def test_streamed_copy(folder, ids, model, tmp_path, monkeypatch):
    """Where neither is possible, blocks are copied; fp8 tables with their scales."""
    monkeypatch.setattr(table_saving, "clone_file", lambda source, target: False)
    monkeypatch.setattr(table_storage, "CHUNK_BYTES", 256)
    load(folder, "disk").save_pretrained(tmp_path / "one")
    loaded = load(tmp_path / "one", "disk")
    loaded.save_pretrained(tmp_path / "two")
    assert torch.equal(logits_of(load(tmp_path / "two", "disk"), ids), logits_of(model, ids))
    name = weight_map(tmp_path / "two")["model.engram_memory.tables.1.weight"]
    assert not (tmp_path / "one" / name).samefile(tmp_path / "two" / name)


@pytest.mark.parametrize("placement", MIXED, ids=str)
@pytest.mark.parametrize("clone", [True, False])
def test_saving_into_the_folder_loaded_from(folder, ids, model, placement, clone, monkeypatch):
    """Once and again; model and folder are whole after each, and nothing is left over."""
    if not clone:
        monkeypatch.setattr(table_saving, "clone_file", lambda source, target: False)
    loaded, expected = load(folder, placement), logits_of(model, ids)
    for _ in range(3):
        loaded.save_pretrained(folder)
        assert torch.equal(logits_of(loaded, ids), expected)
        assert torch.equal(logits_of(load(folder, "device"), ids), expected)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    loaded.engram_memory.to_placement("device")
    loaded.save_pretrained(folder)
    names = {path.name for path in folder.glob("model*.safetensors*")}
    assert names == {"model.safetensors"}
    assert torch.equal(logits_of(load(folder, "disk"), ids), expected)


def test_another_model_that_reads_a_replaced_file_says_so(folder, ids, lively_model):
    loaded = load(folder, "disk")
    lively_model(seed=1).save_pretrained(folder)
    with pytest.raises(RuntimeError, match="replaced while open"):
        logits_of(loaded, ids)
    with pytest.raises(RuntimeError, match="replaced while open"):
        loaded.save_pretrained(folder.with_name("other"))
    assert not folder.with_name("other").exists()


def full_disk(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("into_source", [True, False])
@pytest.mark.parametrize("placement", ["disk", "device"])
@pytest.mark.parametrize("where", ["weights", "table", "index", "shards", "code"])
def test_interrupted_save(folder, ids, model, tmp_path, monkeypatch, where, placement, into_source):
    """A full disk or an interrupt at any point: the target is as it was, and so are source and model."""
    monkeypatch.setattr("hf_engram.modeling_engram.placement_mixin.TABLE_SHARD_BYTES", 1)
    loaded = load(folder, placement)
    target = folder if into_source else tmp_path / "target"
    before = contents(folder)
    with monkeypatch.context() as patch:
        if where == "weights":
            patch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
        elif where == "table":
            patch.setattr(table_saving, "write_table", full_disk)
            patch.setattr(table_saving, "lies_in", lambda *args: None)
        elif where == "index":
            patch.setattr(table_saving, "find_tensors", full_disk)
        elif where == "shards":
            rename, count = os.rename, iter(range(10**6))

            def second_time(source, target):
                if ".saving-" in str(source) and ".saving-" not in str(target) and next(count) == 1:
                    raise KeyboardInterrupt
                return rename(source, target)

            patch.setattr(folder_update.os, "rename", second_time)
        else:
            patch.setattr(FolderUpdate, "_redirects", full_disk)
        with pytest.raises((OSError, KeyboardInterrupt)):
            loaded.save_pretrained(target)
    assert contents(folder) == before
    if not into_source:
        assert not target.exists()
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    loaded.save_pretrained(target)
    assert torch.equal(logits_of(load(target, placement), ids), logits_of(model, ids))


def test_full_disk_is_noticed_before_a_table_is_written(folder, tmp_path, monkeypatch):
    loaded = load(folder, "disk")
    monkeypatch.setattr(table_saving, "clone_file", lambda source, target: False)
    monkeypatch.setattr(table_saving.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(OSError, match="0 are free"):
        loaded.save_pretrained(tmp_path / "target")
    assert not (tmp_path / "target").exists()


def staged_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".saving-")]


def leave_behind(folder: Path) -> Path:
    """The folder of a save whose process is killed in the middle of it."""
    known = set(staged_folders(folder))
    child = os.fork()
    if child == 0:
        try:
            (FolderUpdate(folder).folder / "model.safetensors").write_text("half of it")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = set(staged_folders(folder)) - known
    assert (left / "model.safetensors").is_file()
    return left


def leave(update: FolderUpdate) -> None:
    """As where the body raised."""
    update.__exit__(KeyError, KeyError(), None)


needs_locks = pytest.mark.skipif(folder_update.fcntl is None, reason="no locks here, so nothing is removed")


@needs_locks
def test_what_a_killed_save_left_is_removed_by_the_next(folder, ids, model):
    """And nothing of one that is alive, in this process or another; also where that one is new."""
    loaded, alive = load(folder, "disk"), FolderUpdate(folder)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            other = FolderUpdate(folder)
            os.write(write_end, other.folder.name.encode())
            signal.pause()
        finally:
            os._exit(0)
    of_child = folder / os.read(read_end, 1000).decode()
    for descriptor in (read_end, write_end):
        os.close(descriptor)
    left = leave_behind(folder)
    try:
        loaded.save_pretrained(folder)
        assert set(staged_folders(folder)) == {alive.folder, of_child} and not left.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    leave(alive)
    loaded.save_pretrained(folder)
    assert not staged_folders(folder)
    assert torch.equal(logits_of(load(folder, "device"), ids), logits_of(model, ids))


@needs_locks
def test_what_is_left_may_be_needed(folder, model):
    """Kept are what may be another machine's, and what a save finds that fails."""
    elsewhere = folder / ".saving-another-machine-x"
    elsewhere.mkdir()
    left = leave_behind(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
        with pytest.raises(OSError):
            model.save_pretrained(folder)
    assert set(staged_folders(folder)) == {left, elsewhere}
    model.save_pretrained(folder)
    assert staged_folders(folder) == [elsewhere]


@needs_locks
def test_without_locks_nothing_is_removed(folder, model, monkeypatch):
    left = leave_behind(folder)

    def flock(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(folder_update.fcntl, "flock", flock)
        model.save_pretrained(folder)
    with monkeypatch.context() as patch:
        patch.setattr(folder_update, "fcntl", None)
        model.save_pretrained(folder)
    assert staged_folders(folder) == [left]


@needs_locks
def test_a_folder_that_is_taken_before_it_is_locked(folder, model, monkeypatch):
    """Then the save makes another."""
    make, made = folder_update.tempfile.mkdtemp, []

    def make_and_lose(prefix, dir):
        made.append(Path(make(prefix=prefix, dir=dir)))
        if len(made) == 1:
            os.rmdir(made[0])
        elif len(made) == 2:
            taken.append(folder_update.lock_folder(made[1]))
        return str(made[-1])

    taken: list[int] = []
    monkeypatch.setattr(folder_update.tempfile, "mkdtemp", make_and_lose)
    update = FolderUpdate(folder)
    assert len(made) == 3 and update.folder == made[2]
    os.close(taken[0])
    leave(update)
