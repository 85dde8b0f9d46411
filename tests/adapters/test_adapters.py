"""LoRA with PEFT on Engram models, and trained tables as only the rows that changed."""

import json
import os
import subprocess
import sys

import pytest
import torch
from peft import PeftModel
from rows_helpers import adapted, logits_of, train
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hf_engram import EngramForCausalLM
from hf_engram.adapters import (
    TABLE_DELTA_FILE,
    TableDelta,
    engram_tables,
    load_table_delta,
    save_table_delta,
    unfreeze_tables,
)


STREAM = ["attn_hc", "mlp_hc"]


@pytest.fixture
def base_folder(lively_model, tmp_path):
    lively_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def trained(lively_model, random_ids, base_folder):
    """A model with an adapter and tables, trained for three steps; and the ids it was trained on."""
    model = adapted(lively_model())
    unfreeze_tables(model)
    ids = random_ids(2, 8)
    train(model, ids)
    return model, ids


def test_recommended_targets(lively_model):
    """They are all linear layers of the decoder layers, `wkv` among them."""
    model = adapted(lively_model())
    wrapped = {name.rpartition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A." in name}
    linear = {f"base_model.model.{name}" for name, m in lively_model().named_modules() if type(m) is torch.nn.Linear}
    assert wrapped == linear - {"base_model.model.lm_head"}
    assert sum(name.endswith("engram.wkv") for name in wrapped) == 2


@pytest.mark.parametrize("full", [[], ["engram"], STREAM, ["engram", *STREAM]], ids=str)
@pytest.mark.parametrize("tables", ["frozen", "row-wise"])
def test_what_is_trained(lively_model, random_ids, full, tables):
    """Every parameter that is to be trained changes, and no other; the loss falls."""
    model = adapted(lively_model(), modules_to_save=full or None)
    if tables == "row-wise":
        unfreeze_tables(model)
    before = {name: value.clone() for name, value in model.named_parameters()}
    losses = train(model, random_ids(2, 8))
    assert losses[-1] < losses[0] - 0.01
    for name, value in model.named_parameters():
        wanted = "lora_" in name or "modules_to_save" in name or (tables == "row-wise" and "engram_memory" in name)
        assert torch.equal(value, before[name]) != wanted, name
    kinds = {"engram": "engram.modules_to_save", "attn_hc": "attn_hc.modules_to_save"}
    for module, kind in kinds.items():
        assert any(kind in name for name in before) == (module in full)


@pytest.mark.parametrize("name", ["engram_memory", "tables.0"])
def test_tables_in_modules_to_save(lively_model, random_ids, tmp_path, name):
    """PEFT would copy whole tables; what comes into the adapter are the rows that changed."""
    model = adapted(lively_model(), modules_to_save=[name])
    assert all(table.requires_grad for table in engram_tables(model))
    ids = random_ids(2, 8)
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    for index, table in enumerate(engram_tables(model)):
        rows = saved[f"base_model.model.model.engram_memory.tables.{index}.rows"]
        assert 0 < len(rows) < len(table)
    loaded = PeftModel.from_pretrained(lively_model(), tmp_path)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))


