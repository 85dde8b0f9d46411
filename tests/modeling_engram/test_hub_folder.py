"""The Hub folder: what is written, and that a process without this package loads it, runs it and saves it again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_engram import EngramForCausalLM, EngramForSequenceClassification
from hf_engram.configuration.remote_code import export_code


# The fresh process: without the installed package, which no import finds. Loading torch and Transformers takes long,
# so it is done once; each script then runs in a fork of that process, to which nothing has happened yet.
SERVER = """
import json, os, sys, traceback

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "hf_engram":
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Blocked())

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline,
)

remote = {"trust_remote_code": True}
for line in sys.stdin:
    script, arguments, log = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with open(log, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                try:
                    exec(script, globals())
                    assert "hf_engram" not in sys.modules
                    code = 0
                except BaseException:
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """`fresh(script, *arguments)`: runs a script in a process of its own, in which the package is not installed."""
    folder = tmp_path_factory.mktemp("fresh")
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(folder / "modules"),
        "TOKENIZERS_PARALLELISM": "false",
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER], cwd=folder, env=environment, **pipes) as server:

        def run(script: str, *arguments: object) -> str:
            log = folder / "log"
            server.stdin.write(json.dumps([script, [str(argument) for argument in arguments], str(log)]) + "\n")
            server.stdin.flush()
            code = server.stdout.readline().strip()
            assert code == "0", f"exit status {code}\n{log.read_text() if log.exists() else ''}"
            return log.read_text()

        yield run
        server.kill()


def logits_of(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def check_folder(folder: Path) -> None:
    """Flat, with all the code, the weights, the config and a card."""
    assert all(path.is_file() for path in folder.iterdir())
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "README.md"} <= names
    config = json.loads((folder / "config.json").read_text())
    for entry in config["auto_map"].values():
        assert f"{entry.split('.')[0].split('--')[-1]}.py" in names
        assert "--" not in entry


def test_written_files(lively_model, tmp_path):
    """`save_pretrained` writes the weights, the config, a model card, and the code as the exporter does."""
    lively_model().save_pretrained(tmp_path / "model")
    check_folder(tmp_path / "model")
    for path in export_code(tmp_path / "code"):
        assert (tmp_path / "model" / path.name).read_bytes() == path.read_bytes()


def test_model_card(lively_model, tmp_path):
    """The card holds metadata for the Hub and the model's numbers; one that is there already is kept."""
    model = lively_model()
    model.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\n")
    assert "pipeline_tag: text-generation" in card and "- engram" in card
    assert "trust_remote_code=True" in card
    assert ", ".join(f"{rows:,}" for rows in model.config.engram_num_embeddings) in card
    tables = sum(p.numel() for p in model.model.engram_memory.parameters())
    rest = sum(p.numel() for p in model.parameters()) - tables
    assert f"{rest:,}" in card and f"{tables:,}" in card
    (tmp_path / "README.md").write_text("mine")
    model.save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_card_of_a_plain_model(lively_model, tmp_path):
    """A model without Engram layers has a card, too."""
    lively_model(engram_layer_ids=[]).save_pretrained(tmp_path)
    assert "none" in (tmp_path / "README.md").read_text(encoding="utf-8")


ROUND = """
source, target, data = arguments
config = AutoConfig.from_pretrained(source, **remote)
assert config.model_type == "engram" and type(config).__module__.startswith("transformers_modules.")
model = AutoModelForCausalLM.from_pretrained(source, **remote).eval()
assert type(model).__module__.startswith("transformers_modules.")
base = AutoModel.from_pretrained(source, **remote).eval()
expected = load_file(data)
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
    assert torch.equal(base(expected["ids"]).last_hidden_state, expected["hidden"])
    generated = model.generate(
        expected["ids"], attention_mask=torch.ones_like(expected["ids"]), max_new_tokens=5, do_sample=False
    )
assert torch.equal(generated, expected["generated"])
model.save_pretrained(target)
"""


def test_three_rounds_without_the_package(lively_model, random_ids, fresh, tmp_path):
    """A fresh process loads the folder, computes the same bits, and saves a folder that the next one loads."""
    model = lively_model()
    model.save_pretrained(tmp_path / "round0")
    ids = random_ids(2, 7)
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False)
    data = {"ids": ids, "logits": logits_of(model, ids), "hidden": hidden, "generated": generated}
    save_file(data, tmp_path / "data.safetensors")
    for i in range(3):
        fresh(ROUND, tmp_path / f"round{i}", tmp_path / f"round{i + 1}", tmp_path / "data.safetensors")
        check_folder(tmp_path / f"round{i + 1}")
    code = [{path.name: path.read_bytes() for path in (tmp_path / f"round{i}").glob("*.py")} for i in (0, 3)]
    # Transformers copies what the model imports; the tokenizer's module comes with the tokenizer.
    del code[0]["tokenization_engram.py"]
    # So does the other architecture's code.
    for path in (Path(__file__).parents[2] / "modeling_engram" / "deepseek_v41").glob("[!_]*.py"):
        del code[0][path.name]
    del code[0]["configuration_deepseek_v41.py"]
    assert code[0] == code[1]
    # And the installed package takes what came out of it.
    again = EngramForCausalLM.from_pretrained(tmp_path / "round3").eval()
    assert torch.equal(logits_of(again, ids), data["logits"])


