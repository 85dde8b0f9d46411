"""The DeepSeek-V4.1 text model: Engram, CSA2 attention and experts on a stream of copies.

    stream S [B, L, H, D], at first H equal copies of the embedding; a layer is
        S = engram(S), where the layer has one
        x = sum_h p_h S_h,  y = attention(rms(x)),  S'_k = post_k y + sum_j comb[j, k] S_j
        the same with the experts
    p is the `pre` of the site before, one-hot at the first; post and comb are the site's own. After the last layer
        logits = head rms(sum_h p_h S_h)                                          in fp32

Each part has its formula in its own file: `v41_attention.py`, `v41_experts.py`, `hyper_connection.py`,
`engram_layer.py`. Released checkpoints are read by `released_checkpoint.py`.
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ...configuration.configuration_deepseek_v41 import DeepseekV41Config
from ..engram_layer import EngramLayer
from ..engram_memory import EngramMemory
from ..hyper_connection import HyperConnection, collapse
from ..live_tokens import live_tokens
from ..modeling_engram import CACHE_NAME, EngramForCausalLM, EngramModel, one_cache
from ..ngram_hasher import NgramHasher
from ..pretrained_model import EngramPreTrainedModel, check_input_ids
from ..row_request import awaited
from .compressed_cache import prepare_cache
from .released_checkpoint import read_released
from .token_rows import TokenRows, token_rows
from .v41_attention import DeepseekV41Attention, SharedGroups
from .v41_experts import DeepseekV41Experts, DeepseekV41MoE, DeepseekV41Router
from .v41_layers import DeepseekV41RMSNorm, DeepseekV41RotaryEmbedding, Float32Linear


class DeepseekV41DecoderLayer(GradientCheckpointingLayer):
    """Engram (where the layer has one), attention and experts; each writes into the stream of `hc_mult` copies."""

    def __init__(self, config: DeepseekV41Config, layer_idx: int) -> None:
        super().__init__()
        self.engram = EngramLayer(config) if layer_idx in config.engram_layer_ids else None
        self.self_attn = DeepseekV41Attention(config, layer_idx)
        self.mlp = DeepseekV41MoE(config)
        self.input_layernorm = DeepseekV41RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DeepseekV41RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc = HyperConnection(config)
        self.mlp_hc = HyperConnection(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        stream: torch.Tensor,
        pre: torch.Tensor | None,
        shared: SharedGroups,
        embeddings: torch.Tensor | None,
        live: torch.Tensor | None,
        token_mask: torch.Tensor | None,
        rows: TokenRows,
        rotary: DeepseekV41RotaryEmbedding,
        cache: Cache | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, SharedGroups]:
        """
        Args:
            hidden_states: `[B, L, D]`, the stream collapsed with `pre`.
            stream: `[B, L, H, D]`.
            pre: `[B, L, H]`, by which the site before collapses the stream; None for copy 0.
            shared: what the attentions of the layers before have left.
            embeddings: `[B, L, C * engram_head_dim]`, the rows of this layer's table; None without Engram.
            live: bool `[B, L]`, False where Engram must not write; None for everywhere.
            token_mask: bool `[B, L]`, False at tokens that are not text; None for all text.
            rows: where the tokens stand.
            rotary: of this kind of layer.

        Returns:
            `hidden_states`, `stream`, `pre` and `shared` for the next layer.
        """
        if self.engram is not None:
            stream = self.engram(stream, embeddings, live)
            hidden_states = collapse(stream, pre)

        mixes = self.attn_hc(stream)
        hidden_states, shared = self.self_attn(self.input_layernorm(hidden_states), rows, rotary, shared, cache)
        hidden_states, stream, _ = self.attn_hc.expand_and_collapse(hidden_states, stream, mixes)

        mixes = self.mlp_hc(stream)
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states), token_mask)
        return *self.mlp_hc.expand_and_collapse(hidden_states, stream, mixes), shared


class DeepseekV41PreTrainedModel(EngramPreTrainedModel):
    """What the model has with and without a head: initialisation, and the loading of released checkpoints."""

    config: DeepseekV41Config
    model_tags = ["engram", "deepseek_v41"]
    _no_split_modules = ["DeepseekV41DecoderLayer"]
    _keep_in_fp32_modules_strict = ["attn_hc", "mlp_hc", "sinks", "e_score_correction_bias"]
    _supports_flash_attn = False
    _supports_sdpa = False
    _supports_flex_attn = False
    _supports_attention_backend = False
    _can_compile_fullgraph = False
    _can_record_outputs = {"hidden_states": DeepseekV41DecoderLayer}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, DeepseekV41Router):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.e_score_correction_bias)
            init.zeros_(module.e_score_correction_bias_vl)
        elif isinstance(module, DeepseekV41Experts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, DeepseekV41Attention):
            init.zeros_(module.sinks)
        elif isinstance(module, DeepseekV41RotaryEmbedding):
            init.copy_(module.inv_freq, module.frequencies())

    @staticmethod
    def _load_pretrained_model(model, state_dict, checkpoint_files, load_config, expected_keys=None):
        """As [`EngramPreTrainedModel`]'s, and of a released checkpoint, whose weights have other names and formats."""
        released = read_released(model, state_dict, checkpoint_files, load_config)
        if released is not None:
            return PreTrainedModel._load_pretrained_model(model, released, None, load_config, expected_keys)
        load = EngramPreTrainedModel._load_pretrained_model
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)


