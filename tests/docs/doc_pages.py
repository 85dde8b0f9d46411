"""What the tests of this folder share: which pages there are, and what is in them."""

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType


REPOSITORY = Path(__file__).resolve().parents[2]


def blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pages(with_reference: bool = False) -> list[str]:
    """README, CONTRIBUTING and all pages of docs/, by their path in the repository."""
    found = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    names = [path.relative_to(REPOSITORY).as_posix() for path in found]
    return [name for name in names if with_reference or not name.startswith("docs/reference/")]


def read(page: str) -> str:
    return (REPOSITORY / page).read_text(encoding="utf-8")


def load_script(path: str) -> ModuleType:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, REPOSITORY / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module
