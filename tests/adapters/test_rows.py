"""Table rows as a part of PEFT's adapters: switched with them to the bit, kept apart, known by their base."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from peft import (
    IA3Config,
    LoHaConfig,
    PeftModel,
    PeftModelForCausalLM,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    convert_to_lora,
    get_peft_model,
    get_peft_model_state_dict,
)
from rows_helpers import adapted, logits_of, lora, same, tables_of, train
from safetensors.torch import load_file, save_file

from hf_engram import EngramForCausalLM
from hf_engram.adapters import LORA_TARGETS, TableDelta, engram_tables, find_memory, unfreeze_tables
from hf_engram.optim import EngramOptimizer
from hf_engram.tokenization.token_map import token_map_sha256


ROWS = "base_model.model.model.engram_memory"


@pytest.fixture
def three(lively_model, random_ids, tmp_path):
    """A model with adapters one and two, which have rows, and plain, which has none; and the tables with each."""
    ids = random_ids(2, 8)
    folders, tables = {}, {None: tables_of(lively_model())}
    for seed, name in enumerate(("one", "two", "plain")):
        model = adapted(lively_model())
        if name != "plain":
            unfreeze_tables(model)
        train(model, random_ids(2, 8, seed))
        tables[name] = tables_of(model)
        model.save_pretrained(tmp_path / name)
        folders[name] = tmp_path / name
    assert not same(tables["one"], tables["two"]) and not same(tables["one"], tables[None])
    assert same(tables["plain"], tables[None])
    model = PeftModel.from_pretrained(lively_model(), folders["one"], adapter_name="one")
    for name in ("two", "plain"):
        model.load_adapter(folders[name], adapter_name=name)
    return model, tables, ids


def test_switching(three):
    """Whatever PEFT switches, tables hold the rows of what is active, and else the base's."""
    model, tables, _ = three
    assert same(tables_of(model), tables["one"])
    for name in ("two", "plain", "one", "two", "one", "plain"):
        model.set_adapter(name)
        assert same(tables_of(model), tables[name])
        assert model.get_model_status().active_adapters == [name] and model.get_model_status().enabled is True
        with model.disable_adapter():
            assert same(tables_of(model), tables[None])
        assert same(tables_of(model), tables[name])
    assert not any(table.requires_grad for table in engram_tables(model))
    model.set_adapter("two")
    assert all(table.requires_grad for table in engram_tables(model))
    model.delete_adapter("one")
    assert same(tables_of(model), tables["two"])
    model.delete_adapter("two")
    assert same(tables_of(model), tables[None]) and model.active_adapters == ["plain"]


def test_saved_whether_active_or_not(three, tmp_path):
    """Each adapter's file holds its own rows, also while another is active, or none."""
    model, _, _ = three
    expected = {name: load_file(tmp_path / name / "adapter_model.safetensors") for name in ("one", "two", "plain")}
    assert not any("engram_memory" in key for key in expected["plain"])
    for active in ("one", "two", "plain"):
        model.set_adapter(active)
        for enabled in (True, False):
            model.base_model._enable_adapter_layers(enabled)
            for name, tensors in expected.items():
                found = get_peft_model_state_dict(model, adapter_name=name)
                assert found.keys() == tensors.keys()
                assert all(torch.equal(found[key].cpu(), tensors[key]) for key in tensors)


@pytest.mark.parametrize("end", ["unload", "merge_and_unload"])
@pytest.mark.parametrize("active", ["one", "two", "plain"])
def test_unloading(three, end, active):
    model, tables, ids = three
    model.set_adapter(active)
    expected = logits_of(model, ids)
    plain = getattr(model, end)()
    assert type(plain) is EngramForCausalLM
    assert same(tables_of(plain), tables[active if end == "merge_and_unload" else None])
    if end == "merge_and_unload":
        assert torch.allclose(logits_of(plain, ids), expected, atol=1e-4)
    # Nothing is left over: another adapter begins with these tables.
    before = tables_of(plain)
    again = adapted(plain)
    unfreeze_tables(again)
    train(again, ids)
    assert same(tables_of(again.unload()), before)


def test_one_at_a_time(three):
    """Two adapters with rows have no room in one table, nor in one batch; nothing changes."""
    model, tables, ids = three
    with pytest.raises(ValueError, match=r"Of the adapters \['one', 'two'\] each has table rows"):
        model.base_model.set_adapter(["one", "two"])
    assert same(tables_of(model), tables["one"])
    model.base_model.set_adapter(["plain", "two"])
    assert same(tables_of(model), tables["two"])
    with pytest.raises(ValueError, match="`adapter_names` mixes adapters in one batch, but one, two"):
        model.eval()(input_ids=ids, adapter_names=["one", "two"])
    with pytest.raises(ValueError, match="'one' has table rows, which cannot be combined"):
        model.add_weighted_adapter(["one", "two"], [0.5, 0.5], "both")


