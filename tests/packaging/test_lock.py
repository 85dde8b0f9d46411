"""The lock (constraints.txt): whole, up to date with pyproject.toml, and beside a PyTorch that pins its own Triton."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "constraints.txt"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
RELEASES = dict(re.findall(r"^([^#=]+)==(.+)$", LOCK.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture
def lock(monkeypatch):
    """The script, run by a Python that the lock is for."""
    spec = importlib.util.spec_from_file_location("lock", ROOT / ".ci" / "lock.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0, "final", 0))
    return module


def test_names_and_releases_only():
    """No path, address or build of one machine."""
    lines = LOCK.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("# The releases that the tests were run with")
    assert list(RELEASES) == sorted(RELEASES) and len(RELEASES) == len(lines) - 2 > 50
    for line in lines[2:]:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==\d+(\.\w+)*", line), line
    assert not any(name.startswith(("nvidia", "cuda", "hf-engram")) for name in RELEASES)


def test_it_holds_what_the_project_asks_for(lock):
    """All of `dependencies` and of the extras that `dev` is made of, in releases that pyproject.toml admits."""
    extras = PROJECT["optional-dependencies"]
    needs, pending = list(PROJECT["dependencies"]), ["dev"]
    for extra in pending:
        needs += extras[extra]
        pending += [
            more for line in extras[extra] if line.startswith("hf-engram") for more in Requirement(line).extras
        ]
    assert pending[0] == "dev" and {"test", "train", "demo", "lora"} <= set(pending)
    for need in map(Requirement, needs):
        if need.name != "hf-engram" and need.name != "tomli":  # tomli is for Python 3.10
            assert Version(RELEASES[lock.normalized(need.name)]) in need.specifier, need


@pytest.mark.parametrize(
    ("needs", "held"),
    [
        (None, True),  # not installed
        (["filelock", "sympy>=1.13.3"], True),
        (["filelock", 'triton==3.7.1; platform_system == "Linux"'], False),
        (["pytorch-triton-rocm==3.7.1"], False),
        (["filelock", 'triton>=3; extra == "all"'], True),
    ],
)
def test_triton_is_pytorchs_own(lock, monkeypatch, needs, held):
    def requires(name):
        assert name == "torch"
        if needs is None:
            raise lock.PackageNotFoundError(name)
        return needs

    monkeypatch.setattr(lock, "requires", requires)
    lines = lock.read(LOCK).splitlines()
    assert (f"triton=={RELEASES['triton']}" in lines) == held
    assert f"numpy=={RELEASES['numpy']}" in lines


def test_what_is_asked_for_in_another_release_is_not_held(lock):
    names = {line.partition("==")[0] for line in lock.read(LOCK, "transformers", "Huggingface_Hub").splitlines()}
    assert names & {"transformers", "huggingface-hub", "tokenizers"} == {"tokenizers"}


def test_other_pythons_take_the_newest(lock, monkeypatch, capsys):
    monkeypatch.setattr(sys, "version_info", (3, 16, 0, "final", 0))
    assert lock.read(LOCK) == ""
    assert "is for Python 3.11 to 3.14: with 3.16, the newest" in capsys.readouterr().err


def test_written_from_what_is_installed(lock, monkeypatch):
    """What `dev` brings and no more: each release once, without the build's label."""
    monkeypatch.undo()
    lines = lock.write().splitlines()
    names = [line.partition("==")[0] for line in lines[2:]]
    assert names == sorted(set(names)) and {"torch", "transformers", "ruff", "jinja2"} <= set(names)
    assert "+" not in "".join(lines) and "hf-engram" not in names