@pytest.mark.parametrize("full", [None, ["engram", *STREAM]], ids=["lora", "full"])
def test_save_and_load(lively_model, random_ids, base_folder, tmp_path, full):
    """The adapter gives the trained model again, to the bit, and holds just the rows of the batch. The delta is what
    a comparison with the base finds."""
    model = adapted(lively_model(), modules_to_save=full)
    unfreeze_tables(model)
    ids = random_ids(2, 8)
    train(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    delta = TableDelta.load(tmp_path / "adapter")
    found = TableDelta.between(model, base_folder)
    assert found.about == delta.about and all(map(torch.equal, found.rows, delta.rows))
    # Nothing is predicted from the last token.
    hash_ids = model.get_base_model().compute_hash_ids(ids)[:, :-1]
    for index, rows in enumerate(delta.rows):
        assert torch.equal(rows, hash_ids[:, :, index].unique())
        assert len(rows) < len(engram_tables(model)[index])

    loaded = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained(base_folder), tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert not any(table.requires_grad for table in engram_tables(loaded))
    # What was needed before rows were part of the adapter does no harm.
    undo = load_table_delta(loaded, tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    undo.apply(loaded)
    assert all(map(torch.equal, engram_tables(loaded), engram_tables(EngramForCausalLM.from_pretrained(base_folder))))


def test_merge(trained, base_folder, tmp_path):
    """Merged, the model computes the same, is an ordinary one, and keeps the rows."""
    model, ids = trained
    expected = logits_of(model, ids)
    tables = [table.clone() for table in engram_tables(model)]
    merged = model.merge_and_unload()
    assert type(merged) is EngramForCausalLM
    assert torch.allclose(logits_of(merged, ids), expected, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = EngramForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(loaded, ids), logits_of(merged, ids))
    assert all(torch.equal(one, two) for one, two in zip(engram_tables(loaded), tables, strict=True))


REMOTE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_engram":
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
base, adapter, merged, data = sys.argv[1:]
expected = load_file(data)
model = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
model = PeftModel.from_pretrained(model, adapter, adapter_name="first").eval()
with torch.no_grad():
    assert torch.equal(model(input_ids=expected["ids"]).logits, expected["logits"])
config = LoraConfig(target_modules=["q_proj", "wkv"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
model.add_adapter("second", config)
model.set_adapter("second")
with torch.no_grad():
    assert not torch.allclose(model.eval()(input_ids=expected["ids"]).logits, expected["logits"], atol=1e-3)
tables = model.get_base_model().engram_memory.tables
plain = AutoModelForCausalLM.from_pretrained(base, trust_remote_code=True)
base_tables = [part.weight for part in plain.engram_memory.tables]
assert all(torch.equal(one.weight, two) for one, two in zip(tables, base_tables))
model.set_adapter("first")
assert not any(torch.equal(one.weight, two) for one, two in zip(tables, base_tables))
again = model.merge_and_unload(adapter_names=["first"])
with torch.no_grad():
    assert torch.allclose(again(expected["ids"]).logits, expected["logits"], atol=1e-4)
again.save_pretrained(merged)
assert "hf_engram" not in sys.modules
"""


def test_adapter_on_remote_code(lively_model, random_ids, base_folder, tmp_path):
    """In a process without this package: loaded, changed for another, merged, saved; and the result loads here."""
    model = adapted(lively_model(), modules_to_save=STREAM)
    unfreeze_tables(model)
    ids = random_ids(2, 8)
    train(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    logits = logits_of(model, ids)
    save_file({"ids": ids, "logits": logits}, tmp_path / "data.safetensors")
    paths = [str(tmp_path / name) for name in ("base", "adapter", "merged", "data.safetensors")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", REMOTE, *paths], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert torch.allclose(logits_of(EngramForCausalLM.from_pretrained(tmp_path / "merged"), ids), logits, atol=1e-4)


def test_rows_on_remote_code(trained, base_folder, tmp_path, remote_modules):
    """The rows are taken by a model whose classes came with its folder."""
    import transformers.dynamic_module_utils as dynamic

    model, ids = trained
    model.save_pretrained(tmp_path / "adapter")
    # What `trust_remote_code=True` does where the package is not installed.
    remote_class = dynamic.get_class_from_dynamic_module("modeling_engram.EngramForCausalLM", base_folder)
    base = remote_class.from_pretrained(base_folder)
    assert type(base) is not EngramForCausalLM
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    with loaded.disable_adapter():
        assert torch.equal(logits_of(loaded, ids), logits_of(EngramForCausalLM.from_pretrained(base_folder), ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_another_dtype(trained, base_folder, tmp_path, dtype):
    """A delta that was trained in fp32 goes onto the base loaded in another dtype."""
    model, _ = trained
    delta = save_table_delta(model, base_folder, tmp_path / "adapter")
    base = EngramForCausalLM.from_pretrained(base_folder, dtype=dtype)
    before = [table.clone() for table in engram_tables(base)]
    undo = load_table_delta(base, tmp_path / "adapter")
    for table, rows, values in zip(engram_tables(base), delta.rows, delta.values, strict=True):
        assert torch.equal(table[rows], values.to(dtype))
    undo.apply(base)
    assert all(torch.equal(one, two) for one, two in zip(engram_tables(base), before, strict=True))


@pytest.mark.parametrize("kind", ["model", "sharded", "decoder"])
def test_bases(lively_model, tmp_path, monkeypatch, kind):
    """The base as a model, in shards, and without a head; tables are compared in parts."""
    monkeypatch.setattr("hf_engram.modeling_engram.table_delta.COMPARED_AT_ONCE", 8 * 50)
    base, model = lively_model(), lively_model()
    rows = torch.tensor([0, 49, 50, 199])
    with torch.no_grad():
        model.model.engram_memory.tables[1].weight[rows, 3] *= -1
    if kind == "sharded":
        base.save_pretrained(tmp_path / "base", max_shard_size="20KB")
        assert len(list((tmp_path / "base").glob("model-*.safetensors"))) > 2
    elif kind == "decoder":
        base.model.save_pretrained(tmp_path / "base")
    delta = TableDelta.between(model, base if kind == "model" else tmp_path / "base")
    assert [len(r) for r in delta.rows] == [0, 4] and torch.equal(delta.rows[1], rows)
    delta.apply(base)
    assert torch.equal(engram_tables(base)[1], engram_tables(model)[1])


def test_bits_are_compared(lively_model):
    """Not values: zero and minus zero differ, and a NaN equals itself."""
    base, model = lively_model(), lively_model()
    for each in (base, model):
        with torch.no_grad():
            each.model.engram_memory.tables[0].weight[3:5] = torch.tensor([[0.0], [float("nan")]])
    assert not len(TableDelta.between(model, base).rows[0])
    with torch.no_grad():
        model.model.engram_memory.tables[0].weight[3] *= -1
    assert TableDelta.between(model, base).rows[0].tolist() == [3]


def test_size_of_the_file(lively_model, tmp_path):
    """It grows with the rows that changed, not with the table."""
    base, model = (lively_model(engram_vocab_size=20000) for _ in range(2))
    with torch.no_grad():
        model.model.engram_memory.tables[0].weight[:100] += 1
    save_table_delta(model, base, tmp_path)
    assert (tmp_path / TABLE_DELTA_FILE).stat().st_size < 100 * (8 + 4 * 8) + 3000


def test_a_model_of_another_layout(lively_model, trained, base_folder, tmp_path):
    model, _ = trained
    save_table_delta(model, base_folder, tmp_path / "adapter")
    for name, value in (("engram_layer_ids", [0, 1]), ("engram_pad_token_id", 5), ("engram_head_dim", 4)):
        other = lively_model(**{name: value})
        before = [table.clone() for table in engram_tables(other)]
        with pytest.raises(ValueError, match=f"made for `{name}` = .*, the model's is"):
            load_table_delta(other, tmp_path / "adapter")
        assert all(torch.equal(one, two) for one, two in zip(engram_tables(other), before, strict=True))


def test_another_base(lively_model, trained, base_folder, tmp_path):
    model, _ = trained
    save_table_delta(model, base_folder, tmp_path / "adapter")
    with pytest.raises(ValueError, match="another base"):
        load_table_delta(lively_model(seed=1), tmp_path / "adapter")
    for fields, message in (({"engram_layer_ids": [0]}, "has 1 tables, the model has 2"),
                            ({"engram_vocab_size": 70}, "Table 0 of `base` is")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            TableDelta.between(model, lively_model(**fields))


def test_damaged_files(trained, base_folder, lively_model, tmp_path):
    model, _ = trained
    path = save_table_delta(model, base_folder, tmp_path) and tmp_path / TABLE_DELTA_FILE
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert json.loads(metadata["layout"])["engram_layer_ids"] == [0, 2]
    with pytest.raises(OSError, match=TABLE_DELTA_FILE):
        load_table_delta(lively_model(), base_folder)
    save_file(tensors, path)
    with pytest.raises(ValueError, match="is not a table delta"):
        load_table_delta(lively_model(), tmp_path)
    save_file({**tensors, "more": torch.ones(1)}, path, metadata=metadata)
    with pytest.raises(ValueError, match=r"holds .*more.* in place of"):
        load_table_delta(lively_model(), tmp_path)
    save_file({**tensors, "tables.0.rows": tensors["tables.0.rows"] + 10**6}, path, metadata=metadata)
    with pytest.raises(ValueError, match=f"{TABLE_DELTA_FILE}: its rows are not those that were saved .* Download it"):
        load_table_delta(lively_model(), tmp_path)
    older = {name: metadata[name] for name in ("layout", "base_sha256")}
    save_file({**tensors, "tables.0.rows": tensors["tables.0.rows"] + 10**6}, path, metadata=older)
    with pytest.raises(ValueError, match="do not fit table 0"):
        load_table_delta(lively_model(), tmp_path)
    save_file({**tensors, "tables.0.rows": tensors["tables.0.rows"].flip(0)}, path, metadata=older)
    with pytest.raises(ValueError, match="are not ascending row ids"):
        load_table_delta(lively_model(), tmp_path)
    save_file(tensors, path, metadata={**metadata, "layout": "["})
    with pytest.raises(ValueError, match=f"{TABLE_DELTA_FILE}: what it says of its table rows is damaged"):
        load_table_delta(lively_model(), tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=f"{TABLE_DELTA_FILE} is damaged .*download it again"):
        load_table_delta(lively_model(), tmp_path)


def test_a_file_of_an_older_version(trained, base_folder, tmp_path):
    """It says less of its base, and is loaded as before; PEFT's adapter beside it takes the rows over."""
    model, _ = trained
    path = save_table_delta(model, base_folder, tmp_path / "delta") and tmp_path / "delta" / TABLE_DELTA_FILE
    with safe_open(path, framework="pt") as file:
        metadata = {name: file.metadata()[name] for name in ("format", "layout", "base_sha256")}
    save_file(load_file(path), path, metadata=metadata)
    plain = EngramForCausalLM.from_pretrained(base_folder)
    base_tables = [table.clone() for table in engram_tables(plain)]
    undo = load_table_delta(plain, tmp_path / "delta")
    assert all(map(torch.equal, engram_tables(plain), engram_tables(model)))
    with pytest.raises(ValueError, match="another delta is applied already"):
        load_table_delta(plain, tmp_path / "delta")
    undo.apply(plain)
    assert all(map(torch.equal, engram_tables(plain), base_tables))

    adapter = adapted(EngramForCausalLM.from_pretrained(base_folder))
    load_table_delta(adapter, tmp_path / "delta")
    assert all(map(torch.equal, engram_tables(adapter), engram_tables(model)))
    assert not any(table.requires_grad for table in engram_tables(adapter))
    with adapter.disable_adapter():
        assert all(map(torch.equal, engram_tables(adapter), base_tables))
    adapter.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained(base_folder), tmp_path / "adapter")
    assert all(map(torch.equal, engram_tables(again), engram_tables(model)))


def test_models_without_tables(lively_model):
    with pytest.raises(ValueError, match="has no Engram tables"):
        engram_tables(lively_model(engram_layer_ids=[]))
    model = lively_model()
    model.model.engram_memory.tables[0] = torch.nn.ParameterDict()
    with pytest.raises(ValueError, match="Table 0 is of ParameterDict"):
        engram_tables(model)
