"""Where tables live: the same outputs everywhere, nothing loaded that should not be, and what can go wrong."""

import copy
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import accelerate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from placement_helpers import MIXED, PLACEMENTS, contents, load, logits_of
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_engram import (
    EngramConfig,
    EngramForCausalLM,
    EngramForSequenceClassification,
    EngramModel,
)
from hf_engram.modeling_engram import row_request, table_storage


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


# The same everywhere.


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"])
@pytest.mark.parametrize("placement", MIXED, ids=str)
def test_same_logits(model, ids, tmp_path, placement, shard_size):
    """Bit for bit, from one file (tables beside other tensors) and from many."""
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors").is_file() == (shard_size == "1GB")
    loaded, report = load(tmp_path, placement, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert loaded.config.engram_placement == placement
    expected = [placement] * 2 if isinstance(placement, str) else placement
    assert [table.placement for table in loaded.engram_memory.tables] == expected
    keys = {key for key in loaded.state_dict() if "tables" in key}
    assert keys == {f"model.engram_memory.tables.{i}.weight" for i in range(2) if expected[i] != "disk"}
    hash_ids = model.compute_hash_ids(ids)
    assert torch.equal(logits_of(loaded, ids, hash_ids=hash_ids), logits_of(model, ids))


@pytest.mark.parametrize("placement", ["cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_same_logits_in_half_precision(folder, ids, placement, dtype):
    """A table of fp32 away from the model gives the rows that one cast with the model gives."""
    expected = logits_of(load(folder, "device", dtype=dtype), ids)
    assert torch.equal(logits_of(load(folder, placement, dtype=dtype), ids), expected)
    cast = load(folder, placement).to(dtype)
    assert torch.equal(logits_of(cast, ids), logits_of(load(folder, "device").to(dtype), ids))


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_generate(model, folder, ids, placement):
    """With a cache, beams, and sampling."""
    loaded = load(folder, placement)
    for options in ({"do_sample": False}, {"num_beams": 3}, {"do_sample": True}):
        torch.manual_seed(0)
        expected = model.generate(ids, max_new_tokens=6, **options)
        torch.manual_seed(0)
        assert torch.equal(loaded.generate(ids, max_new_tokens=6, **options), expected)


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_other_classes_and_auto(model, folder, ids, placement):
    """The decoder alone, a head's model, and Auto classes; a config that is passed is not changed."""
    assert torch.equal(load(folder, placement, EngramModel)(ids).last_hidden_state, model.model(ids).last_hidden_state)
    classifier = load(folder, placement, EngramForSequenceClassification, num_labels=3)
    assert torch.equal(classifier.model(ids).last_hidden_state, model.model(ids).last_hidden_state)
    assert torch.equal(logits_of(load(folder, placement, AutoModelForCausalLM), ids), logits_of(model, ids))
    config = EngramConfig.from_pretrained(folder)
    assert torch.equal(logits_of(load(folder, placement, config=config), ids), logits_of(model, ids))
    assert config.engram_placement == "device"
    model.model.save_pretrained(folder.with_name("decoder"))
    decoder = load(folder.with_name("decoder"), placement, EngramModel)
    assert torch.equal(decoder(ids).last_hidden_state, model.model(ids).last_hidden_state)


def test_from_the_hub_cache(folder, ids, model, tmp_path):
    """A snapshot of links to blobs, as downloads leave it: mapped there, and as it was after a save from it."""
    snapshot, blobs = tmp_path / "models--x--y" / "snapshots" / "0", tmp_path / "models--x--y" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    before = contents(blobs)
    loaded = load(snapshot, "disk")
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    for _ in range(2):
        loaded.save_pretrained(tmp_path / "saved")
        loaded = load(tmp_path / "saved", "disk")
    assert contents(blobs) == before
    assert not any(path.is_symlink() for path in (tmp_path / "saved").iterdir())
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


def test_placement_in_the_config(folder, model, ids):
    """config.json holds the default, an argument goes before it, and what is no placement is refused."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "engram_placement": ["cpu", "disk"]}))
    loaded = EngramForCausalLM.from_pretrained(folder)
    assert [table.placement for table in loaded.engram_memory.tables] == ["cpu", "disk"]
    assert load(folder, "device").engram_memory.tables[1].weight is not None
    for wrong in ("gpu", ["disk"], ["disk", "ssd"], 3, None):
        with pytest.raises(ValueError, match="engram_placement"):
            load(folder, wrong)
        with pytest.raises(ValueError, match="engram_placement"):
            load(folder, wrong, config=EngramConfig.from_pretrained(folder))
    with pytest.raises(ValueError, match="engram_scale_block_size"):
        EngramConfig(engram_scale_block_size=0)


def test_without_the_package(folder, model, ids):
    """The folder's own code does all of it, where the package is not installed."""
    script = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_engram":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from transformers import AutoModelForCausalLM
from safetensors.torch import load_file, save_file
folder, out = sys.argv[1:]
ids = load_file(folder + "/../ids.safetensors")["ids"]
for placement in ("cpu", "disk"):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, engram_placement=placement)
    model.prefetch(ids)
    with torch.no_grad():
        save_file({"logits": model(ids).logits}, f"{out}/{placement}.safetensors")
model.save_pretrained(out + "/again")
model = AutoModelForCausalLM.from_pretrained(out + "/again", trust_remote_code=True)
with torch.no_grad():
    save_file({"logits": model(ids).logits}, f"{out}/again.safetensors")
"""
    out = folder.with_name("out")
    out.mkdir()
    save_file({"ids": ids}, folder.with_name("ids.safetensors"))
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(out / "modules"),
    }
    run = [sys.executable, "-P", "-c", script, str(folder), str(out)]
    result = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-3000:]
    for name in ("cpu", "disk", "again"):
        assert torch.equal(load_file(out / f"{name}.safetensors")["logits"], logits_of(model, ids)), name


# What stays where it is.


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_excluded_from_to_and_half(folder, placement):
    """Neither device nor dtype of the model changes them; a table on disk is no parameter at all."""
    loaded = load(folder, placement)
    loaded.half().to("meta")
    assert loaded.lm_head.weight.is_meta and loaded.lm_head.weight.dtype == torch.float16
    for table in loaded.engram_memory.tables:
        assert [str(weight.device) for weight in table.parameters()] == (["cpu"] if placement == "cpu" else [])
        assert all(weight.dtype == torch.float32 for weight in table.parameters())


def test_excluded_from_device_maps(folder, ids, model):
    """A device map that offloads everything it knows leaves tables away from the model alone."""
    pytest.importorskip("accelerate")
    for placement in ("cpu", "disk"):
        loaded = load(folder, placement)
        names = loaded._no_placement_params
        assert names and all(any(name.startswith(key) for name in names) for key in ("model.engram_memory.tables.0",))
    assert load(folder, "device")._no_placement_params is None
    device_map = {"model": "cpu", "lm_head": "disk"}
    for placement in ("cpu", "disk"):
        offload = folder.with_name(f"offload-{placement}")
        loaded = load(folder, placement, device_map=device_map, offload_folder=offload)
        assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
        loaded = load(folder, placement, device_map={"": "disk"}, offload_folder=offload)
        for table in loaded.engram_memory.tables:
            assert all(not weight.is_meta for weight in table.parameters())


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_loading_reads_no_table_it_should_not(folder, monkeypatch, placement):
    """On disk, no byte of a table is read; in host memory, it is read once, by us, and never initialised."""
    read = []
    chunks = table_storage.MappedTensor.chunks
    monkeypatch.setattr(
        table_storage.MappedTensor, "chunks", lambda self: (read.append(self.entry.name), chunks(self))[1]
    )
    monkeypatch.setattr(table_storage.MappedTensor, "gather", None)
    drawn = []
    normal = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda self, *args, **kwargs: (drawn.append(self), normal(self, *args, **kwargs))[1]
    )
    load(folder, placement)
    keys = [f"model.engram_memory.tables.{i}.weight" for i in range(2)]
    assert read == (keys if placement == "cpu" else [])
    assert not any(not tensor.is_meta for tensor in drawn)


@pytest.mark.parametrize("beside", [False, True])
def test_huge_table(tiny_config, tmp_path, beside):
    """A table of 256 GB as a sparse file, alone in it or beside the other weights, opens and is looked up."""
    config = tiny_config(engram_vocab_size=2**30 // 6, engram_head_dim=64, engram_layer_ids=[0])
    with torch.device("meta"):
        shapes = EngramForCausalLM(config).state_dict()
    tensors = {
        key: torch.zeros(value.shape, dtype=value.dtype) for key, value in shapes.items() if "tables" not in key
    }
    hasher = EngramModel(tiny_config(engram_layer_ids=[0])).engram_hasher
    hasher.config = config
    tensors |= {f"model.engram_hasher.{name}": value for name, value in hasher.constants().items()}
    key, rows = "model.engram_memory.tables.0.weight", config.engram_num_embeddings[0]
    size = rows * 64 * 4
    if beside:
        file = tmp_path / "model.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header, data = json.loads(data[8 : 8 + length]), data[8 + length :]
    else:
        names = dict.fromkeys(tensors, "model-00001-of-00002.safetensors") | {key: "model-00002-of-00002.safetensors"}
        save_file(tensors, tmp_path / names["lm_head.weight"], metadata={"format": "pt"})
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
        file, header, data = tmp_path / names[key], {}, b""
    header[key] = {"dtype": "F32", "shape": [rows, 64], "data_offsets": [len(data), len(data) + size]}
    header = json.dumps(header).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)
    os.truncate(file, file.stat().st_size + size)
    # As saved models have it; without, Transformers opens the first file to see.
    config.dtype = "float32"
    config.save_pretrained(tmp_path)
    loaded = load(tmp_path, "disk")
    assert size > 2**38 and file.stat().st_blocks * 512 < 2**20
    assert torch.isfinite(logits_of(loaded, torch.randint(3, 96, (1, 50)))).all()
    if not beside:
        # Into the same folder: no table is copied, for which there is no room.
        loaded.save_pretrained(tmp_path)
        assert load(tmp_path, "disk").engram_memory.tables[0].disk.rows == rows


# Training.


def test_tables_in_host_memory_train(folder, model, ids):
    """As those beside the model do; tables on disk are frozen and the rest trains."""
    grads = {}
    for placement in PLACEMENTS:
        loaded = load(folder, placement).train()
        loaded(ids, labels=ids).loss.backward()
        grads[placement] = {name: weight.grad for name, weight in loaded.named_parameters()}
    for placement in ("cpu", "disk"):
        for name, grad in grads["device"].items():
            if placement == "disk" and "tables" in name:
                assert name not in grads["disk"]
            else:
                assert torch.equal(grads[placement][name], grad), name


# Moving.


def test_to_placement(folder, model, ids):
    """From anywhere to anywhere, with the same outputs, noted in the config."""
    loaded = load(folder, "device")
    for placement in ("cpu", "disk", "device", "disk", "cpu", "device", ["disk", "cpu"], ["cpu", "disk"]):
        assert loaded.engram_memory.to_placement(placement) is loaded.engram_memory
        assert loaded.config.engram_placement == placement
        assert torch.equal(logits_of(loaded, ids), logits_of(model, ids)), placement
    with pytest.raises(ValueError, match="engram_placement"):
        loaded.engram_memory.to_placement("nowhere")


def test_to_disk_never_loses_a_table(folder, model, ids, tmp_path):
    """A table that was trained since stays in memory until it is saved; one that has no file too."""
    with pytest.raises(ValueError, match="no file yet"):
        copy.deepcopy(EngramForCausalLM(model.config)).engram_memory.to_placement("disk")
    loaded = load(folder, "cpu")
    with torch.no_grad():
        loaded.engram_memory.tables[1].weight[-1, -1] += 1
    expected = logits_of(loaded, ids)
    with pytest.raises(ValueError, match="save_pretrained"):
        loaded.engram_memory.to_placement("disk")
    assert torch.equal(logits_of(loaded, ids), expected)
    loaded.save_pretrained(tmp_path / "trained")
    loaded.engram_memory.to_placement("disk")
    assert torch.equal(logits_of(loaded, ids), expected)
    assert torch.equal(logits_of(load(tmp_path / "trained", "disk"), ids), expected)


def test_to_placement_follows_the_model(folder):
    """A table that comes back is where and what the model is by then."""
    loaded = load(folder, "cpu").half()
    assert loaded.engram_memory.tables[0].weight.dtype == torch.float32
    loaded.engram_memory.to_placement("device")
    assert loaded.engram_memory.tables[0].weight.dtype == torch.float16


# Fetching.


def test_rows_are_requested_before_layer_0_and_awaited_where_used(folder, ids, monkeypatch):
    order = []
    loaded = load(folder, "disk")
    request, result = table_storage.DiskTable.request, row_request.RowRequest.result
    monkeypatch.setattr(
        table_storage.DiskTable, "request", lambda *args, **kwargs: (order.append("ask"), request(*args, **kwargs))[1]
    )
    monkeypatch.setattr(row_request.RowRequest, "result", lambda self: (order.append("wait"), result(self))[1])
    for index, layer in enumerate(loaded.model.layers):
        layer.register_forward_hook(lambda *args, index=index: order.append(index))
    logits_of(loaded, ids)
    assert order == ["ask", "ask", "wait", 0, 1, "wait", 2]


def test_repeated_ids_are_read_once(folder, monkeypatch):
    loaded = load(folder, "disk")
    seen = []
    gather = table_storage.MappedTensor.gather
    monkeypatch.setattr(
        table_storage.MappedTensor, "gather", lambda self, ids, out: (seen.append(ids), gather(self, ids, out))[1]
    )
    ids = torch.full((4, 20), 5)
    logits_of(loaded, ids)
    hash_ids = loaded.compute_hash_ids(ids)
    assert [len(rows) for rows in seen] == [len(hash_ids[:, :, i].unique()) for i in range(2)]


@pytest.mark.parametrize("placement", MIXED, ids=str)
def test_prefetch(folder, model, ids, placement, random_ids):
    """A forward with the same ids uses what was prefetched, once; another one is not misled."""
    loaded, expected = load(folder, placement), logits_of(model, ids)
    entries = loaded.engram_memory.prefetched.entries
    n_disk = int("disk" in placement)
    loaded.prefetch(ids)
    assert len(entries) == n_disk
    assert torch.equal(logits_of(loaded, random_ids(2, 9, seed=5)), logits_of(model, random_ids(2, 9, seed=5)))
    assert len(entries) == n_disk
    assert torch.equal(logits_of(loaded, ids), expected)
    assert not entries
    hash_ids = loaded.compute_hash_ids(ids)
    loaded.prefetch(hash_ids=hash_ids)
    hash_ids.zero_()
    assert torch.equal(logits_of(loaded, ids), expected)
    assert not entries
    for seed in range(20):
        loaded.prefetch(random_ids(1, 3, seed=seed))
    assert len(entries) <= row_request.PREFETCHED
    copy.deepcopy(loaded)


def test_prefetched_rows_are_the_ones_used(folder, model, ids, monkeypatch):
    """The forward after a prefetch asks for nothing."""
    loaded = load(folder, "disk")
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    loaded.prefetch(ids, attention_mask=mask)
    monkeypatch.setattr(table_storage.DiskTable, "request", None)
    assert torch.equal(logits_of(loaded, ids, attention_mask=mask), logits_of(model, ids, attention_mask=mask))


def test_prefetch_refuses(folder, lively_model, ids):
    loaded = load(folder, "disk")
    for inputs in ({}, {"input_ids": ids, "hash_ids": loaded.compute_hash_ids(ids)}):
        with pytest.raises(ValueError, match="exactly one"):
            loaded.prefetch(**inputs)
    with pytest.raises(ValueError, match="bucket ranges"):
        loaded.prefetch(hash_ids=loaded.compute_hash_ids(ids).flip(-1))
    with pytest.raises(ValueError, match="no Engram layers"):
        lively_model(engram_layer_ids=[]).prefetch(ids)


def test_models_share_a_table_and_threads_share_models(folder, model, random_ids):
    """Several models on one open file, each used by several threads."""
    models = [load(folder, "disk") for _ in range(3)]
    models.append(copy.deepcopy(models[0]))
    assert len({id(item.engram_memory.tables[0].disk) for item in models}) == 1
    batches = [random_ids(2, 12, seed=seed) for seed in range(12)]
    expected = [logits_of(model, ids) for ids in batches]

    def run(index: int) -> bool:
        ids = batches[index % 12]
        if index % 2:
            models[index % 4].prefetch(ids)
        return torch.equal(logits_of(models[index % 4], ids), expected[index % 12])

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(48)))


# Weights that are not as they must be.


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_missing_table(folder, placement):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.engram_memory.tables.1.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack.*engram_memory\.tables\.1\.weight"):
        load(folder, placement)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_table_of_another_shape(folder, placement):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.engram_memory.tables.1.weight"] = torch.zeros(605, 8)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises((ValueError, RuntimeError)) as raised:
        load(folder, placement)
    if placement != "device":
        assert "[605, 8]" in str(raised.value) and "[606, 8]" in str(raised.value)


def test_only_safetensors(folder, model):
    """A pickle is neither mapped nor read for a table away from the model."""
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for placement in ("cpu", "disk"):
        with pytest.raises(ValueError, match="safetensors"):
            load(folder, placement)


def test_new_weights(model):
    """Without a path and with no weights, all is initialised, tables beside the model as ever."""
    fresh = EngramForCausalLM.from_pretrained(None, config=model.config, state_dict={})
    assert (fresh.engram_memory.tables[0].weight == 0).all()
    assert 0.05 < fresh.model.layers[0].engram.wkv.weight.std() < 0.2


def test_state_dict_instead_of_files(model, ids):
    """Weights that are passed go into host memory; there is no file to map."""
    config = copy.deepcopy(model.config)
    config.engram_placement = "cpu"
    loaded = EngramForCausalLM.from_pretrained(None, config=config, state_dict=model.state_dict())
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    config.engram_placement = "disk"
    with pytest.raises(ValueError, match="safetensors"):
        EngramForCausalLM.from_pretrained(None, config=config, state_dict=model.state_dict())


def test_table_that_was_never_loaded(tiny_config, ids):
    """A model made from a config has no file to read from, and says so instead of making up a table."""
    model = EngramForCausalLM(tiny_config(engram_placement="disk"))
    with pytest.raises(ValueError, match="no file is open: load"):
        model(ids)
    with pytest.raises(ValueError, match="not loaded"):
        model.engram_memory.to_placement("cpu")
    with pytest.raises(ValueError, match="not loaded"):
        model.save_pretrained("never")
    trained = EngramForCausalLM(tiny_config(engram_placement="cpu"))
    assert trained(ids).logits.isfinite().all() and trained.engram_memory.tables[0].weight.std() < 0.1


def test_ids_beyond_the_last_row(folder):
    """Of the memory itself; the model checks hash ids before."""
    hash_ids = torch.zeros(1, 2, 2, 6, dtype=torch.int64)
    hash_ids[0, 1, 1, 3] = 606
    for placement in PLACEMENTS:
        with pytest.raises(IndexError, match="605, the last row"):
            load(folder, placement).engram_memory(hash_ids)


def test_compiled(lively_model, ids, tmp_path):
    """In a compiled model the request and the wait are calls between graphs."""
    lively_model(num_hidden_layers=1, engram_layer_ids=[0]).save_pretrained(tmp_path)
    logits = [logits_of(torch.compile(load(tmp_path, place), backend="eager"), ids) for place in ("disk", "device")]
    assert torch.equal(*logits)


def test_no_thread_outlives_its_work(folder, ids):
    """Reading threads are few and shared by all tables."""
    for _ in range(3):
        logits_of(load(folder, "disk"), ids)
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("engram-rows")]
    assert len(names) <= table_storage.WORKERS


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_accelerate_brings_what_it_offloaded(lively_model, random_ids, tmp_path, offload):
    """Tables that hooks keep elsewhere until their module is called."""
    model, ids = lively_model(), random_ids(2, 6)
    with torch.no_grad():
        expected = model(ids).logits
        if offload == "cpu":
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        else:
            accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
        assert model.model.engram_memory.tables[0].weight.is_meta
        assert torch.equal(model(ids).logits, expected)


def test_adapters_on_a_table_are_refused(lively_model, random_ids):
    """They would train nothing, and change what the model computes when merged."""
    adapted = get_peft_model(lively_model(), LoraConfig(target_modules=["tables.0", "q_proj"]))
    with pytest.raises(TypeError, match=r"`tables\.0` is a"):
        adapted(random_ids(1, 5))
