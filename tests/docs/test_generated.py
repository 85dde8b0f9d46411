"""What scripts have written into docs/ is what they write now; links lead somewhere."""

import importlib
import re

import pytest
from doc_pages import REPOSITORY, load_script, pages, read


def files(folder, pattern: str) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob(pattern)}


@pytest.fixture(scope="module")
def reference():
    return load_script("docs/reference.py")


def test_reference(reference, tmp_path):
    reference.write_all(tmp_path)
    committed, written = files(REPOSITORY / "docs" / "reference", "*.md"), files(tmp_path, "*.md")
    differing = sorted(name for name in committed.keys() | written.keys() if committed.get(name) != written.get(name))
    assert not differing, f"docs/reference/{differing} are not of these docstrings: run `python docs/reference.py`"


@pytest.mark.parametrize("module", ["hf_engram", "hf_engram.inspect", "hf_engram.deepseek_v41"])
def test_reference_has_every_public_name(reference, module):
    documented = {name for page in reference.PAGES for names in page.sources.values() for name in names}
    assert set(importlib.import_module(module).__all__) <= documented


def test_reference_has_every_field(reference):
    """Every field of the config is described, as is every argument with a docstring that lists some."""
    from hf_engram import EngramConfig

    text = reference.Writer().page(reference.PAGES[0])
    fields = EngramConfig.__annotations__.keys() - {"model_type", "keys_to_ignore_at_inference"}
    assert "hc_mult" in fields and all(f"**`{name}`**" in text for name in fields)


def test_sections_become_lists(reference):
    text = reference.Writer().text(
        """Makes it.

        Args:
            first, second (`int`, *optional*): of [`EngramConfig`],
                and more.
            rest: anything: all.

        Raises:
            ValueError: no.
        """
    )
    assert (
        "- **`first`**, **`second`** (`int`, *optional*): of [`EngramConfig`](config.md#engramconfig), and more."
        in text
    )
    assert "- **`rest`**: anything: all." in text and "**Raises**\n\n- ValueError: no." in text


def test_figures(tmp_path):
    load_script("docs/figures.py").draw_all(tmp_path)
    committed, drawn = files(REPOSITORY / "docs" / "images", "*.svg"), files(tmp_path, "*.svg")
    differing = sorted(name for name in committed.keys() | drawn.keys() if committed.get(name) != drawn.get(name))
    assert not differing, f"docs/images/{differing} are not what is drawn now: run `python docs/figures.py`"
    for name in drawn:
        assert f"images/{name})" in read("docs/concepts.md")


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", pages(with_reference=True))
def test_links(page):
    """Links to files and headings of the repository."""
    prose = re.sub(r"^```.*?^```", "", read(page), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (REPOSITORY / page).parent / path if path else REPOSITORY / page
        assert file.exists(), f"{page} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), f"{page} links to {target}: no such heading"


def test_every_page_is_linked():
    """From the index or from the reference's."""
    for index, folder in (("docs/README.md", "docs/"), ("docs/reference/README.md", "docs/reference/")):
        linked = set(re.findall(r"\]\(([^)#\s]+)", read(index)))
        own = [page.removeprefix(folder) for page in pages(with_reference=True) if page.startswith(folder)]
        missing = [page for page in own if page not in linked and page != "README.md"]
        missing = [page for page in missing if not (folder == "docs/" and page.startswith("reference/"))]
        assert not missing, f"{index} does not link {missing}"
