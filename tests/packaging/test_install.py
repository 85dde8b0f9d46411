"""The package as a user gets it: built into a wheel, installed into a virtual environment, imported from there."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
PACKAGE_DIR: dict[str, str] = SETUPTOOLS["package-dir"]
SOURCE_FOLDERS = ("hf_engram", "configuration", "tokenization", "modeling_engram")

# Runs in the clean environment. `sys.argv[1:]` names the modules to hide: each path finder answers as it does for a
# package that was never installed, so that `import triton` and `importlib.util.find_spec("triton")` both find nothing.
IMPORT_EVERYTHING = """
import importlib, importlib.util, pkgutil, sys

hidden = set(sys.argv[1:])

class WithoutHidden:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [WithoutHidden(finder) for finder in sys.meta_path]
assert not any(importlib.util.find_spec(name) for name in hidden)

import hf_engram
from hf_engram import EngramConfig, EngramForCausalLM, EngramModel, EngramTokenizer

for module in pkgutil.walk_packages(hf_engram.__path__, "hf_engram."):
    importlib.import_module(module.name)
assert not hidden & set(sys.modules)
for name, module in sorted(sys.modules.items()):
    if name.partition(".")[0] == "hf_engram":
        print(name, module.__file__, sep="\\t")
"""


def python_files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*.py") if "__pycache__" not in path.parts}


def run(*command: object, cwd: Path) -> str:
    """Runs a command and returns its standard output; its error output becomes the failure's message."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources: setuptools would leave a build folder in the checkout, and would
    pack files out of it that are long gone."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in SOURCE_FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = ("wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", target, source)
    run(sys.executable, "-m", "pip", *build, cwd=target)
    (path,) = target.glob("hf_engram-*.whl")
    return path


@pytest.fixture(scope="module")
def clean_python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a new environment that holds the wheel and sees this environment's other packages.

    A folder named in a .pth file joins `sys.path`, but .pth files inside it are not read: that leaves out the editable
    install of this checkout, which works through one.
    """
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")
    install = ("--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel)
    run(sys.executable, "-m", "pip", *install, cwd=environment)
    print_folder = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", print_folder, cwd=environment).strip())
    dependencies = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (site_packages / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")
    return python


def test_every_source_folder_is_a_package():
    with_code = {
        path.parent.relative_to(ROOT).as_posix() for name in SOURCE_FOLDERS for path in python_files(ROOT / name)
    }
    assert set(PACKAGE_DIR.values()) == with_code
    assert set(PACKAGE_DIR) == set(SETUPTOOLS["packages"])


def test_packages_are_named_after_their_folders():
    """Relative imports mean the same on the disk and in the package."""
    for package, folder in PACKAGE_DIR.items():
        name = folder.replace("/", ".")
        assert package == name if folder.startswith("hf_engram") else package == f"hf_engram.{name}"


def test_wheel_holds_every_module_and_the_page(wheel):
    expected = {
        f"{package.replace('.', '/')}/{path.name}"
        for package, folder in PACKAGE_DIR.items()
        for path in (ROOT / folder).glob("*.py")
    }
    # The parts of inspect's page.
    expected |= {f"hf_engram/inspect/page.{suffix}" for suffix in ("css", "html", "js")}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"hf_engram"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_wheel_imports_without_optional_dependencies(clean_python, tmp_path):
    optional = ("triton", "peft", "datasets", "matplotlib")
    lines = run(clean_python, "-c", IMPORT_EVERYTHING, *optional, cwd=tmp_path).splitlines()
    loaded = dict(line.split("\t") for line in lines if line.startswith("hf_engram"))
    assert {"hf_engram", *PACKAGE_DIR} <= set(loaded)
    environment = clean_python.parents[1].resolve()
    elsewhere = {name: path for name, path in loaded.items() if environment not in Path(path).resolve().parents}
    assert not elsewhere
