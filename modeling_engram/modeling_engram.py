"""The Engram language model: a Llama-style decoder with a multi-copy residual stream and n-gram memory."""

import importlib
import inspect
import warnings
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import (
    create_causal_mask,
    create_masks_for_generate,
    create_recurrent_attention_mask,
)
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..configuration.configuration_engram import EngramConfig
from .decoder_layer import EngramDecoderLayer
from .engram_memory import EngramMemory
from .live_tokens import attention_mask_as, live_tokens, parents_by_visibility
from .ngram_hasher import NgramHasher
from .pretrained_model import EngramPreTrainedModel, check_input_ids
from .row_request import RowRequest, awaited


# Transformers renamed `past_key_values` to `cache` between 5.17 and 5.24; both ends are served.
CACHE_NAME = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache, under whichever of its two names it was passed."""
    if cache is not None and past_key_values is not None:
        raise ValueError("`cache` and `past_key_values` are two names of one argument: pass one of them.")
    if past_key_values is not None and CACHE_NAME != "past_key_values" and not torch.compiler.is_compiling():
        warnings.warn("`past_key_values` is deprecated. Use `cache` instead.", FutureWarning, stacklevel=3)
    return cache if cache is not None else past_key_values


class EngramModel(EngramPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: EngramConfig) -> None:
        super().__init__(config)
        config.validate()
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.engram_hasher = NgramHasher(config) if config.engram_layer_ids else None
        self.engram_memory = EngramMemory(config) if config.engram_layer_ids else None
        self.layers = nn.ModuleList([EngramDecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        if self.engram_memory is not None:
            self.engram_memory.readers = tuple(layer.engram for layer in self.layers if layer.engram is not None)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False

        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        hash_ids: torch.LongTensor | None = None,
        token_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        """As a Llama model, and:

        Args:
            hash_ids: int64 `[B, L, n_engram_layers, C]` from the tokenizer; computed from `input_ids` if not given.
            token_mask: bool `[B, L]`, False at tokens that are not text (an image span): Engram neither reads nor
                writes there. Padding is known from `attention_mask`.
            cache, past_key_values: one argument under its newer and its older name.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of `input_ids` and `inputs_embeds`.")
        cache = one_cache(cache, past_key_values)
        if inputs_embeds is None:
            check_input_ids(input_ids, self.config.vocab_size)
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)

        causal_mask, padding_mask = attention_mask, None
        if isinstance(attention_mask, dict):
            # Prepared by `generate` for a static cache.
            causal_mask, padding_mask = attention_mask["full_attention"], attention_mask.get("padding")
        elif isinstance(attention_mask, torch.Tensor) and attention_mask.ndim != 4:
            padding_mask = attention_mask
        past_seen_tokens = cache.get_seq_length() if cache is not None else 0
        shape = inputs_embeds.shape[:2]
        live = live_tokens(shape, padding_mask, token_mask, past_seen_tokens)
        parents = None
        if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 4:
            parents = parents_by_visibility(attention_mask, shape, past_seen_tokens, position_ids)
            is_eager = self.config._attn_implementation == "eager"
            attention_mask = attention_mask_as(inputs_embeds.dtype, attention_mask, keeps_bool=not is_eager)
        is_hashed_alike = token_mask is None and parents is None
        embeddings = self._fetch(
            input_ids, inputs_embeds, hash_ids, live, position_ids, parents, cache, is_hashed_alike
        )

        if position_ids is None:
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)
        if not isinstance(attention_mask, dict):
            causal_mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                position_ids=position_ids,
                **{CACHE_NAME: cache},
            )

        hidden_states = inputs_embeds
        stream = hidden_states.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1)
        pre = None
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for index, decoder_layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            hidden_states, stream, pre = decoder_layer(
                hidden_states,
                stream,
                pre,
                awaited(embeddings.get(index)),
                live,
                attention_mask=causal_mask,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                use_cache=use_cache,
                cache=cache,
                **kwargs,
            )

        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(last_hidden_state=hidden_states, **{CACHE_NAME: cache})

    def _fetch(
        self,
        input_ids: torch.LongTensor | None,
        inputs_embeds: torch.Tensor,
        hash_ids: torch.LongTensor | None,
        live: torch.Tensor | None,
        position_ids: torch.LongTensor | None,
        parents: torch.LongTensor | None,
        cache: Cache | None,
        is_hashed_alike: bool,
    ) -> dict[int, torch.Tensor | RowRequest]:
        """Rows `[B, L, C * engram_head_dim]` of every Engram layer by its index, there or on their way; and the
        cache's history moved on. `is_hashed_alike`: the tokenizer knew all that the model knows, so `hash_ids` of a
        whole sequence must be what the model computes."""
        # While an assistant exits early, the config counts fewer layers.
        if self.engram_hasher is None or self.config.engram_layer_ids[0] >= self.config.num_hidden_layers:
            return {}
        if input_ids is None:
            if hash_ids is None:
                raise ValueError(
                    "`inputs_embeds` alone say nothing about the token ids that Engram layers look up: pass "
                    "`hash_ids` beside them (from the tokenizer, or `model.compute_hash_ids(input_ids)`), or pass "
                    "`input_ids`."
                )
            if cache is not None and self.engram_hasher.has_history(cache):
                raise ValueError(
                    "`inputs_embeds` cannot continue a cache: its n-gram history would miss these tokens. Pass "
                    "`input_ids`."
                )
        is_continued = cache is not None and cache.get_seq_length() > 0
        if hash_ids is not None:
            self.engram_hasher.check_hash_ids(hash_ids, *inputs_embeds.shape[:2], live)
        if input_ids is not None:
            dead = None if live is None else ~live
            computed = self.engram_hasher(input_ids, dead, position_ids, cache, parents)
            if hash_ids is not None and is_hashed_alike and not is_continued:
                self.engram_hasher.check_agreement(hash_ids, computed, live)
            hash_ids = computed
        elif live is not None:
            # Where nothing is read, a collator may have padded with what is no row.
            hash_ids = torch.where(live[..., None, None], hash_ids, self.engram_hasher.offsets.flatten(1))
        rows = self.engram_memory(hash_ids, dtype=inputs_embeds.dtype, wait=False)
        return dict(zip(self.config.engram_layer_ids, rows, strict=True))


