"""The README's Python snippets run, top to bottom, as a reader would type them."""

import re
from pathlib import Path


README = Path(__file__).parent.parent / "README.md"


def test_snippets_run(tmp_path, monkeypatch, remote_modules):
    """A reader who pastes the snippets one after the other gets through to generated text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    snippets = re.findall(r"^```python\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(snippets) >= 6
    namespace: dict = {}
    for number, snippet in enumerate(snippets):
        exec(compile(snippet, f"README.md, snippet {number}", "exec"), namespace)
    assert len(namespace["output_ids"]) == 2
    assert type(namespace["model"]).__name__ == "EngramForCausalLM"
