"""Fetches Transformers' own tests: those in the source distribution of the installed version.

    python tests/upstream/fetch.py

downloads it with pip, once per version, and unpacks its tests as the package `transformers_tests` into
`.cache/upstream/<version>/`. Their imports of each other are relative, so the package may have any name; this one does
not clash with a `tests` folder.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import transformers


CACHE = Path(__file__).resolve().parents[2] / ".cache" / "upstream"
PACKAGE = "transformers_tests"

# The source distribution lacks the sub-folders that its tests import from. What stands in for them:
STAND_INS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin:\n    pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin:\n    pass\n",
    "utils/__init__.py": "",
    # Fields that every config takes, with values that are not their defaults.
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "dtype": "float16",
    "chunk_size_feed_forward": 5,
    "architectures": ["SomeModel"],
    "id2label": {0: "label"},
    "label2id": {"label": 0},
    "problem_type": "regression",
    "name_or_path": "some/model",
}
""",
}


def folder() -> Path:
    """The folder that holds (or will hold) the package, for the installed Transformers."""
    return CACHE / transformers.__version__


def fetch() -> Path:
    """Downloads and unpacks, unless that is done. Returns `folder()`."""
    target = folder()
    if (target / PACKAGE).is_dir():
        return target
    requirement = f"transformers=={transformers.__version__}"
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as scratch:
        # pip reads a source distribution's metadata by running its set-up, for which setuptools must be installed.
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", "transformers", "--no-build-isolation", "--dest", scratch, requirement]
        subprocess.run(command, check=True)
        (archive,) = Path(scratch).glob("transformers-*.tar.gz")
        package = Path(scratch) / PACKAGE
        package.mkdir()
        with tarfile.open(archive) as tar:
            for member in tar:
                path = Path(member.name)
                if member.isfile() and path.match("transformers-*/tests/*.py"):
                    (package / path.name).write_bytes(tar.extractfile(member).read())
        for name, text in STAND_INS.items():
            path = package / name
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_text(text, encoding="utf-8")
        package.rename(target / PACKAGE)
    return target


if __name__ == "__main__":
    print(fetch())
