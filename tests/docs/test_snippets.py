"""The Python on every page runs, top to bottom, as a reader would type it, in an empty folder, offline."""

import pytest
from doc_pages import blocks, pages, read


# Pages whose snippets need what is not here; each is run by the test file that has it.
ELSEWHERE = {
    "docs/compatibility.md": "tests/clients/test_lm_eval.py",
    "docs/how-to/deepseek-v41.md": "tests/convert/test_deepseek_v41.py",
}
PAGES = [page for page in pages() if blocks(read(page), "python") and page not in ELSEWHERE]
# A page with a link to here goes on from it.
CREATE = "README.md#create)"


def run(page: str, snippets: list[str], namespace: dict) -> None:
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), namespace)


@pytest.mark.parametrize("page", PAGES)
def test_page(page, tmp_path, monkeypatch, remote_modules):
    """One namespace a page, which begins with the README's tokenizer and model where the page says so."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    namespace: dict = {}
    text = read(page)
    if page != "README.md" and CREATE in text:
        readme = read("README.md")
        start = readme.index("## Create\n")
        run("README.md", blocks(readme[start : readme.index("\n## ", start)], "python"), namespace)
        assert {"plain_tokenizer", "tokenizer", "model"} <= namespace.keys()
    run(page, blocks(text, "python"), namespace)
    if page == "README.md":
        assert len(namespace["output_ids"]) == 2
        assert type(namespace["model"]).__name__ == "EngramForCausalLM"


@pytest.mark.parametrize("page", ELSEWHERE)
def test_elsewhere(page):
    """A page that is run elsewhere is: the test file there reads it."""
    name = page.rpartition("/")[2]
    assert blocks(read(page), "python") and f'"{name}"' in read(ELSEWHERE[page])


def test_readme_and_every_how_to():
    """No page is lost from what is run."""
    how_to = [page for page in pages() if page.startswith("docs/how-to/")]
    assert len(how_to) >= 9 and {"README.md", "docs/concepts.md", *how_to} <= {*PAGES, *ELSEWHERE}
