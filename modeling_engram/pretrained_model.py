"""What all Engram models share: initialisation, loading, saving, and the way from token ids to hash ids."""

import inspect
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import hub

from ..configuration.configuration_engram import EngramConfig
from ..configuration.folder_update import FolderUpdate
from ..tokenization.ngram_hashing import check_token_ids
from ..tokenization.token_map import check_tokenizer_size
from .adapter_mixin import EngramAdapterMixin, is_row_key
from .decoder_layer import EngramAttention, EngramDecoderLayer
from .engram_layer import EngramLayer
from .engram_table import EngramTable
from .hyper_connection import HyperConnection
from .live_tokens import live_tokens
from .model_card import CARD_FILE, is_somebodys, write_model_card
from .ngram_hasher import NgramHasher
from .ops.gather_rows import TABLE_DTYPE
from .table_delta import ABOUT_KEY
from .table_saving import add_tables


class EngramPreTrainedModel(EngramAdapterMixin, PreTrainedModel):
    """What all Engram models share: initialisation, loading, and the way from token ids to hash ids."""

    config: EngramConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    model_tags = ["engram"]
    _no_split_modules = ["EngramDecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _keep_in_fp32_modules_strict = ["attn_hc", "mlp_hc"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": EngramDecoderLayer, "attentions": EngramAttention}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # The Trainer smooths shifted labels only for classes whose names are in here. No model type is named as a
        # class is. FSDP2, which makes a subclass with a name of its own, passes here, too.
        if issubclass(cls, GenerationMixin):
            MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[cls.__name__] = cls.__name__

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, EngramTable):
            # Rows of zeros, read by random weights: no effect at the start, and rows learn from the first step on.
            if module.is_float_parameter:
                init.zeros_(module.weight)
            return
        super()._init_weights(module)
        if isinstance(module, EngramLayer):
            init.ones_(module.q_weight)
            init.ones_(module.k_weight)
        elif isinstance(module, HyperConnection) and module.hc_mult > 1:
            init.normal_(module.fn, mean=0.0, std=self.config.initializer_range)
            init.copy_(module.base, module.initial_base())
            init.zeros_(module.scale)
        elif isinstance(module, NgramHasher):
            for name, value in module.constants(device="cpu").items():
                init.copy_(getattr(module, name), value)

    @property
    def _hasher(self) -> NgramHasher:
        hasher = self.base_model.engram_hasher
        if hasher is None:
            raise ValueError("The model has no Engram layers (`engram_layer_ids` is []), hence no hash ids.")
        return hasher

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike | None,
        *args: Any,
        output_loading_info: bool = False,
        **kwargs: Any,
    ):
        """As [`PreTrainedModel.from_pretrained`], but nothing of the decoder may be missing from the checkpoint or
        left over, and the hash's constants and token map must be those of the config. Heads may be new, as usual.
        `engram_placement="device"`, `"cpu"` or `"disk"` says where the tables live, see [`EngramConfig`].

        Raises:
            ValueError: the weights and config.json are not of the same model.
        """
        model, info = super().from_pretrained(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)
        prefix = "" if model.base_model is model else f"{cls.base_model_prefix}."
        missing = sorted(key for key in info["missing_keys"] if key.startswith(prefix))
        unexpected = sorted(
            key
            for key in info["unexpected_keys"]
            if key.removeprefix(f"{cls.base_model_prefix}.").startswith(("layers.", "engram_"))
        )
        # Without a path, the caller gives the weights (or none) and asks for the rest to be initialised.
        if pretrained_model_name_or_path is not None and (missing or unexpected):
            raise ValueError(
                f"The weights in {pretrained_model_name_or_path} are not of this {cls.__name__}: they lack {missing} "
                f"and bring {unexpected}, which the config has no place for. Restore the config.json that they were "
                "saved with."
            )
        hasher = model.base_model.engram_hasher
        if hasher is not None and not hasher.token_map.is_meta:
            hasher.check(may_be_unbound=True)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> None:
        """As [`PreTrainedModel.save_pretrained`]; the folder also gets the code that loads it, and a model card. Large
        tables and those on disk get shards of their own, see [`add_tables`].

        All is written beside what is there, and moved in place as one, see [`FolderUpdate`]: whenever the process
        dies, the old model loads or the new one. The folder that the model was loaded from is as good as another.

        Raises:
            ValueError: `save_directory` is a file, a table was not loaded, or the config was changed since the hash
                was made. OSError: the disk is full, or another save into the folder is under way (TimeoutError).
        """
        if os.path.isfile(save_directory):
            raise ValueError(f"`save_directory` ({save_directory}) is a file: pass a folder.")
        hasher = self.base_model.engram_hasher
        # A layout field that was set since would make a folder that does not load.
        if hasher is not None and not hasher.token_map.is_meta:
            hasher.check(may_be_unbound=True)
        save = super().save_pretrained
        bound = inspect.signature(save).bind_partial(save_directory, *args, **kwargs).arguments
        rest = bound.pop("kwargs", {})
        options = {name: value for name, value in (bound | rest).items() if name != "save_directory"}
        is_main = options.get("is_main_process", True)
        if hasattr(self, "should_save_on_this_rank"):
            is_main = self.should_save_on_this_rank(is_main)
        if not is_main or options.get("distributed_checkpoint"):
            save(save_directory, **options)
            return

        upload = None
        if options.pop("push_to_hub", False):
            name, token = os.path.basename(os.path.abspath(save_directory)), options.get("token")
            upload = {key: rest.pop(key, None) for key in ("commit_message", "create_pr")} | {"token": token}
            options = {key: value for key, value in options.items() if key in bound}
            api, name = hub.hf_api(), rest.pop("repo_id", name)
            upload["repo_id"] = api.create_repo(name, token=token, exist_ok=True, **rest).repo_id
        # A PEFT adapter that Transformers has added is saved in the place of the model.
        state_dict, tables = options.get("state_dict"), []
        if not getattr(self, "_hf_peft_config_loaded", False):
            if state_dict is None and getattr(self, "hf_quantizer", None) is None:
                state_dict = self.state_dict()
            tables = self._tables_apart(state_dict)
        if state_dict is not None:
            apart = {name for tensors in tables for name in tensors}
            options["state_dict"] = {name: value for name, value in state_dict.items() if name not in apart}

        with FolderUpdate(save_directory, options.get("variant")) as update:
            save(update.folder, **options)
            add_tables(update, tables)
            if not is_somebodys(update.target / CARD_FILE):
                write_model_card(self, update.folder, update.target.resolve().name)
        self._set_sources([update.target / name for name in update.weight_files])
        if upload is not None:
            self._upload_saved(update, **upload)

    def _upload_saved(
        self, update: FolderUpdate, repo_id: str, token: Any, commit_message: str | None, create_pr: bool | None
    ) -> None:
        """Uploads the files of a save. A card that somebody wrote on the Hub stays there, as one that somebody wrote
        here stays here."""
        with tempfile.TemporaryDirectory() as folder:
            for name in update.saved:
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    path.symlink_to(update.target / name)
                except OSError:  # of a system where that is a privilege
                    shutil.copyfile(update.target / name, path)
            card, here = Path(folder, CARD_FILE), update.target / CARD_FILE
            card.unlink(missing_ok=True)
            hub.create_and_tag_model_card(repo_id, self.model_tags, token=token).save(card)
            if is_somebodys(here) and not is_somebodys(card):
                shutil.copyfile(here, card)
            self._upload_modified_files(
                folder, repo_id, {}, commit_message=commit_message, token=token, create_pr=bool(create_pr)
            )

    def _upload_modified_files(self, working_dir: str | os.PathLike, repo_id: str, *args: Any, **kwargs: Any):
        # Where the Hub has no card yet, Transformers has just put one without content over ours.
        write_model_card(self, working_dir, name=repo_id)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], *args: Any, **kwargs: Any):
        """As `nn.Module.load_state_dict`; what does not fit is refused before anything is copied."""
        own = self.state_dict()
        # Of adapters, whose rows the memory takes and checks by itself.
        rows = any(name.endswith(f"engram_memory.{ABOUT_KEY}") for name in state_dict)
        unfit = [
            f"{name}: {tensor.dtype} {list(tensor.shape)}, the model's is {own[name].dtype} {list(own[name].shape)}"
            for name, tensor in state_dict.items()
            if name in own
            and not (rows and is_row_key(name))
            and (tensor.shape != own[name].shape or (tensor.dtype == TABLE_DTYPE) != (own[name].dtype == TABLE_DTYPE))
        ]
        if unfit:
            raise RuntimeError(
                f"The state dict is not of this {type(self).__name__}, and nothing of it was loaded: "
                f"{'; '.join(unfit[:4])}{'; ...' if len(unfit) > 4 else ''}. An fp8 table and a float one do not "
                "convert by copying: use `quantize_tables()`, or load the other checkpoint."
            )
        return super().load_state_dict(state_dict, *args, **kwargs)

    def bind_tokenizer(self, tokenizer: Any) -> "EngramPreTrainedModel":
        """Installs the tokenizer's map from token ids to compressed ids.

        Args:
            tokenizer ([`EngramTokenizer`]): the one that the config was made from, or one that extends it by added
                tokens (after `resize_token_embeddings`).

        Returns:
            the model.

        Raises:
            ValueError: the tokenizer's layout, size or map is not the model's.
        """
        if not hasattr(tokenizer, "engram_fields"):
            raise ValueError(
                f"`tokenizer` is a {type(tokenizer).__name__}, which has no token map: wrap it with "
                "`EngramTokenizer.from_tokenizer(tokenizer, ...)`."
            )
        hasher, config = self._hasher, self.config
        fields = tokenizer.engram_fields()
        for name in (
            "engram_layer_ids",
            "engram_vocab_size",
            "engram_max_ngram_size",
            "engram_n_heads",
            "engram_pad_token_id",
            "engram_compressed_vocab_size",
        ):
            if fields[name] != getattr(config, name):
                raise ValueError(
                    f"The tokenizer's `{name}` is {fields[name]}, the model's is {getattr(config, name)}: use the "
                    "tokenizer that the model was made for, or build the config with `**tokenizer.engram_fields()`."
                )
        token_map = tokenizer.token_map
        # A model that was made with the tokenizer may have any number of rows.
        if not hasher.is_bound or config.engram_token_map_sha256 is None:
            check_tokenizer_size(len(token_map), config.vocab_size)
        hasher.bind_token_map(token_map)
        return self

    def compute_hash_ids(
        self,
        input_ids: torch.LongTensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        token_mask: torch.Tensor | None = None,
    ) -> torch.LongTensor:
        """The table rows of every token's n-grams, as the model computes them itself.

        Args:
            input_ids: integer `[B, L]`.
            attention_mask: `[B, L]` or None; zero where a token is padding.
            position_ids: `[B, L]` or None; where they restart, a packed document begins.
            token_mask: bool `[B, L]` or None; False where a token is not text.

        Returns:
            int64 `[B, L, n_engram_layers, C]`.
        """
        hasher = self._hasher
        check_input_ids(input_ids, self.config.vocab_size)
        live = live_tokens(input_ids.shape, attention_mask, token_mask)
        return hasher(input_ids, dead=None if live is None else ~live, position_ids=position_ids)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> nn.Embedding:
        """As [`PreTrainedModel.resize_token_embeddings`]; the token map follows, and is checked first. Each token up
        to `new_num_tokens` that had no row gets a compressed id of its own. Rows beyond, that only make a multiple of
        `pad_to_multiple_of`, need none: as other rows that no tokenizer uses, they hash as the pad token.

        Raises:
            ValueError: the compressed ids that the tables were made with leave none for the new tokens.
        """
        hasher = self.base_model.engram_hasher
        if hasher is None or (new_num_tokens is None and pad_to_multiple_of is None):
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        n_tokens = vocab_size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        for name, value in (("new_num_tokens", new_num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`{name}` must be an integer above zero or None, got {value!r}.")
        if pad_to_multiple_of is not None:
            vocab_size = -(-vocab_size // pad_to_multiple_of) * pad_to_multiple_of
        if vocab_size <= self.config.engram_pad_token_id:
            raise ValueError(
                f"`new_num_tokens` ({vocab_size}) would drop `engram_pad_token_id` "
                f"({self.config.engram_pad_token_id}): keep at least that many tokens, and one more."
            )
        if vocab_size < self.config.engram_compressed_vocab_size:
            raise ValueError(
                f"`new_num_tokens` ({vocab_size}) is below `engram_compressed_vocab_size` "
                f"({self.config.engram_compressed_vocab_size}), which fixes the hash that the tables are addressed by."
            )
        token_map = hasher.resized_token_map(n_tokens, vocab_size)
        embeddings = super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        hasher.resize_token_map(token_map)
        return embeddings


def check_input_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Raises unless `input_ids` are integers `[B, L]` in `[0, vocab_size)`, see [`check_token_ids`]."""
    if input_ids.ndim != 2:
        raise ValueError(f"`input_ids` must be [batch, length], got shape {tuple(input_ids.shape)}.")
    check_token_ids(input_ids, vocab_size)
