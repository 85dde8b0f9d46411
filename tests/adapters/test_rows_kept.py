"""Table rows of adapters in unusual hands: merged and taken out again, copied, written to, stepped or saved by what
does not know whose rows are in the tables. They are right, or there is an error; never other rows."""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed as dist
from peft import (
    PeftModel,
    TrainableTokensConfig,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from rows_helpers import adapted, logits_of, lora, same, tables_of, train
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from hf_engram import EngramForCausalLM
from hf_engram.adapters import TableDelta, engram_tables, find_memory, load_table_delta, unfreeze_tables
from hf_engram.optim import EngramOptimizer


WRITTEN_TO = r"Table 0 was written to since the last step .*touch"


def with_rows(model, sparse_grad: bool = True, **options) -> PeftModel:
    torch.manual_seed(0)
    model = adapted(model, **options)
    unfreeze_tables(model, sparse_grad)
    return model


@pytest.fixture
def two(lively_model):
    """A model with two adapters that have rows, "default" active; nothing is trained."""
    model = with_rows(lively_model())
    model.add_adapter("two", lora(modules_to_save=["engram_memory"]))
    return model


def backward(model, ids) -> None:
    model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("unmerged", [True, False], ids=["unmerged", "merged"])
def test_saved_after_a_merge(lively_model, random_ids, tmp_path, unmerged):
    """As online training has it, which merges for generation. Unmerged weights differ from the base's in rounding; the
    adapter knows those of before."""
    model = with_rows(lively_model())
    train(model, random_ids(2, 8))
    before = get_peft_model_state_dict(model)
    wkv = model.get_base_model().model.layers[0].engram.wkv.base_layer.weight
    weight = wkv.detach().clone()
    model.merge_adapter()
    if unmerged:
        model.unmerge_adapter()
    assert not torch.equal(wkv, weight)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert saved.keys() == before.keys() and all(torch.equal(saved[key], before[key]) for key in saved)
    assert same(tables_of(PeftModel.from_pretrained(lively_model(), tmp_path)), tables_of(model))
    # Another adapter of the base goes beside it, and begins with the base's rows.
    model.load_adapter(tmp_path, "again")
    assert same(tables_of(model.unload()), tables_of(lively_model()))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copies_at_once(lively_model, random_ids, tmp_path, copied):
    """A copy can be saved, switched and stepped before its first forward; an untold write is not forgotten."""
    model = with_rows(lively_model(), sparse_grad=False)
    train(model, random_ids(2, 8), optimizer=EngramOptimizer(model, lr=1e-2))
    trained, base = tables_of(model), tables_of(lively_model())
    other = copied(model)
    other.save_pretrained(tmp_path)
    assert same(tables_of(PeftModel.from_pretrained(lively_model(), tmp_path)), trained)
    other = copied(model)
    with other.disable_adapter():
        assert same(tables_of(other), base)
    other = copied(model)
    for table in engram_tables(other):
        table.grad = torch.ones_like(table)
    torch.optim.AdamW(engram_tables(other), lr=0.1).step()
    assert not same(tables_of(other), trained)
    assert same(tables_of(other.unload()), base)
    with torch.no_grad():
        engram_tables(model)[0][5] += 1
    with pytest.raises(RuntimeError, match=WRITTEN_TO):
        copied(model).unload()


@pytest.mark.parametrize("when", ["before the first forward", "after a switch", "before a cast"])
def test_writes_by_hand_at_any_time(lively_model, random_ids, when):
    model = with_rows(lively_model())
    if when != "before the first forward":
        train(model, random_ids(2, 8))
    if when == "after a switch":
        with model.disable_adapter():
            pass
    with torch.no_grad():
        engram_tables(model)[0][5] += 1
    if when == "before a cast":
        model.double()
    with pytest.raises(RuntimeError, match=WRITTEN_TO):
        model.unload()


def test_writes_where_every_row_is_kept(lively_model, random_ids, tmp_path):
    """After a dense step: as optimizers do it that have other weights for evaluation (schedule-free)."""
    model = with_rows(lively_model(), sparse_grad=False)
    train(model, random_ids(2, 8), optimizer=torch.optim.AdamW(engram_tables(model), lr=1e-2))
    with torch.no_grad():
        engram_tables(model)[0].mul_(1.5)
    model.save_pretrained(tmp_path)
    assert same(tables_of(PeftModel.from_pretrained(lively_model(), tmp_path)), tables_of(model))
    assert same(tables_of(model.unload()), tables_of(lively_model()))


def test_switched_in_inference_mode(lively_model, random_ids):
    """As evaluation does it; then training goes on."""
    model = with_rows(lively_model())
    train(model, random_ids(2, 8))
    trained = tables_of(model)
    with torch.inference_mode(), model.disable_adapter():
        pass
    assert same(tables_of(model), trained)
    train(model, random_ids(2, 8, 1))
    assert same(tables_of(model.unload()), tables_of(lively_model()))


def test_momentum_of_rows_without_gradient(lively_model, random_ids):
    """SGD adds up sparse gradients: a row that a step of a warm-up has left as it was moves later."""
    model = with_rows(lively_model())
    optimizer = torch.optim.SGD(engram_tables(model), lr=0.0, momentum=0.9)
    train(model, random_ids(2, 8), 1, optimizer)
    with model.disable_adapter():
        pass
    assert not any(len(touched.sorted()[0]) for touched in find_memory(model)._touched)
    optimizer.param_groups[0]["lr"] = 0.1
    train(model, random_ids(2, 8, 1), 1, optimizer)
    assert not same(tables_of(model), tables_of(lively_model()))
    assert same(tables_of(model.unload()), tables_of(lively_model()))


def test_an_optimizer_that_nobody_knows(lively_model, random_ids):
    """Of sparse gradients it may make anything."""

    class Decaying(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)

    model = with_rows(lively_model())
    train(model, random_ids(2, 8), 2, Decaying(engram_tables(model), {}))
    assert same(tables_of(model.unload()), tables_of(lively_model()))


def test_steps_with_the_wrong_rows(two, lively_model, random_ids):
    """A gradient is that of the adapter it was made with; with LoRA's own parameters, that cannot go wrong."""
    ids, base = random_ids(2, 8), tables_of(lively_model())
    optimizer = EngramOptimizer(two, lr=0.1)
    backward(two, ids)
    with two.disable_adapter():
        with pytest.raises(RuntimeError, match=r"gradient of the adapter 'default', .* into the base's rows"):
            optimizer.step()
        assert same(tables_of(two), base)
    two.set_adapter("two")
    with pytest.raises(RuntimeError, match=r"gradient of the adapter 'default', .* into 'two'"):
        optimizer.step()
    with pytest.raises(
        RuntimeError, match="gradients of the adapter 'default', to which those of 'two' would be added"
    ):
        backward(two, ids)
    assert same(tables_of(two), base)
    # It is still there for the adapter that it is of.
    two.set_adapter("default")
    optimizer.step()
    assert not same(tables_of(two), base)
    optimizer.zero_grad()
    # What the optimizer has learned of one adapter's rows is no other's.
    two.set_adapter("two")
    backward(two, ids)
    with pytest.raises(RuntimeError, match="state of a table is that of the adapter 'default', not of 'two'"):
        optimizer.step()
    assert same(tables_of(two), base)


def test_adapters_trained_in_turns(two, lively_model, random_ids):
    """Each with its optimizer, gradients set to zero in place: as alone."""
    alone = {}
    for name in ("default", "two"):
        model = with_rows(lively_model(), sparse_grad=False)
        optimizer = torch.optim.AdamW(engram_tables(model), lr=1e-2)
        for seed in range(3):
            train(model, random_ids(2, 8, seed + 10 * (name == "two")), 1, optimizer)
        alone[name] = tables_of(model)
    find_memory(two).sparse_grad = False
    with torch.no_grad():  # LoRA begins without an effect, and stays so
        optimizers = {name: torch.optim.AdamW(engram_tables(two), lr=1e-2) for name in alone}
    for seed in range(3):
        for name, optimizer in optimizers.items():
            two.set_adapter(name)
            backward(two, random_ids(2, 8, seed + 10 * (name == "two")))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    for name, tables in alone.items():
        two.set_adapter(name)
        assert same(tables_of(two), tables)


def test_a_state_dict_of_another(lively_model, random_ids, tmp_path):
    """`save_pretrained(state_dict=...)` with rows (averaged, say) that the model never changed."""
    model, other = with_rows(lively_model()), with_rows(lively_model())
    train(model, random_ids(2, 8))
    train(other, random_ids(2, 8, 1))
    trained = tables_of(model)
    model.save_pretrained(tmp_path, state_dict=other.state_dict())
    assert same(tables_of(PeftModel.from_pretrained(lively_model(), tmp_path)), tables_of(other))
    assert same(tables_of(model), trained)
    assert same(tables_of(model.unload()), tables_of(lively_model()))


def test_trained_but_no_part_of_the_adapter(lively_model, random_ids, tmp_path):
    """Without `unfreeze_tables`, their rows would not be saved."""
    model = adapted(lively_model())
    for table in engram_tables(model):
        table.requires_grad_(True)
    train(model, random_ids(2, 8))
    with pytest.raises(ValueError, match=r"are no part of the adapter 'default'.* call `unfreeze_tables"):
        model.save_pretrained(tmp_path)


def test_weighted_adapters(lively_model):
    """Rows are not combined, not those of a single adapter either; nothing is added."""
    model = with_rows(lively_model())
    model.add_adapter("plain", lora())
    for names in (["default", "plain"], ["plain", "default"], ["default"]):
        with pytest.raises(ValueError, match="'default' has table rows, which cannot be combined"):
            model.add_weighted_adapter(names, [0.5] * len(names), "mixed", "linear")
    assert model.peft_config.keys() == {"default", "plain"}
    model.add_weighted_adapter(["plain"], [0.5], "less", "linear")


def test_a_config_without_modules_to_save(lively_model, random_ids, tmp_path):
    model = get_peft_model(
        lively_model(), TrainableTokensConfig(token_indices=[5, 6], target_modules=["embed_tokens"])
    )
    unfreeze_tables(model)
    train(model, random_ids(2, 8))
    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(lively_model(), tmp_path)
    assert same(tables_of(loaded), tables_of(model))
    assert torch.equal(logits_of(loaded, random_ids(2, 8)), logits_of(model, random_ids(2, 8)))


def test_injected_adapters(lively_model, random_ids):
    """PEFT's functions for models without its wrapper."""
    model, other = inject_adapter_in_model(lora(), lively_model()), inject_adapter_in_model(lora(), lively_model())
    unfreeze_tables(model)
    train(model, random_ids(2, 8))
    set_peft_model_state_dict(other, get_peft_model_state_dict(model))
    assert same(tables_of(other), tables_of(model))


def test_sizes_that_are_to_be_ignored(lively_model, random_ids, tmp_path):
    """With `ignore_mismatched_sizes`, PEFT takes rows for tables of another size."""
    model = with_rows(lively_model())
    train(model, random_ids(2, 8))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load it without `ignore_mismatched_sizes`"):
        PeftModel.from_pretrained(lively_model(), tmp_path, ignore_mismatched_sizes=True)


def test_adapters_of_older_versions_under_transformers(lively_model, random_ids, tmp_path):
    """Their rows are in a file of their own, which Transformers would not load: refused, until saved again."""
    lively_model().save_pretrained(tmp_path / "base")
    model, folder = with_rows(EngramForCausalLM.from_pretrained(tmp_path / "base")), tmp_path / "adapter"
    train(model, random_ids(2, 8))
    model.save_pretrained(folder)
    TableDelta.load(folder).save(folder)
    path = folder / "adapter_model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if "engram_memory" not in key}, path)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, "modules_to_save": None}))
    with pytest.raises(ValueError, match=r"saved by an older version, .* then `load_table_delta`, and save"):
        AutoModelForCausalLM.from_pretrained(folder)
    loaded = PeftModel.from_pretrained(EngramForCausalLM.from_pretrained(tmp_path / "base"), folder)
    load_table_delta(loaded, folder)
    loaded.save_pretrained(folder)
    assert same(tables_of(AutoModelForCausalLM.from_pretrained(folder)), tables_of(model))


def test_tables_that_are_not_here(lively_model, random_ids, tmp_path):
    """Sharded or offloaded after rows were added, or before: an error that says so."""
    with torch.device("meta"):
        empty = EngramForCausalLM(lively_model().config)
    with pytest.raises(ValueError, match="The tables are offloaded, or not loaded yet"):
        adapted(empty, modules_to_save=["engram_memory"])
    model = with_rows(lively_model(), sparse_grad=False)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        optimizer = EngramOptimizer(model, lr=1e-2)
        backward(model, random_ids(2, 8))
        for use in (optimizer.step, lambda: model.save_pretrained(tmp_path / "adapter")):
            with pytest.raises(ValueError, match=r"sharded over processes \(FSDP2\), where an adapter's rows"):
                use()
    finally:
        dist.destroy_process_group()
