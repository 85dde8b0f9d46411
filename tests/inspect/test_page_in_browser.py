"""The page in a browser: it renders, its switches work, and a token's card shows what the trace says.

Needs a Chromium browser on the PATH (Debian and Ubuntu: apt install chromium); skipped where there is none.
"""

import os
from collections.abc import Iterator

import numpy as np
import pytest

from hf_engram.inspect import ablate, find_browser, take_screenshot, trace_memory, write_page


playwright = pytest.importorskip("playwright.sync_api")

try:
    BROWSER = find_browser()
except FileNotFoundError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    with playwright.sync_playwright() as started:
        launched = started.chromium.launch(executable_path=BROWSER, chromium_sandbox=not is_root)
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser, tmp_path) -> Iterator:
    """`open_page(traces, fragment="", ablations=None, **context)`: the page of these traces. At the end of the test,
    it must have asked for nothing but its own file, and reported no error."""
    requests, errors, contexts = [], [], []

    def open_(traces, fragment: str = "", ablations=None, **context):
        path = tmp_path / "page.html"
        write_page(path, traces, ablations)
        contexts.append(browser.new_context(**{"viewport": {"width": 1200, "height": 800}, **context}))
        page = contexts[-1].new_page()
        page.on("request", lambda request: requests.append(request.url.partition("#")[0]))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type != "log" else None)
        page.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
        page.goto(f"{path.as_uri()}#{fragment}")
        return page

    yield open_
    for context in contexts:
        context.close()
    assert not errors
    # Its icon is in it, too.
    assert {url for url in requests if not url.startswith("data:")} == {(tmp_path / "page.html").as_uri()}


@pytest.fixture(scope="module")
def trace(make_model, tokenizer, text):
    return trace_memory(make_model(hc_mult=4, max_position_embeddings=30), tokenizer, text, name="mine")


def token(page, position: int, panel: int = 0):
    return page.locator(".panel").nth(panel).locator(f'.t[data-token="{position}"]')


def card_grams(page) -> dict[int, tuple[list[str], list[int]]]:
    """What the card says: for each n-gram size the pieces, as they are written in chips, and the row ids."""
    return page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("#card .grams li")].map((item) => [
            item.dataset.size, [
            [...item.querySelectorAll(".gram > span:not(.none)")].map((chip) => [...chip.childNodes].map(
                (node) => node.dataset ? node.dataset.mark : node.textContent).join("")),
            item.querySelector(".rows").textContent.replace("rows ", "").split(" ").map(Number)]]))"""
    )


def in_chip(piece: str) -> str:
    return piece.replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def expected_grams(trace, tokenizer, layer_id: int, position: int) -> dict:
    """From the token ids alone: pieces decoded one by one, rows from the tokenizer's own hash of the window."""
    start = max(start for start in trace.window_starts if start <= position)
    ids = trace.token_ids[start : position + 1]
    rows = tokenizer.compute_hash_ids(ids)[-1, tokenizer.engram_layer_ids.index(layer_id)].tolist()
    pieces = [in_chip(tokenizer.decode([token_id])) for token_id in ids.tolist()]
    return {str(size): [pieces[-size:], rows[3 * (size - 2) : 3 * (size - 1)]] for size in (2, 3, 4)}


def colors(page) -> list[str]:
    return page.evaluate("() => [...document.querySelectorAll('.t')].map((t) => getComputedStyle(t).backgroundColor)")


def test_it_renders_the_text(open_page, trace, text):
    page = open_page([trace])
    pieces = page.evaluate("() => [...document.querySelectorAll('.t')].map((t) => t.textContent)")
    assert pieces == trace.pieces and "".join(pieces) == text
    assert page.title() == "Engram memory: mine"
    assert page.locator("#about").text_content() == f"mine · {len(trace)} tokens"
    assert page.locator(".anew").count() == 1  # between the two windows
    assert token(page, 0).bounding_box()["width"] > 3
    assert page.locator("#card").is_hidden()
    assert f"{trace.layers[0].gates.mean():.3f}" in page.locator(".facts").text_content()


def test_colours_follow_the_gate(open_page, trace):
    page = open_page([trace], "layer=2&copy=3")
    gates = trace.layer(2).gates[:, 2]
    for position in (int(gates.argmax()), int(gates.argmin()), int(np.abs(gates - 0.5).argmin())):
        wide = token(page, position)
        assert wide.get_attribute("data-side") == ("shut" if gates[position] < 0.5 else "open")
        alpha = float(wide.evaluate("(t) => t.style.getPropertyValue('--a')"))
        assert alpha == pytest.approx(0.85 * min(1, abs(gates[position] - 0.5) / 0.45), abs=1e-3)
    assert colors(page)[int(gates.argmax())] != colors(page)[int(gates.argmin())]


