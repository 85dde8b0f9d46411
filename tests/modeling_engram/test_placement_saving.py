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

from hf_engram.modeling_engram import table_saving, table_storage
from hf_engram.modeling_engram.table_saving import StagedSave


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


def test_unchanged_tables_are_shared_not_copied(folder, tmp_path, monkeypatch):
    """The file of a table on disk is cloned or linked when it holds nothing else."""
    load(folder, "disk").save_pretrained(tmp_path / "one")
    monkeypatch.setattr(table_saving, "fcntl", None)
    monkeypatch.setattr(table_saving, "write_tensors", None)
    load(tmp_path / "one", "disk").save_pretrained(tmp_path / "two")
    for index in range(2):
        name = weight_map(tmp_path / "two")[f"model.engram_memory.tables.{index}.weight"]
        assert (tmp_path / "one" / name).samefile(tmp_path / "two" / name)


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
@pytest.mark.parametrize("where", ["weights", "table", "index", "commit"])
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
        elif where == "index":
            patch.setattr(table_saving, "find_tensors", full_disk)
        else:
            rename, count = os.rename, iter(range(10**6))

            def third_time(source, target):
                if ".saving-" in str(source) and Path(target).suffix == ".safetensors" and next(count) == 3:
                    raise KeyboardInterrupt
                return rename(source, target)

            patch.setattr(table_saving.os, "rename", third_time)
        with pytest.raises((OSError, KeyboardInterrupt)):
            loaded.save_pretrained(target)
    assert contents(folder) == before
    if not into_source:
        assert not target.exists()
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    loaded.save_pretrained(target)
    assert torch.equal(logits_of(load(target, placement), ids), logits_of(model, ids))


def test_killed_while_moving_in_place(folder, ids, model):
    """A process that dies in the middle of the last step leaves a folder that does not load, and every byte of it."""
    loaded = load(folder, "disk")
    staged = StagedSave(folder, [])
    super_save = table_saving.os.rename
    loaded.save_pretrained(folder.with_name("new"))
    for path in folder.with_name("new").iterdir():
        shutil.copy(path, staged.folder)
    moved = []

    def rename(source, target):
        if len(moved) >= 4:
            raise SystemError("killed")
        moved.append(target)
        super_save(source, target)

    before = (folder / "model.safetensors").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table_saving.os, "rename", rename)
        with pytest.raises(SystemError):
            staged.commit()
    with pytest.raises(OSError):
        load(folder, "device")
    assert before in [path.read_bytes() for path in folder.rglob("model.safetensors")]


def test_full_disk_is_noticed_before_a_table_is_written(folder, tmp_path, monkeypatch):
    loaded = load(folder, "disk")
    monkeypatch.setattr(table_saving, "clone_file", lambda source, target: False)
    monkeypatch.setattr(table_saving.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
    with pytest.raises(OSError, match="0 are free"):
        loaded.save_pretrained(tmp_path / "target")
    assert not (tmp_path / "target").exists()


def staged_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".saving-")]


def leave_behind(folder: Path, files: tuple[str, ...] = ("model.safetensors",)) -> Path:
    """The folder of a save whose process is killed in the middle of it."""
    known = set(staged_folders(folder))
    child = os.fork()
    if child == 0:
        try:
            staged = StagedSave(folder, [])
            for name in files:
                (staged.folder / name).parent.mkdir(exist_ok=True)
                (staged.folder / name).write_text("half of it")
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (left,) = set(staged_folders(folder)) - known
    assert all((left / name).is_file() for name in files)
    return left


needs_locks = pytest.mark.skipif(table_saving.fcntl is None, reason="no locks here, so nothing is removed")


@needs_locks
def test_what_a_killed_save_left_is_removed_by_the_next(folder, ids, model):
    """And nothing of one that is alive, in this process or another; also where that one is new."""
    loaded, alive = load(folder, "disk"), StagedSave(folder, [])
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            other = StagedSave(folder, [])
            os.write(write_end, other.folder.name.encode())
            signal.pause()
        finally:
            os._exit(0)
    of_child = folder / os.read(read_end, 1000).decode()
    for descriptor in (read_end, write_end):
        os.close(descriptor)
    left = [leave_behind(folder), leave_behind(folder, (".replaced-x/model.safetensors", ".replaced-x/config.json"))]
    try:
        loaded.save_pretrained(folder)
        assert set(staged_folders(folder)) == {alive.folder, of_child} and not any(path.exists() for path in left)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    alive.abandon()
    loaded.save_pretrained(folder)
    assert not staged_folders(folder)
    assert torch.equal(logits_of(load(folder, "device"), ids), logits_of(model, ids))


@needs_locks
def test_what_is_left_may_be_needed(folder, model, tmp_path):
    """Kept are the only copy of what a killed save was about to replace, what may be another machine's, and what a
    save finds that fails."""
    only_copy = leave_behind(folder, (".replaced-x/model.fp16.safetensors",))
    elsewhere = folder / ".saving-another-machine-x"
    elsewhere.mkdir()
    model.save_pretrained(folder)
    assert set(staged_folders(folder)) == {only_copy, elsewhere}
    model.save_pretrained(folder, variant="fp16")
    assert staged_folders(folder) == [elsewhere]
    left = leave_behind(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.modeling_utils.safe_save_file", full_disk)
        with pytest.raises(OSError):
            model.save_pretrained(folder)
    assert set(staged_folders(folder)) == {left, elsewhere}


@needs_locks
def test_without_locks_nothing_is_removed(folder, model, monkeypatch):
    left = leave_behind(folder)

    def flock(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(table_saving.fcntl, "flock", flock)
        model.save_pretrained(folder)
    with monkeypatch.context() as patch:
        patch.setattr(table_saving, "fcntl", None)
        model.save_pretrained(folder)
    assert staged_folders(folder) == [left]


@needs_locks
def test_a_folder_that_is_taken_before_it_is_locked(folder, model, monkeypatch):
    """Then the save makes another."""
    make, made = table_saving.tempfile.mkdtemp, []

    def make_and_lose(prefix, dir):
        made.append(Path(make(prefix=prefix, dir=dir)))
        if len(made) == 1:
            os.rmdir(made[0])
        elif len(made) == 2:
            taken.append(table_saving.lock_folder(made[1]))
        return str(made[-1])

    taken: list[int] = []
    monkeypatch.setattr(table_saving.tempfile, "mkdtemp", make_and_lose)
    staged = StagedSave(folder, [])
    assert len(made) == 3 and staged.folder == made[2]
    os.close(taken[0])
    staged.abandon()
