"""What a model does about its tables: load them where they are to be, save them, and fetch rows early."""

import copy
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedModel

from .engram_table import EngramTable
from .ops.gather_rows import TABLE_DTYPE
from .table_saving import TABLE_SHARD_BYTES
from .table_storage import DTYPES, TensorEntry, find_tensors, open_table


class EngramPlacementMixin:
    """Of an Engram model, before `PreTrainedModel`."""

    @property
    def engram_memory(self):
        """The [`EngramMemory`] of the decoder; None without Engram layers."""
        return self.base_model._modules.get("engram_memory")

    @engram_memory.setter
    def engram_memory(self, memory: Any) -> None:
        self.base_model._modules["engram_memory"] = memory

    @property
    def _no_placement_params(self) -> list[str] | None:
        """Tables that a device map leaves where they are."""
        names = [name for name, table in self._engram_tables() if table.placement != "device"]
        return [f"{name}.{part}" for name in names for part in ("weight", "scale")] or None

    def _engram_tables(self) -> list[tuple[str, EngramTable]]:
        """The tables and their names in the state dict."""
        if self.engram_memory is None:
            return []
        prefix = "" if self.base_model is self else f"{self.base_model_prefix}."
        return [(f"{prefix}engram_memory.tables.{i}", table) for i, table in enumerate(self.engram_memory.tables)]

    # Loading.

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike | None, *args: Any, **kwargs: Any):
        """As [`PreTrainedModel.from_pretrained`]; tables in host memory or on disk are added when the rest stands."""
        config = kwargs.get("config")
        if "engram_placement" in kwargs and isinstance(config, PreTrainedConfig):
            kwargs["config"] = config = copy.deepcopy(config)
            config.engram_placement = kwargs.pop("engram_placement")
            config.validate()
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)
        for _, table in model._engram_tables():
            table.load_pending()
        return model, info

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ):
        """As Transformers', which reads weights into the parameters that a model has. Tables that are to be in host
        memory or on disk have none yet: their keys are left to [`EngramTable.load_pending`]."""
        load = PreTrainedModel._load_pretrained_model
        tables = [] if expected_keys is not None else model._engram_tables()
        if not tables or (state_dict is None and not checkpoint_files):
            return load(model, state_dict, checkpoint_files, load_config, expected_keys)
        is_safe = state_dict is None and all(str(file).endswith(".safetensors") for file in checkpoint_files)
        found: dict[str, Any] = find_tensors(checkpoint_files) if is_safe else state_dict or {}
        # The decoder's names are with its prefix or without, whatever part of a model the checkpoint is of.
        names = {name.removeprefix(f"{model.base_model_prefix}."): name for name in found}
        claimed, missing = set(), []
        for key, table in tables:
            base_key = key.removeprefix(f"{model.base_model_prefix}.")
            weight = names.get(f"{base_key}.weight")
            is_quantised = weight is not None and dtype_of(found[weight]) == TABLE_DTYPE
            if table.placement == "device":
                if is_quantised:
                    table.prepare_quantised(model.config.engram_scale_block_size)
            elif not is_safe and (table.placement == "disk" or state_dict is None):
                raise ValueError(
                    f"`engram_placement` is {table.placement!r}, for which weights must be safetensors files, not "
                    f"{checkpoint_files or 'a state dict'}: load with 'device', save, and load again."
                )
            parts = [f"{base_key}.weight", f"{base_key}.scale"][: 1 + is_quantised]
            if table.placement != "device":
                claimed.update(parts)
            # Float weights beside the model are Transformers' to miss, and to initialise where that is wanted.
            if table.placement != "device" or is_quantised:
                missing += [key.removesuffix(base_key) + part for part in parts if part not in names]
            table.pending = [found.get(names.get(part)) for part in parts], load_config.dtype
        if missing:
            raise ValueError(
                f"The weights in {load_config.pretrained_model_name_or_path} are not of this "
                f"{type(model).__name__}: they lack {missing}. Restore the config.json that they were saved with."
            )
        if is_safe and claimed:
            # Transformers maps whole files, as memory that may be written to, and a system refuses that beyond what it
            # has: what is left of the files is read by position, and only that.
            state_dict = tensor_slices(checkpoint_files, {names[key] for key in claimed})
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)

    # Use.

    def quantize_tables(self) -> list[dict[str, float]]:
        """Turns the tables into fp8, and says with what error: see [`EngramMemory.quantize_tables`]."""
        if self.engram_memory is None:
            raise ValueError("The model has no Engram layers (`engram_layer_ids` is []), hence no tables to quantise.")
        return self.engram_memory.quantize_tables()

    def prefetch(
        self,
        input_ids: torch.LongTensor | None = None,
        hash_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> None:
        """Starts to fetch the rows that a later forward with these inputs needs, and returns at once.

        Args:
            input_ids: integer `[B, L]`, the start of a text: what continues a cache is hashed with what was before.
            hash_ids: int64 `[B, L, n_engram_layers, C]`, instead of `input_ids`.
            attention_mask: `[B, L]` or None, beside `input_ids`; zero where a token is padding.
        """
        if (input_ids is None) == (hash_ids is None):
            raise ValueError("Pass exactly one of `input_ids` and `hash_ids`.")
        if hash_ids is None:
            hash_ids = self.compute_hash_ids(input_ids, attention_mask)
        else:
            self._hasher.check_hash_ids(hash_ids, *hash_ids.shape[:2])
        self.engram_memory.prefetch(hash_ids)

    # Saving.

    def _tables_apart(self, state_dict: dict | None) -> list[dict[str, Any]]:
        """The tables that are saved to shards of their own, large ones and those on disk: of each, its tensors by
        name. `state_dict` is what is saved of the rest; None where Transformers is to make it.

        Raises:
            ValueError: a table is to be on disk, but no file is open.
        """
        tables = []
        for name, table in self._engram_tables():
            if table.placement == "disk":
                if table.disk is None:
                    raise ValueError(f"{name} was not loaded, so the model cannot be saved.")
                tables.append(dict(zip((f"{name}.weight", f"{name}.scale"), table.disk.tensors, strict=False)))
                continue
            tensors = {
                key: state_dict[key] for key in (f"{name}.weight", f"{name}.scale") if key in (state_dict or ())
            }
            # Of a sharded or offloaded model, Transformers gathers them.
            known = (torch.Tensor, torch.nn.Parameter)
            if any(type(tensor) not in known or tensor.is_meta for tensor in tensors.values()):
                continue
            if tensors and sum(tensor.nbytes for tensor in tensors.values()) >= TABLE_SHARD_BYTES:
                tables.append(tensors)
        return tables

    def _set_sources(self, files: list[Path]) -> None:
        """After a save into these files: where tables lie now."""
        entries = find_tensors(files)
        for name, table in self._engram_tables():
            parts = [entries.get(f"{name}.weight"), entries.get(f"{name}.scale")][: 1 + table.is_quantised]
            if any(part is None for part in parts):
                continue
            if table.placement != "disk":
                table.source = tuple(parts)
                continue
            try:
                for tensor in table.disk.tensors:
                    tensor.check()
            except RuntimeError:
                # The save has just replaced the file that the table was read from.
                table.open(open_table(entries, *(part.name for part in parts)))


def tensor_slices(files: list[str], left_out: set[str]) -> dict[str, Any]:
    """Of safetensors files, all tensors but some, to be read when they are asked for; as Transformers has them."""
    slices = {}
    for path in files:
        file = safe_open(path, framework="pt", device="cpu", backend="pread")
        slices |= {name: file.get_slice(name) for name in file.keys() if name not in left_out}
    return slices


def dtype_of(item: TensorEntry | torch.Tensor) -> torch.dtype | None:
    return item.dtype if isinstance(item, torch.Tensor) else DTYPES.get(item.dtype)
