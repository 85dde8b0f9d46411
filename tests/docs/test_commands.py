"""The commands on every page: programs, files, options and make targets that are named exist."""

import argparse
import re
import runpy
import shlex
import sys
from functools import lru_cache

import pytest
from doc_pages import REPOSITORY, blocks, pages, read


# Programs that are not the project's, of which no more is known here than that they are meant.
OTHERS = {"source", "hf", "apt", "git"}
INLINE = re.compile(r"`((?:(?:python|make|pip|pytest|torchrun) |scripts/\w+\.py)[^`]*)`")


def commands(page: str) -> list[list[str]]:
    """The commands in bash blocks and in running text, as lists of words."""
    text = read(page)
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines += [" ".join(found.split()) for found in INLINE.findall(prose)]
    found = []
    for line in lines:
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


@lru_cache
def options(script: str) -> frozenset[str]:
    """The options of a script, from its own parser."""
    known = []

    def take(parser, *args, **kwargs):
        known.extend(option for action in parser._actions for option in action.option_strings)
        raise SystemExit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", take)
        patch.setattr(argparse.ArgumentParser, "parse_intermixed_args", take)
        patch.setattr(sys, "argv", [script])
        # What a script sets on import is for itself.
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        with pytest.raises(SystemExit):
            runpy.run_path(str(REPOSITORY / script), run_name="__main__")
    return frozenset(known)


def check_script(words: list[str]) -> None:
    script, *arguments = words
    assert (REPOSITORY / script).is_file(), f"{script} does not exist"
    used = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if used:
        assert used <= options(script), f"{script} has no {sorted(used - options(script))}"


def check(words: list[str]) -> None:
    program, *arguments = words
    if program == "python" and arguments[0] == "-m":
        assert arguments[1] in {"build", "pytest"}, f"python -m {arguments[1]} is not known here"
    elif program == "python":
        check_script([word for word in arguments if word != "-P"])
    elif program.startswith("scripts/"):
        check_script(words)
    elif program == "torchrun":
        first = next(index for index, word in enumerate(arguments) if word.endswith(".py"))
        check_script([word for word in arguments[first:] if word != "..."])
    elif program == "make":
        targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
        named = {word for word in arguments if "=" not in word}
        assert named <= targets, f"the Makefile has no {sorted(named - targets)}"
    elif program in ("pip", ".venv/bin/pip"):
        extras = re.findall(r"^([a-z-]+) = \[", read("pyproject.toml"), re.MULTILINE)
        assert all(extra in extras for word in arguments for extra in re.findall(r"^\.\[(.*)\]$", word))
    elif program == "pytest":
        paths = [word for word in arguments if "/" in word]
        assert paths and all((REPOSITORY / path).exists() for path in paths), f"{paths} do not exist"
    else:
        assert program in OTHERS, f"{program!r} is not a program that is known here"


@pytest.mark.parametrize("page", [page for page in pages() if commands(page)])
def test_page(page):
    for words in commands(page):
        try:
            check(words)
        except AssertionError as error:
            raise AssertionError(f"{page}: {shlex.join(words)}: {error}") from None


@pytest.mark.parametrize(
    "line, message",
    [
        ("python scripts/no_such.py a", "does not exist"),
        ("python scripts/generate.py m --no-such 3", "has no"),
        ("make no-such", "has no"),
        ("no-such a", "not a program"),
    ],
)
def test_what_is_wrong_is_found(line, message):
    with pytest.raises(AssertionError, match=message):
        check(shlex.split(line))
