"""A saved folder is complete: it loads with `trust_remote_code=True` where this package is not installed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from hf_engram import EngramTokenizer


# What runs in the other process, which has Transformers but not hf_engram.
LOAD_AND_SAVE = """
import json, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_engram":
            raise ModuleNotFoundError("hf_engram is not there")

sys.meta_path.insert(0, Absent())
from transformers import AutoTokenizer

folders, texts = json.loads(sys.stdin.read())
results = []
for source, target in zip(folders, folders[1:]):
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
    assert type(tokenizer).__module__.startswith("transformers_modules."), type(tokenizer)
    tokenizer.save_pretrained(target)
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    results.append({"hash_ids": batch["hash_ids"].tolist(), "fields": tokenizer.engram_fields()})
sys.stdout.write(json.dumps(results))
"""


def load_and_save(folders: list[Path], texts: list[str], home: Path) -> list[dict]:
    """Loads from each folder and saves into the next, in a process of its own; returns what each tokenizer gave."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "HF_MODULES_CACHE": str(home / "modules")}
    result = subprocess.run(
        [sys.executable, "-I", "-c", LOAD_AND_SAVE],
        input=json.dumps([[str(folder) for folder in folders], texts]),
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_three_rounds_without_the_package(small, texts, tmp_path):
    folders = [tmp_path / str(i) for i in range(4)]
    small.save_pretrained(folders[0])
    expected = {
        "hash_ids": small(texts, padding=True, return_tensors="pt")["hash_ids"].tolist(),
        "fields": small.engram_fields(),
    }
    assert load_and_save(folders[:3], texts, tmp_path) == [expected] * 2
    assert load_and_save(folders[2:], texts, tmp_path) == [expected]
    # Transformers copies the modules that the tokenizer needs; the model's come with the model.
    needed = {path.name for path in folders[0].iterdir() if path.suffix != ".py"}
    needed |= {"tokenization_engram.py", "token_map.py", "ngram_hashing.py", "remote_code.py"}
    for folder in folders[1:]:
        assert needed <= {path.name for path in folder.iterdir()}
        assert str(tmp_path) not in (folder / "tokenizer_config.json").read_text(encoding="utf-8")


def test_loads_by_its_hub_name(small, texts, tmp_path, monkeypatch):
    """From the Hub's cache, as after a download."""
    commit = "0" * 40
    repository = tmp_path / "models--someone--something"
    small.save_pretrained(tmp_path / "saved")
    shutil.copytree(tmp_path / "saved", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("hf_engram.tokenization.tokenization_engram.build_token_map", None)
    loaded = EngramTokenizer.from_pretrained("someone/something", cache_dir=tmp_path, local_files_only=True)
    assert loaded.engram_fields() == small.engram_fields()
    assert loaded(texts)["hash_ids"] == small(texts)["hash_ids"]
    loaded.save_pretrained(tmp_path / "again")
    assert str(tmp_path) not in (tmp_path / "again" / "tokenizer_config.json").read_text(encoding="utf-8")
