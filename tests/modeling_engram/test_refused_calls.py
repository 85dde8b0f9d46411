"""Calls that are refused, or fail in the middle, change nothing: neither the tables nor the config."""

import errno

import pytest
import torch
from placement_helpers import load

from hf_engram.modeling_engram import engram_table


def state(model) -> tuple:
    tables = model.engram_memory.tables
    rows = [None if table.weight is None else table.weight.detach().float().clone() for table in tables]
    kinds = [(table.placement, table.is_quantised, table.disk) for table in tables]
    trains = [table.weight is not None and table.weight.requires_grad for table in tables]
    return rows, kinds, trains, model.config.to_dict()


def same(one: tuple, two: tuple) -> bool:
    rows = zip(one[0], two[0], strict=True)
    return one[1:] == two[1:] and all((a is b) if a is None or b is None else torch.equal(a, b) for a, b in rows)


@pytest.fixture
def folder(lively_model, tmp_path):
    lively_model(engram_head_dim=32).save_pretrained(tmp_path)
    return tmp_path


def infinite(model) -> None:
    with torch.no_grad():
        model.engram_memory.tables[1].weight[3] = float("inf")


@pytest.mark.parametrize(
    ("placement", "spoil", "message"),
    [
        ("device", infinite, "infinite"),
        (["device", "disk"], lambda model: None, "on disk is never written to"),
        ("cpu", lambda model: setattr(model.config, "engram_scale_block_size", 24), "does not divide"),
    ],
    ids=["infinite number", "on disk", "block size"],
)
def test_quantising(folder, placement, spoil, message):
    model = load(folder, placement)
    spoil(model)
    before = state(model)
    with pytest.raises(ValueError, match=message):
        model.quantize_tables()
    assert same(state(model), before)


def test_moving_to_disk(folder):
    """The second table is not what the file holds."""
    model = load(folder, "device")
    with torch.no_grad():
        model.engram_memory.tables[1].weight[0] += 1
    before = state(model)
    with pytest.raises(ValueError, match="is not what"):
        model.engram_memory.to_placement("disk")
    assert same(state(model), before)


@pytest.mark.parametrize("placement", ["disk", "device"])
def test_memory_runs_out(folder, monkeypatch, placement):
    model, empty, calls = load(folder, placement), engram_table.host_empty, []

    def second_time(*args):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return empty(*args)

    before = state(model)
    monkeypatch.setattr(engram_table, "host_empty", second_time)
    with pytest.raises(OSError, match="allocate"):
        model.engram_memory.to_placement("cpu")
    assert same(state(model), before)
    model.engram_memory.to_placement("cpu")
    assert [table.placement for table in model.engram_memory.tables] == ["cpu", "cpu"]


def test_a_state_dict_that_does_not_fit(folder, lively_model):
    """Of quantised tables for float ones, and of another size: no parameter is copied."""
    quantised = load(folder, "device")
    quantised.quantize_tables()
    for other in (quantised, lively_model(engram_head_dim=32, intermediate_size=24)):
        model = load(folder, "device")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            other.model.embed_tokens.weight.add_(1)
        with pytest.raises(RuntimeError):
            model.load_state_dict(other.state_dict())
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
