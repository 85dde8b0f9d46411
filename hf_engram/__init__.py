"""Engram for 🤗 Transformers: hashed n-gram memory and a multi-copy residual stream, as in DeepSeek-V4.1.

Importing this package registers the architecture, so that Auto classes load it without `trust_remote_code`.
"""

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)

from .configuration.configuration_deepseek_v41 import DeepseekV41Config, DeepseekV41TextConfig
from .configuration.configuration_engram import EngramConfig
from .modeling_engram.deepseek_v41.modeling_deepseek_v41 import DeepseekV41ForCausalLM, DeepseekV41Model
from .modeling_engram.modeling_engram import (
    EngramForCausalLM,
    EngramForQuestionAnswering,
    EngramForSequenceClassification,
    EngramForTokenClassification,
    EngramModel,
    EngramPreTrainedModel,
)
from .tokenization.tokenization_engram import EngramTokenizer


__version__ = "0.1.0"

AutoConfig.register("engram", EngramConfig, exist_ok=True)
AutoModel.register(EngramConfig, EngramModel, exist_ok=True)
AutoModelForCausalLM.register(EngramConfig, EngramForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(EngramConfig, EngramForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(EngramConfig, EngramForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(EngramConfig, EngramForQuestionAnswering, exist_ok=True)
AutoTokenizer.register(EngramConfig, fast_tokenizer_class=EngramTokenizer, exist_ok=True)
# Transformers' own class, where it has one, stays what Auto classes load.
if "deepseek_v41" not in CONFIG_MAPPING:
    AutoConfig.register("deepseek_v41", DeepseekV41Config, exist_ok=True)
    AutoModel.register(DeepseekV41Config, DeepseekV41Model, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
    AutoTokenizer.register(DeepseekV41Config, fast_tokenizer_class=EngramTokenizer, exist_ok=True)

__all__ = [
    "DeepseekV41Config",
    "DeepseekV41ForCausalLM",
    "DeepseekV41Model",
    "DeepseekV41TextConfig",
    "EngramConfig",
    "EngramForCausalLM",
    "EngramForQuestionAnswering",
    "EngramForSequenceClassification",
    "EngramForTokenClassification",
    "EngramModel",
    "EngramPreTrainedModel",
    "EngramTokenizer",
]