class DeepseekV41Model(DeepseekV41PreTrainedModel, EngramModel):
    """The decoder without a head."""

    def __init__(self, config: DeepseekV41Config) -> None:
        EngramPreTrainedModel.__init__(self, config)
        config.validate()
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.engram_hasher = NgramHasher(config) if config.engram_layer_ids else None
        self.engram_memory = EngramMemory(config) if config.engram_layer_ids else None
        self.layers = nn.ModuleList([DeepseekV41DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        if self.engram_memory is not None:
            self.engram_memory.readers = tuple(layer.engram for layer in self.layers if layer.engram is not None)
        self.norm = DeepseekV41RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.window_rotary_emb = DeepseekV41RotaryEmbedding(config, compressed=False)
        self.compressed_rotary_emb = DeepseekV41RotaryEmbedding(config, compressed=True)
        self.gradient_checkpointing = False

        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        hash_ids: torch.LongTensor | None = None,
        token_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """As [`EngramModel.forward`]; what differs:

        Args:
            attention_mask: `[B, past + L]` with zeros at padding, wherever it is; other masks are refused.
            position_ids: integer `[B or 1, L]`; a packed document begins where they restart. If not given, tokens are
                counted, without padding.
            token_mask: bool `[B, L]`, False at tokens that are not text (an image span): Engram neither reads nor
                writes there, and experts are chosen with the bias for such tokens.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2):
            kind = tuple(getattr(attention_mask, "shape", ())) or type(attention_mask).__name__
            raise ValueError(
                f"`attention_mask` must be [batch, length] with zeros at padding, got {kind}: groups of tokens are "
                "compressed, so other masks cannot be followed. Mark packed documents by `position_ids` that restart."
            )
        cache = one_cache(cache, past_key_values)
        if inputs_embeds is None:
            check_input_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            prepare_cache(cache, self.config.num_hidden_layers)

        shape, past_seen_tokens = inputs_embeds.shape[:2], 0 if cache is None else cache.get_seq_length()
        padding_free = live_tokens(shape, attention_mask, None, past_seen_tokens)
        live = live_tokens(shape, attention_mask, token_mask, past_seen_tokens)
        embeddings = self._fetch(
            input_ids, inputs_embeds, hash_ids, live, position_ids, None, cache, token_mask is None
        )
        rows = token_rows(
            shape,
            inputs_embeds.device,
            sorted(set(self.config.compress_ratios[: self.config.num_hidden_layers]) - {0}),
            1 if self.config.candidate_source_layer_id is None else self.config.candidate_block_size,
            padding_free,
            position_ids,
            cache.layers[0].counts[:, -1] if past_seen_tokens else None,
        )

        hidden_states = inputs_embeds
        stream = hidden_states.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1)
        pre, shared = None, SharedGroups()
        for index, decoder_layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            is_compressed = self.config.compress_ratios[index] > 0
            hidden_states, stream, pre, shared = decoder_layer(
                hidden_states,
                stream,
                pre,
                shared,
                awaited(embeddings.get(index)),
                live,
                token_mask,
                rows,
                self.compressed_rotary_emb if is_compressed else self.window_rotary_emb,
                cache=cache,
            )

        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE_NAME: cache})


class DeepseekV41ForCausalLM(DeepseekV41PreTrainedModel, EngramForCausalLM):
    """The decoder with a language modelling head; logits are fp32."""

    def __init__(self, config: DeepseekV41Config) -> None:
        EngramPreTrainedModel.__init__(self, config)
        self.model = DeepseekV41Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = Float32Linear(config.hidden_size, config.vocab_size, bias=False)

        self.post_init()

    @classmethod
    def from_backbone(cls, *args: Any, **kwargs: Any):
        raise NotImplementedError("DeepSeek-V4.1 is no backbone to add memory to: it has its own.")

    def drop_memory(self):
        raise NotImplementedError("DeepSeek-V4.1 without its memory is no model that Transformers has a class for.")

    def _get_resized_lm_head(self, *args: Any, **kwargs: Any) -> Float32Linear:
        # Transformers makes a plain linear.
        resized = super()._get_resized_lm_head(*args, **kwargs)
        head = Float32Linear(resized.in_features, resized.out_features, bias=False, device="meta")
        head.weight = resized.weight
        return head

    def _prepare_cache_for_generation(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        kind = generation_config.cache_implementation
        if kind is not None and kind != "dynamic":
            raise ValueError(
                f"`cache_implementation` is {kind!r}: DeepSeek-V4.1 keeps windows and compressed entries in a "
                "cache of its own kind. Leave it out."
            )
        super()._prepare_cache_for_generation(generation_config, *args, **kwargs)


__all__ = ["DeepseekV41ForCausalLM", "DeepseekV41Model", "DeepseekV41PreTrainedModel"]
