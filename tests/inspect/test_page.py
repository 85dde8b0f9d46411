"""The page without a browser: one file that loads nothing, whose data are the trace's, whatever the text holds."""

import base64
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from hf_engram.inspect import ablate, trace_memory, write_page
from hf_engram.inspect.page import packed


class Page(HTMLParser):
    """Tags with their attributes, and the text in `<script>` and `<title>` elements."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags, self.texts, self.open = [], [], None
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.open = tag

    def handle_data(self, data):
        if self.open in ("script", "title", "style"):
            self.texts.append((self.open, data))

    def handle_endtag(self, tag):
        self.open = None

    def text_of(self, tag: str) -> list[str]:
        return [text for name, text in self.texts if name == tag]


def read(path) -> tuple[Page, dict]:
    page = Page(path.read_text(encoding="utf-8"))
    data, _ = page.text_of("script")
    return page, json.loads(data)


def unpack(array: dict) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["data"]), dtype=f"<{np.dtype(array['type']).str[1:]}")


@pytest.mark.parametrize("hc_mult", [1, 4])
def test_it_holds_the_trace(make_model, tokenizer, text, tmp_path, hc_mult):
    model = make_model(hc_mult=hc_mult, max_position_embeddings=20)
    trace = trace_memory(model, tokenizer, text, max_tokens=30, name="mine")
    ablation = ablate(model, tokenizer, text)
    write_page(tmp_path / "page.html", [trace], {"mine": ablation})
    page, data = read(tmp_path / "page.html")
    assert page.text_of("title") == ["Engram memory: mine"]
    assert [data["pieces"][index] for index in unpack(data["tokens"])] == trace.pieces
    assert data["cut"] == trace.n_cut > 0
    (shown,) = data["models"]
    assert (shown["name"], shown["sizes"], shown["heads"], shown["copies"]) == ("mine", [2, 3, 4], 3, hc_mult)
    assert shown["windows"] == [0, 20]
    assert unpack(shown["reach"]).tolist() == trace.reach.tolist()
    for layer, expected in zip(shown["layers"], trace.layers, strict=True):
        assert layer["id"] == expected.layer_id
        for name, array in (
            ("gates", expected.gates),
            ("shares", expected.shares),
            ("values", expected.value_norms),
            ("parts", expected.size_shares),
            ("rows", expected.row_ids),
        ):
            np.testing.assert_array_equal(unpack(layer[name]), array.flatten())
    assert shown["ablation"]["loss"] == ablation.loss
    assert shown["ablation"]["without_layer"] == {"0": ablation.without_layer[0], "2": ablation.without_layer[2]}


def test_it_loads_nothing(make_model, tokenizer, text, tmp_path):
    write_page(tmp_path / "page.html", [trace_memory(make_model(), tokenizer, text)])
    page, _ = read(tmp_path / "page.html")
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "img", "object", "embed", "base"), tag
        for name in ("src", "href", "action", "srcset"):
            assert attributes.get(name, "data:").startswith("data:"), (tag, attributes)
    (style,), (_, script) = page.text_of("style"), page.text_of("script")
    assert not re.search(r"@import|url\(", style)
    assert not re.search(r"https?:|fetch\(|XMLHttpRequest|import\(|innerHTML|outerHTML|document\.write|eval\(", script)
    policies = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and policies[0].startswith("default-src 'none';")


def test_hostile_text(make_model, tokenizer, hostile_text, tmp_path):
    """It stays text: the page has the elements that it has for any other, and the pieces are as they were."""
    name = "</title><script>alert(2)</script>{{data}}"
    trace = trace_memory(make_model(), tokenizer, hostile_text, name=name)
    write_page(tmp_path / "page.html", [trace])
    page, data = read(tmp_path / "page.html")
    write_page(tmp_path / "plain.html", [trace_memory(make_model(), tokenizer, "Plain words.")])
    plain, _ = read(tmp_path / "plain.html")
    assert page.tags == plain.tags
    assert page.text_of("title") == [f"Engram memory: {name}"]
    assert data["models"][0]["name"] == name
    assert [data["pieces"][index] for index in unpack(data["tokens"])] == trace.pieces
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert source.count("</script>") == 2 and source.count("<!--") == 1
    assert source.isascii() or "⏎" in source  # what is not ASCII is the script's own


def test_two_models(make_model, tokenizer, make_tokenizer, text, tmp_path):
    """Of other sizes and layers, side by side."""
    other_tokenizer = make_tokenizer(engram_layer_ids=[1], engram_max_ngram_size=2)
    traces = [
        trace_memory(make_model(hc_mult=4), tokenizer, text, name="one"),
        trace_memory(make_model(other_tokenizer, hc_mult=1), other_tokenizer, text, name="other"),
    ]
    write_page(tmp_path / "page.html", traces)
    _, data = read(tmp_path / "page.html")
    assert [(m["name"], m["copies"], m["sizes"]) for m in data["models"]] == [("one", 4, [2, 3, 4]), ("other", 1, [2])]


def test_what_cannot_be_compared(make_model, tokenizer, text, tmp_path):
    trace, again = (trace_memory(make_model(), tokenizer, text, name=name) for name in ("one", "two"))
    shorter = trace_memory(make_model(), tokenizer, text, max_tokens=5, name="three")
    for traces, message in (
        ([], "must hold one trace, or two to compare, got 0"),
        ([trace, again, shorter], "got 3"),
        ([trace, trace_memory(make_model(), tokenizer, text, name="one")], "Both traces are named 'one'"),
        ([trace, shorter], "one and three have different token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            write_page(tmp_path / "page.html", traces)
    again.compressed_ids[3] += 1
    with pytest.raises(ValueError, match="one and two have different compressed ids"):
        write_page(tmp_path / "page.html", [trace, again])
    assert not list(tmp_path.iterdir())


def test_packed_numbers_are_exact():
    for array in ([0, 2**32 - 1], [2**32, 5], [-1, 3], []):
        numbers = np.array(array, dtype=np.int64)
        assert unpack(packed(numbers)).tolist() == array
    assert packed(np.array([2**32]))["type"] == "float64" and packed(np.array([7]))["type"] == "uint32"
    floats = np.array([0.1, np.nan, np.inf], dtype=np.float32)
    np.testing.assert_array_equal(unpack(packed(floats)), floats)


def test_its_size(make_model, make_tokenizer, tmp_path):
    """5,000 tokens at V4.1's numbers of layers, copies, sizes and heads."""
    tokenizer = make_tokenizer(engram_n_heads=8)
    model = make_model(tokenizer, hc_mult=4, max_position_embeddings=512)
    words = " ".join(str(number) for number in range(3000))
    trace = trace_memory(model, tokenizer, words, max_tokens=5000)
    assert len(trace) == 5000
    write_page(tmp_path / "page.html", [trace])
    assert (tmp_path / "page.html").stat().st_size < 2.5 * 2**20
