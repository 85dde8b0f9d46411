"""Transformers' own tests of configs, models and training, run over our classes (`make test-upstream`)."""

import inspect
import unittest
from unittest import mock

import torch
from transformers import initialization as init
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import GenerationTesterMixin, ModelTesterMixin, ids_tensor
from transformers_tests.test_training_mixin import TrainingTesterMixin

from hf_engram import (
    EngramConfig,
    EngramForCausalLM,
    EngramForQuestionAnswering,
    EngramForSequenceClassification,
    EngramForTokenClassification,
    EngramModel,
    EngramPreTrainedModel,
)
from hf_engram.modeling_engram.engram_layer import EngramLayer
from hf_engram.modeling_engram.engram_memory import EngramMemory
from hf_engram.modeling_engram.hyper_connection import HyperConnection


# Tests that cannot apply, each with its reason. Nothing else is skipped by us.
SKIPPED = {
    "test_model_weights_reload_no_missing_tied_weights": (
        "loads a checkpoint without any of the model's weights; we refuse one that lacks weights of the decoder"
    ),
    "test_generation_tester_mixin_inheritance": (
        "asks for GenerationTesterMixin, which the source distribution lacks: tests/upstream/fetch.py puts an empty "
        "class in its place. Generation is covered by tests/conformance"
    ),
}
if "is_floating_point" not in inspect.getsource(ModelTesterMixin.test_keep_in_fp32_modules):
    SKIPPED["test_keep_in_fp32_modules"] = (
        "this version of the test expects integer buffers (our token map) to become fp16; later ones leave them out"
    )
NO_ROOM = (
    "gives the model another vocabulary size; the tiny config has one compressed id a token, as many as its hash was "
    "made for, so a larger vocabulary is refused. tests/modeling_engram/test_token_map.py resizes where there is room"
)
SKIPPED |= {
    "test_load_with_mismatched_shapes": NO_ROOM,
    "test_resize_embeddings_untied": NO_ROOM,
    "test_resize_embeddings_untied_no_reinit_on_post_init": NO_ROOM,
    "test_resize_tokens_embeddings": NO_ROOM,
}
# Tests of what the model is initialised to, which see it as it is; the others see a lively one.
INITIALISATION = ("test_can_init_all_missing_weights", "test_init_weights_can_init_buffers")


@torch.no_grad()
def init_lively_weights(model: EngramPreTrainedModel, module: torch.nn.Module) -> None:
    """`_init_weights`, after which Engram and the copies of the stream have a large effect from the start."""
    ORIGINAL_INIT_WEIGHTS(model, module)
    if isinstance(module, EngramLayer):
        init.normal_(module.wkv.weight, std=0.3)
        init.normal_(module.q_weight, mean=1.0, std=0.3)
    elif isinstance(module, HyperConnection) and module.hc_mult > 1:
        init.normal_(module.scale, mean=1.0, std=0.3)
    elif isinstance(module, EngramMemory):
        for table in module.tables:
            init.normal_(table.weight, std=1.0)


ORIGINAL_INIT_WEIGHTS = EngramPreTrainedModel._init_weights


class EngramTester:
    """What Transformers' mixins ask of a model's tester: classes, a tiny config, and inputs."""

    all_model_classes = (
        EngramModel,
        EngramForCausalLM,
        EngramForSequenceClassification,
        EngramForTokenClassification,
        EngramForQuestionAnswering,
    )
    causal_lm_class = EngramForCausalLM
    is_training = True
    batch_size = 13
    seq_length = 7
    vocab_size = 99
    hidden_size = 32
    num_hidden_layers = 2
    num_attention_heads = 4

    def __init__(self, with_hash_ids: bool = False) -> None:
        self.with_hash_ids = with_hash_ids

    def get_config(self) -> EngramConfig:
        return EngramConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=32,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            num_labels=3,
            hc_mult=2,
            engram_layer_ids=[0, 1],
            engram_max_ngram_size=3,
            engram_vocab_size=50,
            engram_n_heads=2,
            engram_head_dim=8,
        )

    def prepare_config_and_inputs_for_common(self) -> tuple[EngramConfig, dict[str, torch.Tensor]]:
        config = self.get_config()
        # Without padding ids, from which the classification head infers where a sequence ends.
        input_ids = ids_tensor([self.batch_size, self.seq_length], self.vocab_size - 3) + 3
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids).tril()}
        if self.with_hash_ids:
            inputs["hash_ids"] = EngramModel(config).compute_hash_ids(input_ids, inputs["attention_mask"])
        return config, inputs


class EngramModelTest(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
    all_model_classes = EngramTester.all_model_classes
    # Off by default for files without a line of copyright.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self) -> None:
        if self._testMethodName in SKIPPED:
            self.skipTest(f"by us: {SKIPPED[self._testMethodName]}")
        # `inputs_embeds` say nothing about the token ids that Engram looks up, so hash ids go beside them.
        self.model_tester = EngramTester(with_hash_ids=self._testMethodName.startswith("test_inputs_embeds"))
        if self._testMethodName not in INITIALISATION:
            patch = mock.patch.object(EngramPreTrainedModel, "_init_weights", init_lively_weights)
            patch.start()
            self.addCleanup(patch.stop)

    def test_skipped_tests_exist(self) -> None:
        """Otherwise a renamed test would leave its reason behind."""
        self.assertEqual([name for name in SKIPPED if not hasattr(self, name)], [])


class EngramConfigTest(unittest.TestCase):
    def test_config(self) -> None:
        tester = ConfigTester(self, config_class=EngramConfig, hidden_size=36, num_attention_heads=6)
        tester.run_common_tests()


class EngramTrainingTest(TrainingTesterMixin, unittest.TestCase):
    all_model_classes = EngramTester.all_model_classes
    model_tester = EngramTester()
