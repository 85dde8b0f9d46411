"""Saving models whose tables are on disk, in host memory or on the device: nothing copied twice, nothing lost."""

import errno
import os
import shutil
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
