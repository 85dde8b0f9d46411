"""Released checkpoints of DeepSeek-V4.1: their names and formats, dequantised into the model's.

| format | weight | scale | value |
| --- | --- | --- | --- |
| fp8 | e4m3 `[rows, columns]` | E8M0 `[ceil(rows / 32), columns / 32]` | weight * 2^(byte - 127) of its 32 x 32 |
| fp4 | I8 `[rows, columns / 2]`, two e2m1, even columns in the low nibble | E8M0 `[rows, columns / 32]` | the same |
| plain | bf16 or fp32 | | itself |

Both products have at most four significant bits, so bf16 holds them exactly. Tables stay as they are, fp8, in the
checkpoint's own shards where `engram_placement` is "disk". Draft (`mtp.*`) and vision are left aside. Only headers are
read until a weight is asked for.
"""

import math
from pathlib import Path
from typing import Any

import torch

from ..table_storage import TensorEntry, find_tensors
from .cache_rounding import FP4_VALUES


BLOCK = 32
LEFT_ASIDE = ("mtp.", "vision.", "aligner.", "image_")
PLAIN, FP8, FP4 = ("BF16", "F32"), ("F8_E4M3",), ("I8",)
DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}

# Released names of a layer's tensors to the model's, and how they are stored.
ATTENTION = {
    "attn.wq_a.weight": ("self_attn.q_a_proj.weight", FP8),
    "attn.wq_b.weight": ("self_attn.q_b_proj.weight", FP8),
    "attn.wkv.weight": ("self_attn.kv_proj.weight", FP8),
    "attn.wo_a.weight": ("self_attn.o_a_proj.weight", FP8),
    "attn.wo_b.weight": ("self_attn.o_b_proj.weight", FP8),
    "attn.q_norm.weight": ("self_attn.q_a_norm.weight", PLAIN),
    "attn.kv_norm.weight": ("self_attn.kv_norm.weight", PLAIN),
    "attn.attn_sink": ("self_attn.sinks", PLAIN),
    "attn_norm.weight": ("input_layernorm.weight", PLAIN),
    "ffn_norm.weight": ("post_attention_layernorm.weight", PLAIN),
    "ffn.gate.weight": ("mlp.gate.weight", PLAIN),
    "ffn.gate.bias": ("mlp.gate.e_score_correction_bias", PLAIN),
    "ffn.shared_experts.w1.weight": ("mlp.shared_experts.gate_proj.weight", FP8),
    "ffn.shared_experts.w2.weight": ("mlp.shared_experts.down_proj.weight", FP8),
    "ffn.shared_experts.w3.weight": ("mlp.shared_experts.up_proj.weight", FP8),
    **{f"hc_attn_{part}": (f"attn_hc.{part}", PLAIN) for part in ("fn", "base", "scale")},
    **{f"hc_ffn_{part}": (f"mlp_hc.{part}", PLAIN) for part in ("fn", "base", "scale")},
}
KV_SOURCE = {
    "attn.compressor.wkv.weight": ("self_attn.compressor.kv_proj.weight", PLAIN),
    "attn.compressor.norm.weight": ("self_attn.compressor.kv_norm.weight", PLAIN),
    "attn.indexer.wk.weight": ("self_attn.indexer.k_proj.weight", PLAIN),
    "attn.indexer.k_norm.weight": ("self_attn.indexer.k_norm.weight", PLAIN),
}
GATED_KV_SOURCE = {"attn.compressor.wgate.weight": ("self_attn.compressor.gate_proj.weight", PLAIN)}
INDEX_SOURCE = {
    "attn.indexer.wq_b.weight": ("self_attn.indexer.q_b_proj.weight", FP8),
    "attn.indexer.weights_proj.weight": ("self_attn.indexer.weights_proj.weight", PLAIN),
}
ENGRAM = {
    "engram.wkv.weight": ("engram.wkv.weight", FP8),
    "engram.q_weight": ("engram.q_weight", PLAIN),
    "engram.k_weight": ("engram.k_weight", PLAIN),
}
# Of a checkpoint without vision, tokens that are not text take the bias of text.
OPTIONAL = {"ffn.gate.bias_vl": ("mlp.gate.e_score_correction_bias_vl", PLAIN)}


def read_bytes(entry: TensorEntry) -> torch.Tensor:
    """A tensor's bytes, uint8, in its shape (with bytes for columns where an item has several)."""
    with open(entry.path, "rb") as file:
        file.seek(entry.start)
        data = bytearray(file.read(entry.stop - entry.start))
    if len(data) != entry.stop - entry.start:
        raise ValueError(f"{entry.path} ends within {entry.name}: fetch the file again.")
    return torch.frombuffer(data, dtype=torch.uint8)


