"""Exported models: torch.export with open sizes, and from there ONNX."""

import pytest
import torch
from torch.export import Dim

from hf_engram.modeling_engram.ops.engram_gate import with_sign


class Logits(torch.nn.Module):
    def __init__(self, model) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


OPEN = {"input_ids": {0: Dim("batch"), 1: Dim("length")}}


@pytest.mark.slow
@torch.no_grad()
def test_export(lively_model, random_ids):
    """One graph for all sizes, of operations that ONNX has, computes what the model does."""
    model = lively_model()
    ids = random_ids(2, 16)
    model(ids)
    exported = torch.export.export(Logits(model), (ids,), dynamic_shapes=OPEN, strict=False).run_decompositions()
    operations = {str(node.target) for node in exported.graph.nodes}
    assert not [name for name in operations if name.startswith("prims.") or "copysign" in name or "signbit" in name]
    for batch, length in ((2, 16), (3, 7), (2, 30)):
        other = random_ids(batch, length, seed=1)
        expected = model(other, use_cache=False).logits
        assert (exported.module()(other) - expected).abs().max() < 1e-4


@pytest.mark.slow
@torch.no_grad()
def test_onnx(lively_model, random_ids, tmp_path):
    """The same through ONNX and its runtime, where they are installed (pip install onnxscript onnxruntime)."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    model = lively_model()
    ids = random_ids(2, 16)
    model(ids)
    path = tmp_path / "model.onnx"
    torch.onnx.export(Logits(model), (ids,), path, dynamo=True, verbose=False, dynamic_shapes=OPEN)
    session = runtime.InferenceSession(path)
    for batch, length in ((2, 16), (3, 7), (2, 30)):
        other = random_ids(batch, length, seed=1)
        (actual,) = session.run(None, {"input_ids": other.numpy()})
        assert (torch.from_numpy(actual) - model(other, use_cache=False).logits).abs().max() < 1e-4


class Sign(torch.nn.Module):
    def forward(self, root, dot):
        return with_sign(root, dot)


@torch.no_grad()
def test_sign_of_zero(tmp_path):
    """At a dot product of 0 and of -0, an exported gate is on the side that the sign says, to the bit."""
    dot = torch.tensor([1.0, -1.0, 0.0, -0.0, 1e-45, -1e-45, float("inf"), float("-inf")])
    root = dot.abs().clamp_min(1e-6).sqrt()
    expected = torch.copysign(root, dot)
    assert torch.equal(with_sign(root, dot), expected)
    exported = torch.export.export(Sign(), (root, dot), strict=False).run_decompositions()
    assert torch.equal(exported.module()(root, dot), expected)
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ImportError:
        return
    torch.onnx.export(Sign(), (root, dot), tmp_path / "sign.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "sign.onnx")
    (actual,) = session.run(None, {"root": root.numpy(), "dot": dot.numpy()})
    assert torch.equal(torch.from_numpy(actual), expected)
