"""What a model does about PEFT's adapters: their table rows are loaded and switched, virtual tokens are refused."""

import inspect
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import cached_file

from .placement_mixin import EngramPlacementMixin, tensor_slices
from .table_delta import TABLE_DELTA_FILE, memory_keys


class EngramAdapterMixin(EngramPlacementMixin):
    """Of an Engram model, before `PreTrainedModel`."""

    def load_adapter(self, *args: Any, **kwargs: Any):
        """As Transformers'; the memory is told, which older versions do not, whose rows will come."""
        load = super().load_adapter
        if self.engram_memory is not None:
            name = inspect.signature(load).bind_partial(*args, **kwargs).arguments.get("adapter_name")
            self.engram_memory.adapter_state_dict_load_map(name or "default")
        return load(*args, **kwargs)

    @staticmethod
    def _load_pretrained_model(
        model: PreTrainedModel,
        state_dict: dict | None,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: list[str] | None = None,
    ):
        """As Transformers'. Of an adapter's file (`expected_keys` are given), the table rows are loaded here: for
        Transformers they are no parameters of the model."""
        if expected_keys is not None and getattr(model, "engram_memory", None) is not None:
            path = load_config.pretrained_model_name_or_path
            if state_dict is None and all(str(file).endswith(".safetensors") for file in checkpoint_files):
                rows = {}
                for file_name in checkpoint_files:
                    with safe_open(file_name, framework="pt") as file:
                        rows |= {key: file.get_tensor(key) for key in file.keys() if is_row_key(key)}
                if rows:
                    state_dict = tensor_slices(checkpoint_files, set(rows))
            else:
                if state_dict is None:
                    state_dict = {}
                    for file_name in checkpoint_files:
                        state_dict |= torch.load(file_name, map_location="cpu", weights_only=True)
                rows = {key: tensor for key, tensor in state_dict.items() if is_row_key(key)}
                state_dict = {key: tensor for key, tensor in state_dict.items() if key not in rows}
            if not rows and path is not None:
                check_no_delta(path, load_config)
            model.engram_memory.load_adapter_file(memory_keys(rows), path)
        load = EngramPlacementMixin._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)

    def enable_adapters(self) -> None:
        """As Transformers', which switches off what is trained in full, table rows too, but not on again."""
        super().enable_adapters()
        from peft.utils import ModulesToSaveWrapper

        for module in self.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.enable_adapters(enabled=True)

    def get_submodule(self, target: str) -> nn.Module:
        # Asked for by PEFT's methods of virtual tokens when an adapter is made, and by nobody else.
        if target == "embeddings.word_embeddings" and self.engram_memory is not None:
            raise ValueError(
                "PEFT's methods of virtual tokens (prompt tuning, prefix tuning, p-tuning and the like) do not work "
                "with an Engram model: a virtual token has no id, so that the n-grams around it have none to be "
                "looked up by. Use LoRA, with `unfreeze_tables(model)` for the memory."
            )
        return super().get_submodule(target)


def check_no_delta(path: str, load_config: Any) -> None:
    """Raises ValueError for an adapter of an older version, whose rows are in a file of their own."""
    options = {
        f"_raise_exceptions_for_{what}": False for what in ("gated_repo", "missing_entries", "connection_errors")
    }
    options |= getattr(load_config, "download_kwargs", None) or {}
    if cached_file(path, TABLE_DELTA_FILE, **options) is not None:
        raise ValueError(
            f"{path} was saved by an older version, with its table rows in {TABLE_DELTA_FILE}, which Transformers "
            "does not load: use `PeftModel.from_pretrained`, then `load_table_delta`, and save the adapter again."
        )


def is_row_key(key: str) -> bool:
    """Of an adapter's file: what belongs to the memory, but not to a table that PEFT has copied."""
    return ".engram_memory." in f".{key}" and "modules_to_save" not in key
