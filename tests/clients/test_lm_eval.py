"""EleutherAI's lm-evaluation-harness through its `hf` model class, on tasks in local files."""

import json
import re
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer


ROWS = [
    {"question": "The while statement is used for", "choices": ["repeated execution", "a", "sums of"], "answer": 0},
    {"question": "An assignment", "choices": [" binds names to values in the namespace", " is"], "answer": 1},
    {"question": "The del", "choices": ["statement", " keyword removes a name", " list"], "answer": 2},
    {"question": "Objects are Python's abstraction for", "choices": ["data", "text, and more text"], "answer": 0},
]
CHOICE_TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
"""
GENERATE_TASK = """
task: local_generate
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["<eos>"]
  max_gen_toks: 8
  do_sample: false
metric_list:
  - metric: exact_match
"""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> TaskManager:
    folder = tmp_path_factory.mktemp("tasks")
    data = folder / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    (folder / "local_choice.yaml").write_text(CHOICE_TASK.format(data=data), encoding="utf-8")
    (folder / "local_generate.yaml").write_text(GENERATE_TASK.format(data=data), encoding="utf-8")
    return TaskManager(include_path=str(folder), include_defaults=False)


def evaluate(model_folder, tasks: TaskManager, task: str, batch_size: int) -> list[dict]:
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(model_folder), "trust_remote_code": True, "dtype": "float32"},
        tasks=[task],
        task_manager=tasks,
        batch_size=batch_size,
        device="cpu",
        bootstrap_iters=0,
        log_samples=True,
    )
    return sorted(results["samples"][task], key=lambda sample: sample["doc_id"])


@pytest.mark.parametrize("batch_size", [1, 8])
def test_multiple_choice(model_folder, tasks, batch_size):
    """The log-likelihood of every choice is what the model says of question and choice alone."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=True)
    for sample in evaluate(model_folder, tasks, "local_choice", batch_size):
        for (context, continuation), ((value, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            ids = tokenizer(context + continuation, return_tensors="pt")["input_ids"]
            start = len(tokenizer(context)["input_ids"])
            with torch.no_grad():
                log_probs = model(ids).logits.log_softmax(-1)[0, start - 1 : -1]
            expected = log_probs.gather(1, ids[0, start:, None]).sum()
            assert abs(float(value) - expected.item()) < 1e-3


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generate_until(model_folder, tasks, batch_size):
    """Batched, left-padded generation gives what `generate` gives for each prompt alone."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=True)
    for sample in evaluate(model_folder, tasks, "local_generate", batch_size):
        ids = tokenizer(sample["doc"]["question"], return_tensors="pt")["input_ids"]
        output_ids = model.generate(ids, max_new_tokens=8, do_sample=False)
        text = tokenizer.decode(output_ids[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["resps"][0][0] == text


def test_snippet_of_the_docs(model_folder, tmp_path, monkeypatch):
    """The Python in docs/compatibility.md runs, with a model and a task of the names that it has."""
    page = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "my-engram").symlink_to(model_folder)
    folder = tmp_path / "folder" / "of" / "yaml"
    folder.mkdir(parents=True)
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in ROWS), encoding="utf-8")
    task = CHOICE_TASK.replace("local_choice", "my_task").format(data=data)
    (folder / "my_task.yaml").write_text(task, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(compile(snippet, "docs/compatibility.md", "exec"), namespace)
    assert 0 <= namespace["results"]["results"]["my_task"]["acc,none"] <= 1