def _convert_module() -> Any:
    """The package's conversion, which does not travel to the Hub."""
    try:
        return importlib.import_module("hf_engram.convert")
    except ModuleNotFoundError as error:
        raise ImportError("Conversion needs the package itself: install hf-engram.") from error


class EngramForCausalLM(EngramPreTrainedModel, GenerationMixin):
    """The decoder with a language modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: EngramConfig) -> None:
        super().__init__(config)
        self.model = EngramModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

        self.post_init()

    @classmethod
    def from_backbone(
        cls,
        model_or_path: Any,
        tokenizer: Any = None,
        engram_layer_ids: list[int] | None = None,
        hc_mult: int = 1,
        **engram_fields: Any,
    ) -> "EngramForCausalLM":
        """A pretrained decoder (Llama, Mistral, Qwen, ...) with memory, which computes what it did before. See the
        package's `convert.convert_backbone`, which has these arguments, and returns the tokenizer beside the model."""
        convert = _convert_module().convert_backbone
        return convert(model_or_path, tokenizer, engram_layer_ids, hc_mult, model_class=cls, **engram_fields)[0]

    def drop_memory(self) -> PreTrainedModel:
        """The decoder without its memory, of Transformers' own class: see the package's `convert.drop_memory`."""
        return _convert_module().drop_memory(self)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | dict | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        hash_ids: torch.LongTensor | None = None,
        token_mask: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        """As [`EngramModel.forward`], and:

        Args:
            labels: `[B, L]`, token ids to predict (shifted inside), -100 where there is nothing to predict.
            logits_to_keep: number of last positions to compute logits for (0 for all), or their indices.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            hash_ids=hash_ids,
            token_mask=token_mask,
            cache=one_cache(cache, past_key_values),
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden_states[:, kept, :])

        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)

        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs[CACHE_NAME] if CACHE_NAME in outputs else None},
        )

    @staticmethod
    def create_masks_for_generate(
        config: EngramConfig, inputs_embeds: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
    ) -> dict[str, torch.Tensor | None]:
        """As Transformers', called by `generate` for a static cache; n-grams need to know the padding, too."""
        masks = create_masks_for_generate(config, inputs_embeds, attention_mask, **kwargs)
        padding = create_recurrent_attention_mask(config, inputs_embeds, attention_mask)
        return {"full_attention": masks["full_attention"], "padding": padding}

    def _prefill(
        self, input_ids: torch.LongTensor, generation_config: GenerationConfig, model_kwargs: dict, *args, **kwargs
    ) -> CausalLMOutputWithPast:
        token_mask, attention_mask = model_kwargs.get("token_mask"), model_kwargs.get("attention_mask")
        if token_mask is not None:
            # That of new ids alone, where the cache holds the others; a mask without zeros is known by its length.
            total = (
                getattr(generation_config, "_mask_length", 0) if attention_mask is None else attention_mask.shape[1]
            )
            cached = max(total - token_mask.shape[1], 0)
            model_kwargs["token_mask"] = nn.functional.pad(token_mask, (cached, 0), value=True)
        hash_ids = model_kwargs.pop("hash_ids", None)
        if hash_ids is not None and token_mask is None and self.model.engram_hasher is not None:
            self._check_prompt(input_ids, hash_ids, attention_mask)
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def _check_prompt(
        self, input_ids: torch.LongTensor, hash_ids: torch.LongTensor, attention_mask: torch.Tensor | None
    ) -> None:
        """Raises unless the tokenizer has hashed the prompt as the model does."""
        is_whole = attention_mask is None or attention_mask.shape == input_ids.shape
        if is_whole and hash_ids.shape[1] == input_ids.shape[1]:
            live = live_tokens(input_ids.shape, attention_mask, None)
            self.model.engram_hasher.check_hash_ids(hash_ids, *input_ids.shape, live)
            computed = self.compute_hash_ids(input_ids, attention_mask)
            self.model.engram_hasher.check_agreement(hash_ids, computed, live)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "Continuous batching keeps keys and values in pages, which have no place for the n-gram history: use "
            "`generate` with a batch of prompts."
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.LongTensor,
        inputs_embeds: torch.Tensor | None = None,
        hash_ids: torch.LongTensor | None = None,
        token_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As [`GenerationMixin.prepare_inputs_for_generation`]. The prompt's `hash_ids` are dropped, since `generate`
        would pass them on at every step: the model hashes, with the history in the cache. `token_mask` covers the
        prompt; generated tokens are text."""
        if inputs_embeds is not None and self.model.engram_hasher is not None:
            raise ValueError(
                "`generate` cannot start from `inputs_embeds`: the n-gram history needs token ids. Pass `input_ids`."
            )
        inputs = super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)
        if token_mask is not None:
            # The inputs may be a chunk of the prompt: the tokens after those that the cache holds.
            cache, length = kwargs.get("cache", kwargs.get("past_key_values")), inputs["input_ids"].shape[1]
            end = input_ids.shape[1] if cache is None else int(cache.get_seq_length()) + length
            token_mask = nn.functional.pad(token_mask, (0, max(end - token_mask.shape[1], 0)), value=True)
            inputs["token_mask"] = token_mask[:, end - length : end]
        return inputs


class EngramForSequenceClassification(GenericForSequenceClassification, EngramPreTrainedModel):
    """The decoder with a sequence classification head (on the last token that is not padding)."""

    def __init__(self, config: EngramConfig) -> None:
        # Not the mixin's: it builds the decoder with AutoModel, which does not know classes loaded from a Hub folder.
        EngramPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = EngramModel(config)
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)
        self.post_init()


class EngramForTokenClassification(GenericForTokenClassification, EngramPreTrainedModel):
    """The decoder with a token classification head."""

    def __init__(self, config: EngramConfig) -> None:
        EngramPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = EngramModel(config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, self.num_labels)
        self.post_init()


class EngramForQuestionAnswering(GenericForQuestionAnswering, EngramPreTrainedModel):
    """The decoder with a span head for extractive question answering."""

    def __init__(self, config: EngramConfig) -> None:
        EngramPreTrainedModel.__init__(self, config)
        self.model = EngramModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


__all__ = [
    "EngramForCausalLM",
    "EngramForQuestionAnswering",
    "EngramForSequenceClassification",
    "EngramForTokenClassification",
    "EngramModel",
    "EngramPreTrainedModel",
]
