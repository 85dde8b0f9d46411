"""Copies this package's modules, flat, into a checkpoint folder, so that it loads with `trust_remote_code=True`.

Transformers' loader wants a folder without sub-folders and one dot at most in every relative import. The package's
own imports obey `from ..folder.module import name`, so rewriting the dotted part is all the export has to do.
"""

import os
import re
from pathlib import Path

from .folder_update import FolderUpdate, is_staged


MODEL_AUTO_MAP = {
    "AutoConfig": "configuration_engram.EngramConfig",
    "AutoModel": "modeling_engram.EngramModel",
    "AutoModelForCausalLM": "modeling_engram.EngramForCausalLM",
    "AutoModelForSequenceClassification": "modeling_engram.EngramForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_engram.EngramForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_engram.EngramForQuestionAnswering",
}
# Transformers expects a (slow, fast) pair for tokenizers.
TOKENIZER_AUTO_MAP = {"AutoTokenizer": (None, "tokenization_engram.EngramTokenizer")}

FOLDERS = ("configuration", "tokenization", "modeling_engram")
_NESTED_IMPORT = re.compile(r"^(\s*from\s+)\.+(?:\w+\.)*(\w+)(\s+import\b)", re.MULTILINE)


def is_installed_package() -> bool:
    """Whether this code runs from the package (a folder of its own), not from a flat copy in a checkpoint folder."""
    return __package__.rpartition(".")[2] == "configuration"


def export_code(save_directory: str | os.PathLike) -> list[Path]:
    """Writes every module of the three folders flat into `save_directory` (made if missing); as one, see
    [`FolderUpdate`]. Files that are there already are left alone.

    Returns:
        `list[Path]`: the modules' files.

    Raises:
        RuntimeError: called from a flat copy, or two modules share a file name.
    """
    if not is_installed_package():
        raise RuntimeError(
            "Code can be exported only from the installed package; a checkpoint's copy is copied as is."
        )
    root = Path(__file__).resolve().parent.parent
    sources: dict[str, Path] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            if path.name == "__init__.py":
                continue
            if path.name in sources:
                raise RuntimeError(f"{path} and {sources[path.name]} share a name: a flat folder needs unique names.")
            sources[path.name] = path
    if is_staged(save_directory):
        _write_flat(sources, Path(save_directory))
    else:
        with FolderUpdate(save_directory) as update:
            _write_flat(sources, update.folder)
    return [Path(save_directory) / name for name in sources]


def _write_flat(sources: dict[str, Path], folder: Path) -> None:
    for name, path in sources.items():
        text = _NESTED_IMPORT.sub(r"\1.\2\3", path.read_text(encoding="utf-8"))
        (folder / name).write_text(text, encoding="utf-8")
