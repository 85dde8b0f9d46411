"""The lock: the releases that the tests were run with, as constraints for pip.

    python .ci/lock.py write                 those of this environment (`make lock`)
    python .ci/lock.py read FILE [NAME ...]  those of FILE that hold in this environment, without the named packages

A constraint installs nothing: it says which release is taken where a package is wanted. Builds of PyTorch for GPUs
pin a Triton of their own; beside one of those, no other is held.
"""

import re
import sys
from importlib.metadata import PackageNotFoundError, distribution, requires
from pathlib import Path


HEADER = """\
# The releases that the tests were run with, on Python {}.{} and {}. Made by `make lock`; see CONTRIBUTING.md.
# Pythons that all of them support: {}
"""
OURS = "hf-engram"
# Those that PyTorch and NumPy are built for; a newer one takes the newest of everything.
PYTHONS = [f"3.{minor}" for minor in range(10, 15)]


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted(requirement: str) -> list[str]:
    """The packages that a requirement brings into this environment, by name."""
    from packaging.requirements import Requirement

    seen, pending = set(), [Requirement(requirement)]
    while pending:
        one = pending.pop()
        for extra in {"", *one.extras}:
            key = (normalized(one.name), extra)
            if key not in seen:
                seen.add(key)
                needs = map(Requirement, requires(one.name) or ())
                pending += [need for need in needs if not need.marker or need.marker.evaluate({"extra": extra})]
    return sorted({name for name, _ in seen})


def write() -> str:
    from packaging.specifiers import SpecifierSet

    # NVIDIA's libraries are PyTorch's own affair: each of its releases pins its own.
    names = [name for name in wanted(f"{OURS}[dev]") if name != OURS and not name.startswith(("nvidia-", "cuda-"))]
    supported = [SpecifierSet(distribution(name).metadata["Requires-Python"] or "") for name in names]
    pythons = [python for python in PYTHONS if all(f"{python}.99" in each for each in supported)]
    # "2.13.0+cpu" is the build of this machine; the release is 2.13.0.
    lines = [f"{name}=={distribution(name).version.partition('+')[0]}\n" for name in names]
    return HEADER.format(*sys.version_info[:2], sys.platform, " ".join(pythons)) + "".join(lines)


def pins_triton() -> bool:
    """Whether the installed PyTorch brings a Triton, under whichever name."""
    try:
        needs = requires("torch") or ()
    except PackageNotFoundError:
        return False
    return any("triton" in re.match(r"[\w.-]+", need)[0] for need in needs if "extra" not in need)


def read(file: Path, *without: str) -> str:
    text = file.read_text(encoding="utf-8")
    pythons = re.search(r"^# Pythons .*: (.+)$", text, re.MULTILINE)[1].split()
    python = "{}.{}".format(*sys.version_info)
    if python not in pythons:
        print(f"{file} is for Python {pythons[0]} to {pythons[-1]}: with {python}, the newest.", file=sys.stderr)
        return ""
    free = {normalized(name) for name in without} | ({"triton"} if pins_triton() else set())
    return "".join(line for line in text.splitlines(keepends=True) if line.partition("==")[0] not in free)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    sys.stdout.write(write() if command == "write" else read(Path(arguments[0]), *arguments[1:]))
