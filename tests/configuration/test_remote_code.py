"""The export of the code into a Hub folder: flat, complete, and importable by Transformers' loader."""

import ast
import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from hf_engram.configuration import remote_code
from hf_engram.configuration.remote_code import FOLDERS, MODEL_AUTO_MAP, TOKENIZER_AUTO_MAP, export_code


ROOT = Path(remote_code.__file__).resolve().parents[1]
# As in transformers.dynamic_module_utils.get_relative_imports: also matches inside docstrings and try blocks.
TRANSFORMERS_RELATIVE_IMPORTS = re.compile(r"^\s*from\s+\.(\S+)\s+import", re.MULTILINE)


def source_modules() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("export") / "made" / "on the way"
    export_code(target)
    return target


def test_export_is_flat_and_complete(folder):
    """Every module of the three folders is there under its own name, and nothing else."""
    assert all(path.is_file() for path in folder.iterdir())
    assert {path.name for path in folder.iterdir()} == {path.name for path in source_modules()}


def test_source_names_are_unique():
    """No two modules share a name, since a flat folder holds each name once."""
    assert [name for name, count in Counter(path.name for path in source_modules()).items() if count > 1] == []


def test_export_returns_what_it_wrote(tmp_path):
    """The list of written files is the folder's content; writing twice is the same as once."""
    written = export_code(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {path.name for path in written} == set(before)
    export_code(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_relative_imports_resolve_inside_the_folder(folder):
    """Every relative import has one dot, one name, and a file of that name beside it."""
    seen = 0
    for path in folder.iterdir():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                seen += 1
                assert node.level == 1, f"{path.name}:{node.lineno}"
                assert node.module and "." not in node.module, f"{path.name}:{node.lineno}"
                assert (folder / f"{node.module}.py").is_file(), f"{path.name}:{node.lineno} {node.module}"
    assert seen > 10


def test_what_transformers_reads_as_imports_is_in_the_folder(folder):
    """Transformers finds imports by a regular expression; what it finds in docstrings must exist, too."""
    for path in folder.iterdir():
        for name in TRANSFORMERS_RELATIVE_IMPORTS.findall(path.read_text(encoding="utf-8")):
            assert (folder / f"{name}.py").is_file(), f"{path.name}: {name}"


def test_no_import_of_the_package(folder):
    """The exported code never imports the installed package."""
    for path in folder.iterdir():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "hf_engram" for name in names), path.name


def test_only_imports_change(folder):
    """Apart from relative import lines, the code is the source to the byte."""
    sources = {path.name: path.read_text(encoding="utf-8").splitlines() for path in source_modules()}
    for path in folder.iterdir():
        exported = path.read_text(encoding="utf-8").splitlines()
        assert len(exported) == len(sources[path.name])
        for old, new in zip(sources[path.name], exported, strict=True):
            assert old == new or (old.lstrip().startswith("from .") and new.lstrip().startswith("from ."))


def test_auto_map_names_classes_of_the_folder(folder):
    """Every auto_map entry has one dot and names a class of the exported module."""
    entries = [*MODEL_AUTO_MAP.values(), *(e for pair in TOKENIZER_AUTO_MAP.values() for e in pair if e)]
    for entry in entries:
        module, name = entry.split(".")
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        assert any(isinstance(node, ast.ClassDef) and node.name == name for node in tree.body), entry


def test_export_from_a_flat_copy_raises(folder, tmp_path):
    """Code that runs from a checkpoint folder must not export itself: Transformers copies it."""
    name = "flat_copy_of_code"
    spec = importlib.util.spec_from_loader(name, None, is_package=True)
    package = importlib.util.module_from_spec(spec)
    package.__path__ = [str(folder)]
    before = set(sys.modules)
    sys.modules[name] = package
    try:
        flat = importlib.import_module(f"{name}.remote_code")
        assert not flat.is_installed_package()
        with pytest.raises(RuntimeError, match="installed package"):
            flat.export_code(tmp_path / "target")
    finally:
        for loaded in set(sys.modules) - before:
            del sys.modules[loaded]
    assert not (tmp_path / "target").exists()


def test_modules_that_share_a_name_are_refused(tmp_path, monkeypatch):
    """Two modules of one name in different folders raise before anything is written."""
    root = tmp_path / "source"
    for folder in FOLDERS:
        (root / folder).mkdir(parents=True)
        (root / folder / "__init__.py").touch()
        (root / folder / f"{folder}_only.py").touch()
    (root / FOLDERS[0] / "shared_name.py").touch()
    (root / FOLDERS[2] / "shared_name.py").touch()
    monkeypatch.setattr(remote_code, "__file__", str(root / "configuration" / "remote_code.py"))
    with pytest.raises(RuntimeError, match=r"shared_name\.py"):
        export_code(tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(
    ("line", "flat"),
    [
        ("from ..tokenization.ngram_hashing import build_layout", "from .ngram_hashing import build_layout"),
        ("from .ops.engram_gate import engram_gate", "from .engram_gate import engram_gate"),
        ("from ..ops.backend import (", "from .backend import ("),
        ("    from ..configuration.remote_code import a  # b", "    from .remote_code import a  # b"),
        ("from .engram_layer import EngramLayer", "from .engram_layer import EngramLayer"),
        ("from transformers.utils import logging", "from transformers.utils import logging"),
        ("import torch", "import torch"),
    ],
)
def test_rewriting(line, flat, tmp_path, monkeypatch):
    """The one rule of the export: relative imports lose their folders, all else stays."""
    root = tmp_path / "source"
    (root / "configuration").mkdir(parents=True)
    (root / "configuration" / "module.py").write_text(line + "\n")
    monkeypatch.setattr(remote_code, "__file__", str(root / "configuration" / "remote_code.py"))
    export_code(tmp_path / "target")
    assert (tmp_path / "target" / "module.py").read_text() == flat + "\n"
