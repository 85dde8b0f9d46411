"""Puts Transformers' own tests on the path, and our classes where those look for a kind of class by its name."""

import sys
from pathlib import Path

import pytest
from transformers.models.auto import modeling_auto


sys.path.insert(0, str(Path(__file__).parent))
from fetch import PACKAGE, folder


if not (folder() / PACKAGE).is_dir():
    pytest.exit(
        f"{folder() / PACKAGE} is missing: run `make test-upstream`, or tests/upstream/fetch.py.", returncode=4
    )
sys.path.insert(0, str(folder()))

# Transformers' tests know from these tables which class is a base model, which takes labels, and of which shape. Auto
# classes do not see the entries: they know our config from `hf_engram`'s registration.
for table, name in {
    "MODEL_MAPPING_NAMES": "EngramModel",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "EngramForCausalLM",
    "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES": "EngramForSequenceClassification",
    "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES": "EngramForTokenClassification",
    "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES": "EngramForQuestionAnswering",
}.items():
    getattr(modeling_auto, table)["engram"] = name