class ReleasedTensor:
    """One released tensor, read and dequantised when it is asked for, as Transformers' loader does: `tensor[...]`.

    Args:
        weight ([`TensorEntry`]): where it lies.
        scale ([`TensorEntry`], *optional*): where its scales lie; None for a plain one.
    """

    def __init__(self, weight: TensorEntry, scale: TensorEntry | None = None) -> None:
        self.weight, self.scale = weight, scale
        rows, *columns = weight.shape
        self.shape = (rows, 2 * columns[0]) if weight.dtype in FP4 else tuple(weight.shape)

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return self.weight.dtype if self.scale is None else "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        data = read_bytes(self.weight)
        if self.scale is None:
            return data.view(DTYPES[self.weight.dtype]).view(self.shape)[index]
        powers = read_bytes(self.scale).view(self.scale.shape)
        if self.weight.dtype in FP4:
            table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
            data = data.view(self.weight.shape).long()
            values = torch.stack([table[data & 15], table[data >> 4]], -1).flatten(-2)
        else:
            values = data.view(DTYPES[self.weight.dtype]).view(self.shape).float()
        # From 2^-9 * 2^-124 to 448 * 2^119 all is within bf16; 0x7F and 0xFF of e4m3 are no numbers.
        if powers.min() < 3 or powers.max() > 246 or not values.isfinite().all():
            raise ValueError(
                f"{self.weight.name} in {self.weight.path} times its scales has values that are not finite or too "
                "small for bf16, as no weight has: fetch the file again."
            )
        scale = torch.ldexp(torch.ones(powers.shape), powers.int() - 127)
        per_row = -(-self.shape[0] // scale.shape[0])
        scale = scale.repeat_interleave(per_row, 0)[: self.shape[0]]
        values = values.unflatten(-1, (scale.shape[1], -1)) * scale.unsqueeze(-1)
        return values.flatten(-2).to(torch.bfloat16)[index]


class ReleasedExperts:
    """All experts' tensors of a layer as one, `[E, rows, columns]`: those of each expert below each other."""

    def __init__(self, experts: list[list[ReleasedTensor]]) -> None:
        self.experts = experts
        rows = sum(part.shape[0] for part in experts[0])
        self.shape = (len(experts), rows, experts[0][0].shape[1])

    get_shape = ReleasedTensor.get_shape

    def get_dtype(self) -> str:
        return "BF16"

    def __getitem__(self, index: Any) -> torch.Tensor:
        out = torch.empty(self.shape, dtype=torch.bfloat16)
        for expert, parts in zip(out, self.experts, strict=True):
            torch.cat([part[...] for part in parts], out=expert)
        return out[index]


class Resolver:
    """Finds a config's tensors among those of a checkpoint, and notes what is missing, wrong, or left over."""

    def __init__(self, entries: dict[str, TensorEntry]) -> None:
        self.entries = entries
        self.left = {name for name in entries if not name.startswith(LEFT_ASIDE)}
        self.faults: list[str] = []

    def find(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None = None) -> TensorEntry | None:
        entry = self.entries.get(name)
        self.left.discard(name)
        if entry is None:
            self.faults.append(f"{name} is missing")
        elif entry.dtype not in dtypes or (shape is not None and tuple(entry.shape) != shape):
            wanted = f"{' or '.join(dtypes)} {list(shape or ())}"
            self.faults.append(f"{name} is {entry.dtype} {list(entry.shape)} instead of {wanted}")
        return entry

    def tensor(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> ReleasedTensor | None:
        """The tensor `name` of the model's `shape`, with its scales where it has any."""
        if dtypes is PLAIN:
            weight = self.find(name, dtypes, shape)
            return None if weight is None else ReleasedTensor(weight)
        rows, columns = shape
        stored = (rows, columns // 2) if dtypes is FP4 else shape
        blocks = (rows if dtypes is FP4 else math.ceil(rows / BLOCK), math.ceil(columns / BLOCK))
        weight = self.find(name, dtypes, stored)
        scale = self.find(name.removesuffix("weight") + "scale", ("F8_E8M0",), blocks)
        return None if weight is None or scale is None else ReleasedTensor(weight, scale)


def layer_names(config, layer_idx: int) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Released names of a layer's tensors, without those of tables and experts."""
    names = dict(ATTENTION)
    if layer_idx in config.kv_source_layer_ids:
        names |= KV_SOURCE if config.compress_ratios[layer_idx] == 1 else KV_SOURCE | GATED_KV_SOURCE
    if layer_idx in config.index_source_layer_ids:
        names |= INDEX_SOURCE
    if layer_idx in config.engram_layer_ids:
        names |= ENGRAM
    return names


def resolve(
    config, entries: dict[str, TensorEntry], shapes: dict[str, tuple[int, ...]]
) -> tuple[dict[str, Any], list[list[TensorEntry]]]:
    """The model's tensors, from a released checkpoint's.

    Args:
        config ([`DeepseekV41Config`]): the model's.
        entries: the checkpoint's tensors by name.
        shapes: those of the model's state dict with a head, by name.

    Returns:
        the tensors by the model's names, to be read with `[...]`; and for each Engram layer its table's parts.

    Raises:
        ValueError: a tensor is missing, of another shape or dtype, or has no place.
    """
    resolver, state = Resolver(entries), {}

    def put(released: str, name: str, dtypes: tuple[str, ...]) -> None:
        state[name] = resolver.tensor(released, dtypes, shapes[name])

    put("embed.weight", "model.embed_tokens.weight", PLAIN)
    put("norm.weight", "model.norm.weight", PLAIN)
    put("head.weight", "lm_head.weight", PLAIN)
    width, inner = config.hidden_size, config.moe_intermediate_size
    tables = []
    for layer_idx in range(config.num_hidden_layers):
        released, own = f"layers.{layer_idx}.", f"model.layers.{layer_idx}."
        for name, (target, dtypes) in layer_names(config, layer_idx).items():
            put(released + name, own + target, dtypes)
        for name, (target, dtypes) in OPTIONAL.items():
            known = name if released + name in entries else name.removesuffix("_vl")
            put(released + known, own + target, dtypes)
        parts = {"gate_up_proj": {"w1": (inner, width), "w3": (inner, width)}, "down_proj": {"w2": (width, inner)}}
        for target, weights in parts.items():
            experts = [
                [resolver.tensor(f"{released}ffn.experts.{e}.{w}.weight", FP4, shape) for w, shape in weights.items()]
                for e in range(config.n_routed_experts)
            ]
            if not resolver.faults:
                state[f"{own}mlp.experts.{target}"] = ReleasedExperts(experts)
        if layer_idx in config.engram_layer_ids:
            rows = config.engram_num_embeddings[config.engram_layer_ids.index(layer_idx)]
            dim, blocks = config.engram_head_dim, config.engram_head_dim // BLOCK
            weight = resolver.find(f"{released}engram.embed.weight", FP8, (rows, dim))
            scale = resolver.find(f"{released}engram.embed.scale", ("F8_E8M0",), (rows, blocks))
            tables.append([weight, scale])
    faults = resolver.faults + [f"{name} has no place in the model" for name in sorted(resolver.left)]
    if faults:
        more = f", and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise ValueError(
            f"The released checkpoint is not of this config: {'; '.join(faults[:8])}{more}. Restore the config.json "
            "that it came with, or fetch the files that are missing."
        )
    return state, tables


def read_released(
    model: Any, state_dict: dict | None, checkpoint_files: list[str] | None, load_config: Any
) -> dict[str, Any] | None:
    """The state dict of a model that is about to be loaded, if its files are a released checkpoint's; else None.
    Its tables are noted for [`EngramTable.load_pending`].

    Raises:
        ValueError: see [`resolve`].
    """
    if state_dict is not None or not checkpoint_files:
        return None
    if not all(str(file).endswith(".safetensors") for file in checkpoint_files):
        return None
    entries = find_tensors(Path(file) for file in checkpoint_files)
    if "embed.weight" not in entries:
        return None
    base, config = model.base_model, model.config
    shapes = {f"model.{name}": tuple(tensor.shape) for name, tensor in base.state_dict().items()}
    shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    state, tables = resolve(config, entries, shapes)
    if base.engram_memory is not None:
        for table, parts in zip(base.engram_memory.tables, tables, strict=True):
            if table.placement == "device":
                table.prepare_quantised(BLOCK)
            table.pending = parts, load_config.dtype
        for index, parts in enumerate(tables):
            if base.engram_memory.tables[index].placement == "device":
                for name, entry in zip(("weight", "scale"), parts, strict=True):
                    state[f"model.engram_memory.tables.{index}.{name}"] = RawTensor(entry)
        constants = base.engram_hasher.constants(device="cpu")
        state |= {f"model.engram_hasher.{name}": value for name, value in constants.items()}
    if base is model:
        return {name.removeprefix("model."): tensor for name, tensor in state.items() if name != "lm_head.weight"}
    return state


class RawTensor(ReleasedTensor):
    """A part of a table, as it is stored."""

    def __init__(self, entry: TensorEntry) -> None:
        super().__init__(entry)
        self.dtype = {**DTYPES, "F8_E8M0": torch.float8_e8m0fnu}[entry.dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return read_bytes(self.weight).view(self.dtype).view(self.shape)[index]
