"""Small random backbones of every family, and a tokenizer for them."""

import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


# Test modules are imported by path (see pyproject.toml); the helper beside them needs its folder on the path.
sys.path.insert(0, str(Path(__file__).parent))

CHAT_TEMPLATE = "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>{% endfor %}"
VOCAB_SIZE = 320  # more rows than the tokenizer has tokens, as many checkpoints have

SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 5e5,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 1e4}

# name: (model_type, fields beside SIZES)
BACKBONES = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama_smollm2": ("llama", {"tie_word_embeddings": True, "rope_theta": 1e5}),
    "llama_3_1": ("llama", {"rope_parameters": LLAMA3, "eos_token_id": [2, 3, 4]}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "max_window_layers": 3}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_biases": ("qwen3", {"head_dim": 8, "attention_bias": True}),
    "internlm3": ("internlm3", {"head_dim": 8, "rope_parameters": DYNAMIC}),
    "internlm3_biases": ("internlm3", {"head_dim": 12, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("iquestcoder", {"head_dim": 8, "num_key_value_heads": 1}),
    "seed_oss": ("seed_oss", {"head_dim": 12, "residual_dropout": 0.0, "attention_dropout": 0.1}),
    "seed_oss_biases": (
        "seed_oss",
        {"head_dim": 8, "residual_dropout": 0.0, "attention_out_bias": True, "mlp_bias": True},
    ),
}


def make_backbone(name: str = "llama", dtype: torch.dtype = torch.float32, **overrides) -> PreTrainedModel:
    model_type, fields = BACKBONES[name]
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers does not know {model_type}")
    config = CONFIG_MAPPING[model_type](**{**SIZES, **fields, **overrides})
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    for weight_name, weight in model.named_parameters():
        # As initialised, biases and norms would hide that they are not carried over.
        if weight_name.endswith("bias") or "norm" in weight_name:
            weight.data.add_(0.3 * torch.randn_like(weight))
    model.generation_config = GenerationConfig(
        bos_token_id=1, eos_token_id=config.eos_token_id, pad_token_id=0, temperature=0.7, top_k=7, do_sample=True
    )
    return model.to(dtype)


@pytest.fixture(scope="session")
def backbone() -> Callable[..., PreTrainedModel]:
    """`backbone(name="llama", dtype=torch.float32, **fields)`: a random model, biases and norms included."""
    return make_backbone


@pytest.fixture(params=BACKBONES)
def any_name(request: pytest.FixtureRequest) -> str:
    """The name of each backbone in turn."""
    return request.param


@pytest.fixture(scope="session")
def plain_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 300 ids with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>", "<|eot|>", "<|call|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text for _, text in sorted(topics.items())][:10], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def ids() -> Callable[..., torch.Tensor]:
    """`ids(batch, length, seed=0)`: token ids without special ones."""

    def draw(batch: int, length: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(5, 300, (batch, length), generator=generator)

    return draw


@pytest.fixture
def backbone_folder(tmp_path, backbone, plain_tokenizer):
    """A saved checkpoint of a tied Llama, with its tokenizer."""
    folder = tmp_path / "backbone"
    backbone("llama_smollm2").save_pretrained(folder)
    plain_tokenizer.save_pretrained(folder)
    return folder
