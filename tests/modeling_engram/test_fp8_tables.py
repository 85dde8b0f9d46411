"""fp8 tables: how they are made, that they are exact from then on, frozen, and saved with their scales."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_engram import EngramForCausalLM
from hf_engram.modeling_engram.engram_table import dequantise_rows, quantise_rows


FP8, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
# Nearest neighbours of e4m3 are 1/8 of a power of two apart: rounding errs by at most 1/16 of the number, or by half
# the least positive number, 2^-9.
RELATIVE, LEAST = 2**-4, 2**-10


@pytest.fixture
def float_model(lively_model):
    return lively_model(engram_head_dim=64)


@pytest.fixture
def fp8_model(float_model):
    float_model.quantize_tables()
    return float_model


def with_float_tables(model):
    """The same model with the numbers that the fp8 tables stand for, in float tables."""
    twin = EngramForCausalLM(model.config).eval()
    state = model.state_dict()
    for index, table in enumerate(model.engram_memory.tables):
        key = f"model.engram_memory.tables.{index}"
        state[f"{key}.weight"] = dequantise_rows(table.weight, state.pop(f"{key}.scale"))
    twin.load_state_dict(state)
    return twin


@pytest.mark.parametrize("magnitude", [1e-38, 1e-20, 1e-3, 1.0, 449.0, 1e30])
def test_error_bound(magnitude):
    """Every number is within half a step of e4m3 at its block's scale, whatever the magnitude."""
    values = torch.randn(50, 96, generator=torch.Generator().manual_seed(0)) * magnitude
    rows, scales = quantise_rows(values, 32)
    assert rows.dtype == FP8 and scales.dtype == E8M0 and scales.shape == (50, 3)
    step = scales.float().repeat_interleave(32, 1)
    error = (dequantise_rows(rows, scales).double() - values.double()).abs()
    assert (error <= torch.maximum(values.double().abs() * RELATIVE, LEAST * step.double())).all()


@pytest.mark.parametrize("largest", [448.0, 448.0000305, 447.0, 224.0, 1.0, 0.875, 0.8750001, 2.0**-100, 2.0**100])
def test_smallest_scale_that_fits(largest):
    """A block's largest number is at most 448 after scaling, and would not be at half the scale."""
    values = torch.linspace(-largest, largest, 32).unsqueeze(0)
    rows, scales = quantise_rows(values, 32)
    scale = scales.double().item()
    assert largest / scale <= 448 < largest / (scale / 2)
    assert torch.isfinite(rows.float()).all()


def test_numbers_at_the_edges():
    """Zeros stay zeros with their sign, numbers of e4m3 stay as they are, subnormal blocks do not overflow."""
    zeros = torch.zeros(2, 32)
    zeros[1] = -0.0
    rows, scales = quantise_rows(zeros, 32)
    assert torch.equal(rows.view(torch.uint8), torch.tensor([[0], [0x80]], dtype=torch.uint8).expand(2, 32))
    assert torch.equal(dequantise_rows(rows, scales), zeros)
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    every = every[torch.isfinite(every)]
    block = torch.cat([every, every[:2]]).unsqueeze(0)
    assert torch.equal(dequantise_rows(*quantise_rows(block, 256)), block)
    tiny = torch.full((1, 32), 2.0**-149)
    assert torch.isfinite(dequantise_rows(*quantise_rows(tiny, 32))).all()
    largest = torch.full((1, 32), 2.0**127)
    assert torch.isfinite(dequantise_rows(*quantise_rows(largest, 32))).all()


def test_quantize_tables_measures_its_error(float_model):
    """The report is the error of the tables that result, computed here from them."""
    before = [table.weight.detach().double() for table in float_model.engram_memory.tables]
    report = float_model.quantize_tables()
    for table, old, errors in zip(float_model.engram_memory.tables, before, report, strict=True):
        error = dequantise_rows(table.weight, table.scale).double() - old
        assert errors["max_abs_error"] == pytest.approx(error.abs().max().item())
        assert errors["rms_error"] == pytest.approx(error.square().mean().sqrt().item())
        assert errors["relative_rms_error"] == pytest.approx((error.norm() / old.norm()).item())
        assert 0 < errors["relative_rms_error"] < 0.04