TWO_MODELS = """
first, second, data = arguments
expected = load_file(data)
models = [AutoModelForCausalLM.from_pretrained(folder, **remote).eval() for folder in (first, second, first)]
assert type(models[0]) is not type(models[1])
with torch.no_grad():
    for _ in range(2):
        for name, model in zip(("first", "second", "first"), models):
            assert torch.equal(model(expected["ids"]).logits, expected[name])
"""


def test_two_folders_in_one_process(lively_model, random_ids, fresh, tmp_path):
    """Two different models, each with its own copy of the code, work side by side."""
    one, two = lively_model(), lively_model(seed=1, engram_layer_ids=[1], hc_mult=2, engram_max_ngram_size=2)
    one.save_pretrained(tmp_path / "first")
    two.save_pretrained(tmp_path / "second")
    ids = random_ids(2, 6)
    save_file({"ids": ids, "first": logits_of(one, ids), "second": logits_of(two, ids)}, tmp_path / "data.safetensors")
    fresh(TWO_MODELS, tmp_path / "first", tmp_path / "second", tmp_path / "data.safetensors")


def test_folder_beside_the_package(lively_model, random_ids, tmp_path, remote_modules):
    """With the package installed, `trust_remote_code=True` loads the folder's code, whose classes save again."""
    from transformers import AutoModelForCausalLM

    model = lively_model()
    model.save_pretrained(tmp_path / "one")
    ids = random_ids(2, 6)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", trust_remote_code=True).eval()
    assert torch.equal(logits_of(loaded, ids), logits_of(model, ids))
    loaded.save_pretrained(tmp_path / "two")
    check_folder(tmp_path / "two")
    again = EngramForCausalLM.from_pretrained(tmp_path / "two").eval()
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))


CLASSIFIER = """
source, base, target, data = arguments
expected = load_file(data)
model = AutoModelForSequenceClassification.from_pretrained(source, **remote).eval()
with torch.no_grad():
    assert torch.equal(model(expected["ids"]).logits, expected["logits"])
fresh_head = AutoModelForSequenceClassification.from_pretrained(base, num_labels=4, **remote).eval()
assert fresh_head(expected["ids"]).logits.shape == (2, 4)
model.save_pretrained(target)
AutoModelForSequenceClassification.from_pretrained(target, **remote)
"""


def test_classifier_without_the_package(lively_model, random_ids, fresh, tmp_path):
    """A classifier's folder loads as one, and a language model's folder with a new head."""
    classifier = lively_model(EngramForSequenceClassification, num_labels=3)
    classifier.save_pretrained(tmp_path / "classifier")
    lively_model().save_pretrained(tmp_path / "base")
    ids = random_ids(2, 6)
    save_file({"ids": ids, "logits": logits_of(classifier, ids)}, tmp_path / "data.safetensors")
    paths = (tmp_path / name for name in ("classifier", "base", "target", "data.safetensors"))
    fresh(CLASSIFIER, *paths)


MERGE = """
from peft import LoraConfig, get_peft_model

source, target, data = arguments
expected = load_file(data)
model = AutoModelForCausalLM.from_pretrained(source, **remote).eval()
config = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False, task_type="CAUSAL_LM")
model = get_peft_model(model, config)
with torch.no_grad():
    logits = model.eval()(input_ids=expected["ids"]).logits
    assert not torch.allclose(logits, expected["logits"], atol=1e-3)
    merged = model.merge_and_unload()
    assert (merged(expected["ids"]).logits - logits).abs().max() < 1e-3
    save_file({"logits": merged(expected["ids"]).logits}, target + ".safetensors")
merged.save_pretrained(target)
"""

LOAD = """
source, data, wanted = arguments
model = AutoModelForCausalLM.from_pretrained(source, **remote).eval()
with torch.no_grad():
    assert torch.equal(model(load_file(data)["ids"]).logits, load_file(wanted)["logits"])
"""


def test_merged_adapter_without_the_package(lively_model, random_ids, fresh, tmp_path):
    """LoRA in a process without the package, merged and saved: a complete folder that loads in the next process."""
    model = lively_model()
    model.save_pretrained(tmp_path / "base")
    ids = random_ids(2, 6)
    data = tmp_path / "data.safetensors"
    save_file({"ids": ids, "logits": logits_of(model, ids)}, data)
    fresh(MERGE, tmp_path / "base", tmp_path / "merged", data)
    check_folder(tmp_path / "merged")
    fresh(LOAD, tmp_path / "merged", data, tmp_path / "merged.safetensors")


