"""The decoder layer: Engram, attention and MLP, each writing into the multi-copy residual stream."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from ..configuration.configuration_engram import EngramConfig
from .engram_layer import EngramLayer
from .hyper_connection import HyperConnection, collapse


class EngramAttention(nn.Module):
    """Grouped-query attention with rotary embeddings, and optional biases (Qwen2) and query/key norms (Qwen3)."""

    def __init__(self, config: EngramConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True

        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_output_bias)
        self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else None
        self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps) if config.use_qk_norm else None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`hidden_states` [B, L, D] to the attention's output [B, L, D] and its weights (eager only)."""
        input_shape = hidden_states.shape[:-1]
        hidden_shape = (*input_shape, -1, self.head_dim)

        query_states = self.q_proj(hidden_states).view(hidden_shape)
        key_states = self.k_proj(hidden_states).view(hidden_shape)
        value_states = self.v_proj(hidden_states).view(hidden_shape).transpose(1, 2)
        if self.q_norm is not None:
            query_states, key_states = self.q_norm(query_states), self.k_norm(key_states)
        query_states, key_states = query_states.transpose(1, 2), key_states.transpose(1, 2)

        cos, sin = position_embeddings
        query_states, key_states = apply_rotary_pos_emb(query_states, key_states, cos, sin)
        if cache is not None:
            key_states, value_states = cache.update(key_states, value_states, self.layer_idx)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        attn_output, attn_weights = attention_interface(
            self,
            query_states,
            key_states,
            value_states,
            attention_mask,
            dropout=0.0 if not self.training else self.attention_dropout,
            scaling=self.scaling,
            **kwargs,
        )
        attn_output = attn_output.reshape(*input_shape, -1).contiguous()
        return self.o_proj(attn_output), attn_weights


class EngramDecoderLayer(GradientCheckpointingLayer):
    """Engram (where the layer has one), attention, MLP; each writes into the stream of `hc_mult` copies."""

    def __init__(self, config: EngramConfig, layer_idx: int) -> None:
        super().__init__()
        self.hidden_size = config.hidden_size
        self.engram = EngramLayer(config) if layer_idx in config.engram_layer_ids else None
        self.self_attn = EngramAttention(config=config, layer_idx=layer_idx)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.attn_hc = HyperConnection(config)
        self.mlp_hc = HyperConnection(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        stream: torch.Tensor,
        pre: torch.Tensor | None,
        embeddings: torch.Tensor | None,
        token_mask: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """
        Args:
            hidden_states: `[B, L, D]`, the stream collapsed with `pre`.
            stream: `[B, L, H, D]`.
            pre: `[B, L, H]`, by which the sublayer before collapses the stream; None for copy 0.
            embeddings: `[B, L, C * engram_head_dim]`, the rows of this layer's table; None without Engram.
            token_mask: bool `[B, L]`, False where Engram must not write; None for everywhere.

        Returns:
            `hidden_states`, `stream` and `pre` for the next layer.
        """
        if self.engram is not None:
            stream = self.engram(stream, embeddings, token_mask)
            hidden_states = collapse(stream, pre)

        mixes = self.attn_hc(stream)
        hidden_states, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            cache=cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states, stream, _ = self.attn_hc.expand_and_collapse(hidden_states, stream, mixes)

        mixes = self.mlp_hc(stream)
        hidden_states = self.mlp(self.post_attention_layernorm(hidden_states))
        return self.mlp_hc.expand_and_collapse(hidden_states, stream, mixes)