def test_switches(open_page, trace):
    """Layer, copy and measure repaint every token, and show on the card; the address names what is shown."""
    page = open_page([trace], "token=7")

    def shown() -> tuple[float, str]:
        alpha = float(token(page, 7).evaluate("(t) => t.style.getPropertyValue('--a')"))
        return alpha, page.locator("#card .head").text_content()

    def strength(gate: float) -> float:
        return pytest.approx(0.85 * min(1, abs(gate - 0.5) / 0.45), abs=1e-3)

    first = colors(page)
    assert shown()[0] == strength(trace.layer(0).gates[7].mean()) and shown()[1].endswith("layer 0")
    page.get_by_label("2", exact=True).first.check()
    assert shown()[0] == strength(trace.layer(2).gates[7].mean()) and shown()[1].endswith("layer 2")
    assert colors(page) != first
    page.locator("#copies").get_by_label("3", exact=True).check()
    assert shown()[0] == strength(trace.layer(2).gates[7, 3])
    page.get_by_label("Share of the stream").check()
    values = np.sort(np.concatenate([layer.shares.flatten() for layer in trace.layers]))
    top = values[int(0.99 * (len(values) - 1))]
    assert shown()[0] == pytest.approx(0.85 * min(1, trace.layer(2).shares[7, 3] / top), abs=1e-3)
    page.get_by_label("Value norm").check()
    assert page.url.endswith("#layer=2&copy=4&measure=value&token=7")
    page.reload()
    assert page.get_by_label("Value norm").is_checked() and shown()[1].endswith("layer 2")


def test_switches_by_keyboard(open_page, trace):
    page = open_page([trace])
    page.locator("#layers input").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.url.split("#")[1].startswith("layer=2")


@pytest.mark.parametrize("layer_id", [0, 2])
def test_hover_shows_the_ngram(open_page, trace, tokenizer, layer_id):
    """The pieces and rows that follow from the token ids, and the trace's numbers; also at a window's start."""
    page = open_page([trace], f"layer={layer_id}")
    layer = trace.layer(layer_id)
    for position in (0, 1, 9, 30, 31, len(trace) - 1):
        token(page, position).hover()
        assert page.locator("#card").is_visible()
        assert card_grams(page) == expected_grams(trace, tokenizer, layer_id, position)
        says = page.locator("#card dd").all_text_contents()
        assert says[:4] == [f"{gate:.3f}" for gate in layer.gates[position]]
        assert says[4] == f"{100 * layer.shares[position].mean():.1f} %"
        assert float(says[5]) == pytest.approx(layer.value_norms[position], rel=0.01)
        writer = page.locator("#card .writer")
        assert int(writer.get_attribute("data-size")) == 2 + layer.size_shares[position].argmax()
        assert f"{100 * layer.size_shares[position].max():.0f} % of the value" in writer.text_content()
        assert ("nothing before" in page.locator("#card").text_content()) == (position in (0, 1, 30, 31))
    page.mouse.move(2, 2)
    assert page.locator("#card").is_hidden()


def test_focus_arrow_keys_and_pinning(open_page, trace):
    page = open_page([trace])
    head = page.locator("#card .head")
    page.locator("#theme").focus()
    for _ in range(3):  # layer, copy, measure
        page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert "token 0 ·" in head.text_content()
    page.keyboard.press("ArrowRight")
    assert "token 1 ·" in head.text_content()
    page.keyboard.press("End")
    assert f"token {len(trace) - 1} ·" in head.text_content()
    page.keyboard.press("ArrowUp")
    assert f"token {len(trace) - 1} ·" not in head.text_content()
    page.keyboard.press("Enter")
    token(page, 3).hover()  # pinned: hovering elsewhere leaves it
    assert "token 3 ·" not in head.text_content() and page.locator("#card.pinned").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#card").is_hidden()
    token(page, 3).click()
    assert "token 3 ·" in head.text_content() and page.url.endswith("token=3")


def test_tap(open_page, trace):
    """On a small touch screen, within its bounds."""
    page = open_page([trace], viewport={"width": 360, "height": 640}, has_touch=True, is_mobile=True)
    token(page, 12).tap()
    box = page.locator("#card").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360 and box["y"] >= 0 and box["y"] + box["height"] <= 640
    assert "token 12 ·" in page.locator("#card .head").text_content()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    token(page, 12).tap()
    assert page.locator("#card").is_hidden()


def test_light_and_dark(open_page, trace):
    page = open_page([trace], color_scheme="dark")
    ground = "() => getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) != dark


def test_list_of_strongest_ngrams(open_page, trace):
    """Each leads to a place where it stands."""
    page = open_page([trace], "layer=2&copy=1")
    values = [float(value) for value in page.locator(".top .value").all_text_contents()]
    assert values == sorted(values, reverse=True) and len(values) > 5
    assert values[0] <= round(float(trace.layer(2).gates[:, 0].max()), 3)
    first = page.locator(".top button").first
    gram = first.locator(".gram > span").all_text_contents()
    first.click()
    written = page.locator("#card .writer .gram > span").all_text_contents()
    assert written == gram
    assert page.locator("#card.pinned").is_visible()