@pytest.mark.parametrize("placement", ["device", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_placement(lively_model, random_ids, tmp_path, dtype, placement):
    """Rows of each dtype, in host memory too, come back to the bit; the base may be loaded in fp32 for any of them."""
    lively_model().to(dtype).save_pretrained(tmp_path / "base")
    base = EngramForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype, engram_placement=placement)
    before, ids = tables_of(base), random_ids(2, 8)
    model = adapted(base)
    assert all(table.dtype == dtype for table in unfreeze_tables(model))
    train(model, ids)
    trained = tables_of(model)
    model.save_pretrained(tmp_path / "adapter")
    with model.disable_adapter():
        assert same(tables_of(model), before)
    assert same(tables_of(model), trained) and not same(trained, before)
    for other in {dtype, torch.float32}:
        base = EngramForCausalLM.from_pretrained(tmp_path / "base", dtype=other, engram_placement=placement)
        original = tables_of(base)
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
        delta = TableDelta.load(tmp_path / "adapter")
        for index, rows in enumerate(delta.rows):
            assert torch.equal(tables_of(loaded)[index][rows], trained[index][rows].to(other))
        assert same(tables_of(loaded.unload()), original)


def test_a_coarser_base(lively_model, random_ids, tmp_path):
    """An adapter of an fp32 base goes onto it in bf16; casting a model casts what was kept aside, too."""
    lively_model().save_pretrained(tmp_path / "base")
    model = adapted(EngramForCausalLM.from_pretrained(tmp_path / "base"))
    unfreeze_tables(model)
    train(model, random_ids(2, 8))
    model.save_pretrained(tmp_path / "adapter")
    base = EngramForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    before = tables_of(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    expected = [table.bfloat16() for table in tables_of(model)]
    assert same(tables_of(loaded), expected)
    model.to(torch.bfloat16)
    assert same(tables_of(model), expected)
    for each in (loaded, model):
        assert same(tables_of(each.unload()), before)


def test_other_optimizers(lively_model, random_ids, tmp_path):
    """torch's AdamW with dense gradients decays every row, SparseAdam those of earlier batches. All come back."""
    base, ids = lively_model(), random_ids(2, 8)
    before = tables_of(base)
    for sparse, make in ((False, lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)),
                         (True, lambda p: torch.optim.SparseAdam(p, lr=1e-2))):  # fmt: skip
        model = adapted(base)
        tables = unfreeze_tables(model, sparse_grad=sparse)
        optimizer = make(tables)
        for seed in range(3):
            train(model, random_ids(2, 8, seed), 1, optimizer)
        model.save_pretrained(tmp_path / str(sparse))
        delta = TableDelta.load(tmp_path / str(sparse))
        assert same(tables_of(PeftModel.from_pretrained(lively_model(), tmp_path / str(sparse))), tables_of(model))
        assert all((len(rows) == len(table)) != sparse for rows, table in zip(delta.rows, tables, strict=True))
        base = model.unload()
        assert same(tables_of(base), before)
    assert not torch.equal(ids, random_ids(2, 8, 1))


def test_a_closure(lively_model, random_ids):
    """Gradients that a step makes itself are not there before it."""
    base, ids = lively_model(), random_ids(2, 8)
    before = tables_of(base)
    model = adapted(base)
    unfreeze_tables(model)
    optimizer = EngramOptimizer(model, lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert not same(tables_of(model), before)
    assert same(tables_of(model.unload()), before)


def test_a_reference_between_forward_and_backward(lively_model, random_ids):
    """As preference training has it: the base computes while the adapter's graph waits. Gradients are the same."""
    ids, found = random_ids(2, 8), []
    for interrupted in (False, True):
        model = adapted(lively_model())
        unfreeze_tables(model)
        train(model, ids)
        loss = model(input_ids=ids, labels=ids).loss
        if interrupted:
            with model.disable_adapter(), torch.no_grad():
                expected = logits_of(lively_model(), ids)
                assert torch.equal(model(input_ids=ids).logits, expected)
        loss.backward()
        found.append([table.grad.to_dense() for table in engram_tables(model)])
    assert same(*found)


def test_gradient_checkpointing(lively_model, random_ids):
    ids, found = random_ids(2, 8), []
    for checkpointing in (False, True):
        model = adapted(lively_model())
        unfreeze_tables(model)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.train()
        train(model, ids)
        found.append(tables_of(model))
    assert same(*found)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies(lively_model, random_ids, copied):
    """A copy is trained and switched off by itself."""
    ids = random_ids(2, 8)
    before = tables_of(lively_model())
    model = adapted(lively_model())
    unfreeze_tables(model)
    train(model, ids)
    trained = tables_of(model)
    other = copied(model)
    train(other, random_ids(2, 8, 1))
    assert same(tables_of(model), trained) and not same(tables_of(other), trained)
    for each in (other, model):
        assert same(tables_of(each.unload()), before)


def test_writes_by_hand(lively_model, random_ids, tmp_path):
    """A write that nobody has told of is an error when rows are wanted, not a loss; `touch` tells of it."""
    before, ids = tables_of(lively_model()), random_ids(2, 8)
    for told in (True, False):
        model = adapted(lively_model())
        tables, memory = unfreeze_tables(model), find_memory(model)
        train(model, ids)
        if told:
            memory.touch(1, torch.tensor([7, 3]))
        with torch.no_grad():
            tables[1][[3, 7]] += 1
        if not told:
            for call, given in ((model.save_pretrained, [tmp_path / "none"]), (model.unload, [])):
                with pytest.raises(RuntimeError, match=r"Table 1 was written to since the last step .*touch"):
                    call(*given)
            continue
        model.save_pretrained(tmp_path / "adapter")
        assert {3, 7} <= set(TableDelta.load(tmp_path / "adapter").rows[1].tolist())
        assert same(tables_of(model.unload()), before)


def test_whole_state_dicts(lively_model, random_ids):
    """A state dict over an adapter's model (accelerate's `load_state`): what differs from the base are its rows."""
    ids = random_ids(2, 8)
    model = adapted(lively_model())
    unfreeze_tables(model)
    train(model, ids)
    other = adapted(lively_model())
    unfreeze_tables(other)
    train(other, random_ids(2, 8, 1), 1)
    other.load_state_dict(model.state_dict())
    assert same(tables_of(other), tables_of(model))
    one, two = (get_peft_model_state_dict(each) for each in (model, other))
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    assert same(tables_of(other.unload()), tables_of(lively_model()))


def test_what_cannot_be_done_to_tables_with_rows(lively_model, tmp_path):
    lively_model(engram_head_dim=32).save_pretrained(tmp_path)
    model = adapted(EngramForCausalLM.from_pretrained(tmp_path))
    unfreeze_tables(model)
    memory = find_memory(model)
    with pytest.raises(ValueError, match=r"cannot be quantised while adapters have rows .*default"):
        memory.quantize_tables()
    with pytest.raises(ValueError, match="cannot be moved to disk while adapters have rows"):
        memory.to_placement("disk")
    plain = model.unload()
    plain.engram_memory.to_placement("disk")
    with pytest.raises(ValueError, match="Table 0 is on disk"):
        adapted(plain, modules_to_save=["engram_memory"])


@pytest.mark.parametrize("name", ["0", "rows", "tables"])
def test_names_that_peft_would_cut_out(lively_model, name):
    model = get_peft_model(lively_model(), lora(), adapter_name=name)
    with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
        unfreeze_tables(model)


@pytest.mark.parametrize(
    "config",
    [LoHaConfig(r=2, target_modules=["q_proj", "wkv"]), IA3Config(task_type="CAUSAL_LM")],
    ids=["LoHa", "IA3"],
)
def test_other_methods(lively_model, random_ids, tmp_path, config):
    """Rows are no matter of LoRA."""
    ids, before = random_ids(2, 8), tables_of(lively_model())
    model = get_peft_model(lively_model(), config)
    unfreeze_tables(model)
    train(model, ids)
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(lively_model(), tmp_path)
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    assert same(tables_of(loaded.unload()), before)


def test_default_targets(lively_model):
    """`get_peft_model` without `target_modules` finds ours."""
    model = adapted(lively_model())
    assert model.peft_config["default"].target_modules == set(LORA_TARGETS)


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_virtual_tokens_are_refused(lively_model, kind):
    """When the adapter is made, with the reason; without memory they work."""
    config = kind(num_virtual_tokens=4, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="virtual token has no id, so that the n-grams"):
        get_peft_model(lively_model(), config)
    plain = get_peft_model(lively_model(engram_layer_ids=[]), config)
    assert type(plain) is PeftModelForCausalLM


def test_rows_of_zero_know_their_base(lively_model, random_ids, tmp_path):
    """Tables of zeros, as every model begins with, are all alike: token map and weights tell the bases apart."""

    def make(seed: int, token_map: np.ndarray):
        fields = {"engram_token_map_size": 96, "engram_token_map_sha256": token_map_sha256(token_map)}
        model = lively_model(seed=seed, engram_compressed_vocab_size=96, **fields)
        model.model.engram_hasher.bind_token_map(token_map)
        with torch.no_grad():
            for table in engram_tables(model):
                table.zero_()
        return model

    plain = np.arange(96, dtype=np.int32)
    permuted = np.random.default_rng(0).permutation(96).astype(np.int32)
    model = adapted(make(1, plain))
    unfreeze_tables(model)
    train(model, random_ids(2, 8))
    model.save_pretrained(tmp_path)
    assert same(tables_of(PeftModel.from_pretrained(make(1, plain), tmp_path)), tables_of(model))
    for other, message in (
        (make(1, permuted), "made with the token map"),
        (make(2, plain), "Engram layers, which rea"),
    ):
        with pytest.raises(ValueError, match=message):
            PeftModel.from_pretrained(other, tmp_path)
        assert not any(table.any() for table in engram_tables(other))


def test_damaged_adapters(lively_model, random_ids, tmp_path):
    """Errors that say what is wrong with the file, and what to do."""
    model = adapted(lively_model())
    unfreeze_tables(model)
    train(model, random_ids(2, 8))
    model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    good = load_file(path)
    about = json.loads(bytes(good[f"{ROWS}.trained_rows"].numpy()))
    assert about["layout"]["engram_layer_ids"] == [0, 2]

    def refused(message: str, changed: dict | None = None, without: str | None = None) -> None:
        tensors = {**good, **(changed or {})}
        save_file({key: value for key, value in tensors.items() if key != without}, path, metadata={"format": "pt"})
        with pytest.raises(ValueError, match=message):
            PeftModel.from_pretrained(lively_model(), tmp_path)
        with pytest.raises(ValueError, match=message):
            EngramForCausalLM.from_pretrained(tmp_path / "base").load_adapter(tmp_path)

    lively_model().save_pretrained(tmp_path / "base")
    values = good[f"{ROWS}.tables.0.weight"]
    refused("its rows are not those that were saved .* Download it again", {f"{ROWS}.tables.0.weight": values + 1})
    refused("what it says of its table rows is damaged", {f"{ROWS}.trained_rows": torch.zeros(3, dtype=torch.uint8)})
    refused(r"holds .* in place of .*: it is damaged", without=f"{ROWS}.tables.1.rows")
    save_file({key: value for key, value in good.items() if "engram_memory" not in key}, path)
    with pytest.raises(ValueError, match="holds no table rows, but the adapter 'default' has some"):
        PeftModel.from_pretrained(lively_model(), tmp_path)
    with pytest.raises(ValueError, match="holds no table rows, but the adapter 'default' has some"):
        EngramForCausalLM.from_pretrained(tmp_path / "base").load_adapter(tmp_path)


def test_size(lively_model, random_ids, tmp_path):
    """The file grows with the rows that changed, not with the tables; and so does what is kept aside."""
    model, ids = adapted(lively_model(engram_vocab_size=20000)), random_ids(2, 8)
    unfreeze_tables(model)
    train(model, ids)
    model.save_pretrained(tmp_path)
    changed = sum(len(rows) for rows in TableDelta.load(tmp_path).rows)
    without = adapted(lively_model(engram_vocab_size=20000))
    without.save_pretrained(tmp_path / "without")
    name = "adapter_model.safetensors"
    grown = (tmp_path / name).stat().st_size - (tmp_path / "without" / name).stat().st_size
    assert 0 < grown < changed * (8 + 4 * 8) + 4000
    # Those of the batch, also where nothing is predicted from a token.
    hash_ids = model.get_base_model().compute_hash_ids(ids)
    for index, touched in enumerate(find_memory(model)._touched):
        assert torch.equal(touched.sorted()[0], hash_ids[:, :, index].unique())


def test_conversion_to_lora_is_refused(lively_model):
    """PEFT's `convert_to_lora` would leave the rows out."""
    model = get_peft_model(lively_model(), LoHaConfig(r=2, target_modules=["q_proj"]))
    unfreeze_tables(model)
    with pytest.raises(ValueError, match="default have table rows, which cannot be converted"):
        convert_to_lora(model, rank=2)