@pytest.mark.parametrize("placement", ["device", "cpu", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_is_that_of_the_dequantised_table(fp8_model, random_ids, tmp_path, placement, dtype):
    """Bit for bit, in every placement, after a round trip through a file."""
    fp8_model.save_pretrained(tmp_path / "fp8")
    with_float_tables(fp8_model).save_pretrained(tmp_path / "float")
    loaded = EngramForCausalLM.from_pretrained(tmp_path / "fp8", engram_placement=placement, dtype=dtype)
    twin = EngramForCausalLM.from_pretrained(tmp_path / "float", dtype=dtype)
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, twin(ids).logits)
    for table, own in zip(loaded.engram_memory.tables, fp8_model.engram_memory.tables, strict=True):
        assert table.is_quantised
        if placement != "disk":
            assert torch.equal(table.weight.view(torch.uint8), own.weight.view(torch.uint8))
            assert torch.equal(table.scale.view(torch.uint8), own.scale.view(torch.uint8))


def test_stays_fp8(fp8_model, random_ids):
    """`.half()`, `.to()`, `.double()` and copies move the bytes and leave them alone; the rows follow the model."""
    before = [table.weight.view(torch.uint8).clone() for table in fp8_model.engram_memory.tables]
    model = copy.deepcopy(fp8_model).half().float().to(torch.bfloat16)
    for table, old in zip(model.engram_memory.tables, before, strict=True):
        assert table.weight.dtype == FP8 and table.scale.dtype == E8M0
        assert torch.equal(table.weight.view(torch.uint8), old)
    with torch.no_grad():
        assert model(random_ids(1, 5)).logits.dtype == torch.bfloat16
    assert model.to("meta").engram_memory.tables[0].weight.is_meta


def test_frozen_in_training(fp8_model, random_ids, tmp_path):
    """Everything else trains, the tables have no gradient and keep their bytes; loaded ones are frozen as well."""
    fp8_model.save_pretrained(tmp_path)
    for model in (fp8_model, EngramForCausalLM.from_pretrained(tmp_path)):
        tables = [parameter for table in model.engram_memory.tables for parameter in table.parameters()]
        assert len(tables) == 4 and not any(parameter.requires_grad for parameter in tables)
        before = [parameter.view(torch.uint8).clone() for parameter in tables]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        ids = random_ids(2, 7)
        model.train()(ids, labels=ids).loss.backward()
        optimizer.step()
        assert model.model.layers[0].engram.wkv.weight.grad.abs().max() > 0
        assert all(torch.equal(a.view(torch.uint8), b) for a, b in zip(tables, before, strict=True))


@pytest.mark.parametrize("placement", ["device", "cpu", "disk"])
@pytest.mark.parametrize("part", ["scale", "weight"])
def test_missing_tensor_is_an_error(fp8_model, tmp_path, placement, part):
    """Rows without scales, and scales without rows, do not load."""
    fp8_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    key = f"model.engram_memory.tables.1.{part}"
    del tensors[key]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tables\.1\."):
        EngramForCausalLM.from_pretrained(tmp_path, engram_placement=placement)


def test_missing_scale_in_a_state_dict(fp8_model):
    """Where weights that are missing may be initialised, scales are not made up."""
    state = fp8_model.state_dict()
    loaded = EngramForCausalLM.from_pretrained(None, config=fp8_model.config, state_dict=dict(state))
    assert loaded.engram_memory.tables[1].is_quantised
    del state["model.engram_memory.tables.1.scale"]
    with pytest.raises(ValueError, match=r"tables\.1\.scale"):
        EngramForCausalLM.from_pretrained(None, config=fp8_model.config, state_dict=state)


@pytest.mark.parametrize("placement", ["device", "cpu", "disk"])
def test_scales_of_a_float_table_are_an_error(float_model, tmp_path, placement):
    float_model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.engram_memory.tables.1.scale"] = torch.ones(606, 2).to(E8M0)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tables\.1\.scale"):
        EngramForCausalLM.from_pretrained(tmp_path, engram_placement=placement)


def test_state_dicts_do_not_mix(float_model):
    """Bytes of fp8 are not copied into a float table, which would lose their scales, nor the reverse."""
    fp8 = copy.deepcopy(float_model)
    fp8.quantize_tables()
    for one, two in ((float_model, fp8), (fp8, float_model)):
        with pytest.raises(RuntimeError, match="do not convert by copying"):
            one.load_state_dict(two.state_dict(), strict=False)
    copy.deepcopy(fp8).load_state_dict(fp8.state_dict())


def test_what_cannot_be_quantised(lively_model, float_model, tmp_path):
    with pytest.raises(ValueError, match=r"engram_scale_block_size.*32.*engram_head_dim.*8"):
        lively_model().quantize_tables()
    with pytest.raises(ValueError, match="engram_layer_ids"):
        lively_model(engram_layer_ids=[]).quantize_tables()
    float_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="on disk"):
        EngramForCausalLM.from_pretrained(tmp_path, engram_placement="disk").quantize_tables()
    broken = copy.deepcopy(float_model)
    with torch.no_grad():
        broken.engram_memory.tables[0].weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        broken.quantize_tables()
    float_model.quantize_tables()
    with pytest.raises(ValueError, match="already"):
        float_model.quantize_tables()


def test_block_size_is_the_config_s(lively_model, tmp_path):
    """Another block size is saved with the model and kept."""
    model = lively_model(engram_head_dim=16, engram_scale_block_size=4)
    model.quantize_tables()
    assert model.engram_memory.tables[0].scale.shape == (434, 4)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["engram_scale_block_size"] == 4
    assert EngramForCausalLM.from_pretrained(tmp_path).engram_memory.tables[0].scale.shape == (434, 4)