def test_hostile_text(open_page, make_model, tokenizer, hostile_text):
    trace = trace_memory(make_model(), tokenizer, hostile_text, name="<script>document.title='taken'</script>")
    # Other vocabularies have whole characters where this one has bytes.
    trace.pieces[-3:] = ["\u202eevil", "שלום", "\u200b"]
    page = open_page([trace])
    assert page.title() == f"Engram memory: {trace.name}"
    assert page.evaluate("() => document.scripts.length") == 2
    assert page.evaluate("() => document.querySelectorAll('img, b.bold, .text b, .text script').length") == 0
    assert page.locator(".panel h2").text_content() == trace.name
    # What is invisible, or turns text around, is shown as a mark; the rest is as it was.
    shown = page.evaluate("() => [...document.querySelectorAll('.t')].map((t) => t.textContent)")
    invisible = str.maketrans("", "", "\x07\u202e\u200b")
    assert shown == [piece.translate(invisible) for piece in trace.pieces]
    marks = page.evaluate("() => [...document.querySelectorAll('.text i')].map((i) => i.dataset.mark)")
    assert {"⏎", "⇥", "⟨cr⟩", "⟨0007⟩", "⟨202e⟩", "⟨200b⟩"} <= set(marks)
    for piece in ("<", "</", '"', "\t", "\\xf0", "שלום"):
        for position in [at for at, other in enumerate(trace.pieces) if piece == other.strip(" ")][:1]:
            token(page, position).hover()
            assert in_chip(piece) in page.locator("#card .gram > span").first.evaluate(
                "(chip) => [...chip.childNodes].map((n) => n.dataset ? n.dataset.mark : n.textContent).join('')"
            )


def test_two_models(open_page, make_model, make_tokenizer, tokenizer, text, trace):
    """Side by side, marked and explained together; a layer or copy that one lacks is said to be missing."""
    other_tokenizer = make_tokenizer(engram_layer_ids=[1, 2], engram_max_ngram_size=2)
    other = trace_memory(make_model(other_tokenizer, hc_mult=1), other_tokenizer, text, name="other")
    page = open_page([trace, other], "layer=2")
    assert page.locator("#layers label").all_text_contents() == ["0", "1", "2"]
    left, right = (token(page, 9, panel).bounding_box() for panel in (0, 1))
    assert left["x"] + left["width"] < right["x"]
    token(page, 9, 1).hover()
    assert page.locator(".t.here").count() == 2
    sides = page.locator("#card .side")
    assert sides.locator("h4").all_text_contents() == ["mine", "other"]
    assert f"{other.layer(2).gates[9, 0]:.3f}" in sides.nth(1).text_content()
    assert f"{trace.layer(2).gates[9, 2]:.3f}" in sides.nth(0).text_content()
    assert sides.nth(1).locator(".rows").count() == 1 and sides.nth(0).locator(".rows").count() == 3
    page.get_by_label("1", exact=True).first.check()
    missing = page.locator(".absent").all_text_contents()
    assert missing == ["mine has no Engram layer 1.", ""]
    page.get_by_label("2", exact=True).first.check()
    page.locator("#copies").get_by_label("3", exact=True).check()
    assert page.locator(".absent").all_text_contents() == ["", "other has no copy 3 of the stream."]


def test_losses(open_page, make_model, tokenizer, text):
    model = make_model(hc_mult=1)
    trace, ablation = trace_memory(model, tokenizer, text), ablate(model, tokenizer, text)
    page = open_page([trace], "layer=2", {"model": ablation})
    facts = page.locator(".facts").text_content()
    assert f"loss {ablation.loss:.3f}" in facts and f"without layer 2 {ablation.without_layer[2]:.3f}" in facts
    assert page.locator("#copies").is_hidden()


def test_masked_tokens(open_page, make_model, tokenizer, text):
    mask = np.ones(len(tokenizer(text)["input_ids"]), dtype=bool)
    mask[5:7] = False
    page = open_page([trace_memory(make_model(), tokenizer, text, token_mask=mask)])
    assert page.locator(".t.dead").count() == 2
    token(page, 5).hover()
    assert "Not text to the memory" in page.locator("#card").text_content()
    token(page, 7).hover()
    assert "nothing before" in page.locator("#card").text_content()


def test_screenshot(trace, tmp_path):
    write_page(tmp_path / "page.html", [trace])
    take_screenshot(tmp_path / "page.html", tmp_path / "picture.png", "layer=2&token=4", width=900, height=500)
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert [int.from_bytes(data[at : at + 4], "big") for at in (16, 20)] == [900, 500]
    assert len(data) > 10_000
