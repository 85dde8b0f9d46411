"""A small DeepSeek-V4.1 of 8 layers that uses every kind of layer of the release.

tests/data/deepseek_v41 holds it in the released names and formats, and what DeepSeek's own inference code (MIT)
computes with it: in fp32 with weights dequantised ("fp32"), the same with the four cache roundings ("fp32_cache"), and
as it is, in bf16 and fp8 ("release"); and its roundings of chosen inputs ("formats").
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from hf_engram import DeepseekV41ForCausalLM


CHECKPOINT = Path(__file__).parents[2] / "data" / "deepseek_v41"
INPUTS = json.loads((CHECKPOINT / "golden.json").read_text())


def load_model(dtype: torch.dtype = torch.float32, **kwargs) -> DeepseekV41ForCausalLM:
    model = DeepseekV41ForCausalLM.from_pretrained(CHECKPOINT, dtype=dtype, **kwargs).eval()
    model.model.engram_hasher.bind_token_map(np.array(INPUTS["token_map"]))
    return model


@contextmanager
def recorded(model: DeepseekV41ForCausalLM) -> Iterator[dict[str, list[torch.Tensor]]]:
    """What the layers of each forward inside compute, by the goldens' names."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []

    def record(module, name, choose) -> None:
        hook = module.register_forward_hook(lambda m, a, out: seen.setdefault(name, []).append(choose(out)))
        handles.append(hook)

    for index, layer in enumerate(model.model.layers):
        record(layer, f"layers.{index}.stream_out", lambda out: out[1])
        record(layer.mlp.gate, f"layers.{index}.router_indices", lambda out: out[2])
        if layer.self_attn.indexer is not None:
            record(layer.self_attn.indexer, f"layers.{index}.compress_idxs", lambda out: out[0])
            record(layer.self_attn.indexer, f"layers.{index}.candidates", lambda out: out[1])
    yield seen
    for handle in handles:
        handle.remove()


@torch.no_grad()
def stepwise(model: DeepseekV41ForCausalLM, input_ids: torch.Tensor, *ends: int, cache=None, **kwargs) -> torch.Tensor:
    """The logits of all tokens, by one cache, in forwards that end at `ends`, then token by token."""
    length, outputs, at = input_ids.shape[1], [], 0
    mask = kwargs.pop("attention_mask", None)
    for end in sorted({*ends, *range(max(ends) + 1, length + 1)}):
        part = {name: value[:, at:end] for name, value in kwargs.items()}
        if mask is not None:
            part["attention_mask"] = mask[:, :end]
        out = model(input_ids[:, at:end], past_key_values=cache, use_cache=True, **part)
        cache, at = out[1], end
        outputs.append(out.logits)
    return torch.cat(outputs, 1)