def test_merged_adapter_with_the_package(lively_model, random_ids, fresh, tmp_path):
    """The same, merged where the package is installed."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "wkv"], r=2, init_lora_weights=False, task_type="CAUSAL_LM")
    merged = get_peft_model(lively_model(), config).merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    check_folder(tmp_path / "merged")
    ids = random_ids(2, 6)
    save_file({"ids": ids}, tmp_path / "data.safetensors")
    save_file({"logits": logits_of(merged, ids)}, tmp_path / "merged.safetensors")
    fresh(LOAD, tmp_path / "merged", tmp_path / "data.safetensors", tmp_path / "merged.safetensors")


class FakeHub:
    """Takes the place of the Hub's client: keeps what would be uploaded."""

    def __init__(self):
        self.files = {}

    def create_repo(self, repo_id, **kwargs):
        return type("RepoUrl", (), {"repo_id": repo_id})()

    def create_commit(self, *args, operations, **kwargs):
        for operation in operations:
            self.files[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()


@pytest.mark.parametrize("through", ["push_to_hub", "save_pretrained"])
def test_push_to_hub(lively_model, tmp_path, monkeypatch, through):
    """What would be uploaded is a complete folder: code, weights, config, and our model card."""
    import transformers.modeling_utils
    import transformers.utils.hub
    from huggingface_hub.errors import EntryNotFoundError

    hub = FakeHub()

    def no_card_yet(*args, **kwargs):
        raise EntryNotFoundError("no README.md in this repository")

    monkeypatch.setattr(transformers.utils.hub, "hf_api", lambda: hub)
    monkeypatch.setattr(transformers.modeling_utils, "hf_api", lambda: hub)
    monkeypatch.setattr(transformers.utils.hub.ModelCard, "load", no_card_yet)
    model = lively_model()
    if through == "push_to_hub":
        model.push_to_hub("someone/some-model")
    else:
        model.save_pretrained(tmp_path / "some-model", push_to_hub=True, repo_id="someone/some-model")
    for path in export_code(tmp_path / "code"):
        assert hub.files[path.name] == path.read_bytes()
    assert {"config.json", "model.safetensors", "README.md"} <= set(hub.files)
    card = hub.files["README.md"].decode()
    assert "Engram conditional memory" in card
    assert "- engram" in card
    assert "someone/some-model" in card


def test_weights_file_is_self_contained(lively_model, tmp_path):
    """The weights file holds the hash's constants as integers, and the stream's parameters in fp32."""
    lively_model(dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.engram_hasher.token_map"].dtype == torch.int32
    assert tensors["model.engram_hasher.multipliers"].dtype == torch.int64
    assert tensors["model.layers.0.attn_hc.fn"].dtype == torch.float32
    assert tensors["model.engram_memory.tables.0.weight"].dtype == torch.bfloat16


PIPELINE = """
folder, data = arguments
tokenizer = AutoTokenizer.from_pretrained(folder, **remote)
assert type(tokenizer).__name__ == "EngramTokenizer"
model = AutoModelForCausalLM.from_pretrained(folder, **remote).eval()
expected = load_file(data)
encoded = tokenizer(["the cat sat", "a dog"], padding=True, return_tensors="pt")
assert torch.equal(encoded["hash_ids"], expected["hash_ids"])
with torch.no_grad():
    assert torch.equal(model(**encoded).logits, expected["logits"])
generator = pipeline("text-generation", model=folder, **remote)
assert type(generator.model).__module__.startswith("transformers_modules.")
(output,) = generator("the cat sat", max_new_tokens=6, do_sample=False, return_tensors=True)
assert output["generated_token_ids"] == expected["generated"].tolist()
assert generator(["the cat sat", "a dog"], max_new_tokens=3, batch_size=2)[1][0]["generated_text"].startswith("a dog")
"""


def test_tokenizer_and_pipeline_without_the_package(lively_model, fresh, tmp_path):
    """Model and tokenizer in one folder: Auto classes and the text-generation pipeline."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from hf_engram.tokenization.tokenization_engram import EngramTokenizer

    words = ["<pad>", "<unk>", *"the cat sat on a mat dog The Cat".split()]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", padding_side="left"
    )
    tokenizer = EngramTokenizer.from_tokenizer(
        plain, engram_layer_ids=[0, 2], engram_vocab_size=60, engram_max_ngram_size=4, engram_n_heads=2
    )
    model = lively_model(**{**tokenizer.engram_fields(), "vocab_size": len(tokenizer)}).bind_tokenizer(tokenizer)
    model.save_pretrained(tmp_path / "both")
    tokenizer.save_pretrained(tmp_path / "both")
    encoded = tokenizer(["the cat sat", "a dog"], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**encoded).logits
    prompt = tokenizer("the cat sat", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=6, do_sample=False)[0]
    save_file(
        {"hash_ids": encoded["hash_ids"], "logits": logits, "generated": generated}, tmp_path / "data.safetensors"
    )
    fresh(PIPELINE, tmp_path / "both", tmp_path / "data.safetensors")
