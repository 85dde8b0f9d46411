"""scripts/push_to_hub.py with adapters: table rows come along, and the base is named by what others can load."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, get_peft_model

from hf_engram import EngramForCausalLM
from hf_engram.adapters import engram_tables, unfreeze_tables, write_adapter_card
from hf_engram.optim import EngramOptimizer


BASE, ADAPTER = "someone/some-model", "someone/some-adapter"

LOAD_BY_ID = """
import sys
sys.modules["hf_engram"] = None  # importing it fails
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

adapter, path = sys.argv[1:]
remote = {"trust_remote_code": True}
expected = torch.load(path)
base = AutoModelForCausalLM.from_pretrained("someone/some-model", **remote)
models = {
    "PeftModel": PeftModel.from_pretrained(base, adapter),
    "AutoPeftModel": AutoPeftModelForCausalLM.from_pretrained(adapter, **remote),
    "AutoModel": AutoModelForCausalLM.from_pretrained(adapter, **remote),
}
tokenizer = AutoTokenizer.from_pretrained("someone/some-model", **remote)
for name, model in models.items():
    with torch.no_grad():
        logits = model.eval()(**tokenizer("The cat sat on the mat", return_tensors="pt")).logits
    assert torch.equal(logits, expected), name
"""


@pytest.fixture
def adapter(folder, tokenizer, tmp_path):
    """An adapter with rows, trained on a copy of `folder`; it is saved as `tmp_path/adapter`."""
    base = shutil.copytree(folder, tmp_path / "base")
    model = get_peft_model(EngramForCausalLM.from_pretrained(base), LoraConfig(r=2, task_type="CAUSAL_LM"))
    unfreeze_tables(model)
    inputs = tokenizer("The cat sat on the mat", return_tensors="pt")
    optimizer = EngramOptimizer(model, lr=1e-2)
    for _ in range(2):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path / "adapter")
    return model


def test_end_to_end(adapter, push, hub, environment, logits_of, tmp_path):
    """Base and adapter, and then three ways to load the adapter by its id, in a process without this package."""
    push(tmp_path / "base", BASE)
    command = [
        sys.executable,
        str(Path(__file__).resolve().parents[2] / "scripts" / "push_to_hub.py"),
        "adapter",
        ADAPTER,
    ]
    done = subprocess.run(
        [*command, "--base", BASE], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    torch.save(logits_of(adapter), tmp_path / "expected.pt")
    command = [sys.executable, "-c", LOAD_BY_ID, ADAPTER, str(tmp_path / "expected.pt")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_peft_pushes_rows(adapter, hub, use_hub, tmp_path):
    """PEFT's own `push_to_hub` brings the same file."""
    use_hub(hub)
    adapter.push_to_hub(ADAPTER)
    assert (
        hub.read(ADAPTER, "adapter_model.safetensors") == (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    )


@pytest.mark.parametrize("card", ["peft", "ours"])
def test_names_of_the_base(adapter, push, hub, tmp_path, card):
    """Neither config nor card names a folder of this machine; both name the base's id."""
    if card == "ours":
        write_adapter_card(tmp_path / "adapter", "adapter", tmp_path / "base")
    push(tmp_path / "base", BASE)
    push(tmp_path / "adapter", ADAPTER, "--base", BASE)
    for name in ("adapter_config.json", "README.md"):
        assert str(tmp_path) not in hub.read(ADAPTER, name).decode()
    assert json.loads(hub.read(ADAPTER, "adapter_config.json"))["base_model_name_or_path"] == BASE
    content = hub.read(ADAPTER, "README.md").decode()
    assert ModelCard(content).data.base_model == BASE
    if card == "ours":
        assert f"# {ADAPTER}\n" in content and f'PeftModel.from_pretrained(model, "{ADAPTER}")' in content
    assert str(tmp_path) in (tmp_path / "adapter" / "adapter_config.json").read_text()


def test_a_base_from_the_cache(adapter, push, hub, tmp_path):
    """A base that was loaded from a folder of the Hub's cache is known by its id."""
    push(tmp_path / "base", BASE)
    config = tmp_path / "adapter" / "adapter_config.json"
    cached = tmp_path / "hub" / "models--someone--some-model" / "snapshots" / ("a" * 40)
    shutil.copytree(tmp_path / "base", cached)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(cached)}))
    push(tmp_path / "adapter", ADAPTER)
    assert json.loads(hub.read(ADAPTER, "adapter_config.json"))["base_model_name_or_path"] == BASE


def test_refusals(adapter, push, hub, tmp_path):
    """What nobody could load is not sent."""
    with pytest.raises(SystemExit, match="a folder that nobody else has: upload that first, and say with --base"):
        push(tmp_path / "adapter", ADAPTER)
    with pytest.raises(SystemExit, match="error: --base is for adapters"):
        push(tmp_path / "base", BASE, "--base", BASE)
    with pytest.raises(SystemExit, match=f"the base {BASE} is not on the Hub"):
        push(tmp_path / "adapter", ADAPTER, "--base", BASE)
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    with pytest.raises(SystemExit, match=r"lacks adapter_model\.safetensors"):
        push(tmp_path / "adapter", ADAPTER, "--base", BASE)
    shutil.copy(tmp_path / "elsewhere", weights)
    with torch.no_grad():
        for table in engram_tables(base := EngramForCausalLM.from_pretrained(tmp_path / "base")):
            table += 1
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(SystemExit, match="was not uploaded: The model's table rows are not those"):
        push(tmp_path / "adapter", ADAPTER, "--base", BASE, check=True)
    assert ADAPTER not in hub.repositories or hub.files(ADAPTER) <= {".gitattributes"}
