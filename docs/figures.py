"""Draws the figures of docs/concepts.md, as SVG: numbers and sizes come from the package, not from here.

    python docs/figures.py              # into docs/images
    python docs/figures.py FOLDER

The same text comes out on every machine: integers are exact, the few others are rounded, and nothing is dated. Colours
follow the reader's light or dark theme.
"""

import argparse
import codecs
import contextlib
import io
from html import escape
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_engram import EngramConfig, EngramModel, EngramTokenizer
from hf_engram.modeling_engram.ops.engram_gate import gate_and_value
from hf_engram.tokenization.ngram_hashing import build_layout


IMAGES = Path(__file__).parent / "images"
STYLE = """
svg { --ink: #1f2328; --soft: #6e7781; --line: #8c959f; --fill: #f6f8fa; --a: #0969da; --b: #bc4c00; --c: #1a7f37; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6edf3; --soft: #9198a1; --line: #6e7681; --fill: #161b22; --a: #58a6ff; --b: #f0883e; --c: #3fb950; }
}
text { font: 14px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--ink); }
.mono { font-family: ui-monospace, Menlo, Consolas, monospace; }
.small { font-size: 12px; }
.soft { fill: var(--soft); font-size: 12px; }
.box { fill: var(--fill); stroke: var(--line); }
.line { fill: none; stroke: var(--line); stroke-width: 1.5; }
.a { --own: var(--a); } .b { --own: var(--b); } .c { --own: var(--c); }
.a.line, .b.line, .c.line, .a.box, .b.box, .c.box { stroke: var(--own); stroke-width: 2; }
text.a, text.b, text.c { fill: var(--own); }
"""


class Drawing:
    """An SVG picture, to which shapes are added one after the other."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, style: str = "", anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(text)}</text>')

    def box(self, x: float, y: float, width: float, height: float, lines: str = "", style: str = "") -> None:
        """A box with lines of text in its middle; those after the first are small."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="box {style}"/>'
        )
        texts = lines.split("\n") if lines else []
        for index, line in enumerate(texts):
            at = y + height / 2 + 5 + 17 * (index - (len(texts) - 1) / 2)
            self.text(x + width / 2, at, line, "soft" if index else "")

    def line(self, *points: tuple[float, float], style: str = "", arrow: bool = False, dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        extra = ' marker-end="url(#arrow)"' if arrow else ""
        extra += ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<path d="{path}" class="line {style}"{extra}/>')

    def arrow(self, *points: tuple[float, float], style: str = "", dashed: bool = False) -> None:
        self.line(*points, style=style, arrow=True, dashed=dashed)

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img">\n<title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n'
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="context-stroke"/></marker>'
            "</defs>\n"
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def zen_tokenizer() -> EngramTokenizer:
    """A tokenizer trained on the Zen of Python, which is the same in all releases; docs/concepts.md makes the same."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=["<pad>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator([codecs.decode(this.s, "rot13")], trainer)
    plain = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>")
    layout = {"engram_layer_ids": [1], "engram_max_ngram_size": 3, "engram_n_heads": 2, "engram_vocab_size": 100}
    return EngramTokenizer.from_tokenizer(plain, **layout)


def draw_hash(position: int = 3) -> Drawing:
    """From a token and its predecessors to rows of a table."""
    tokenizer = zen_tokenizer()
    ids = tokenizer("Simple is better than complex.")["input_ids"]
    pieces = [tokenizer.decode([i]) for i in ids]
    compressed = tokenizer.token_map[ids].tolist()
    rows = tokenizer.compute_hash_ids(ids)[position, 0].tolist()
    layout = build_layout(1, tokenizer.engram_vocab_size, tokenizer.engram_max_ngram_size, tokenizer.engram_n_heads)
    primes, offsets = layout.primes[0], layout.offsets[0]

    drawing = Drawing(860, 400, "How the n-grams that end at one token become rows of a table")
    for name, y in (("text", 37), ("token ids", 77), ("compressed ids", 117)):
        drawing.text(120, y + 5, name, "soft", "end")
    for index, (piece, token_id, compressed_id) in enumerate(zip(pieces, ids, compressed, strict=True)):
        x = 140 + 115 * index
        used = position - 2 <= index <= position
        drawing.box(x, 20, 105, 34, "", "a" if index == position else "")
        drawing.text(x + 52, 42, piece.replace(" ", "\u2423"), "mono")
        drawing.text(x + 52, 82, str(token_id), "mono")
        drawing.text(x + 52, 122, str(compressed_id), "mono a" if used else "mono soft")
    row_at = 360
    for size, style in ((2, "b"), (3, "c")):
        y = 165 + 75 * (size - 2)
        left, right = 140 + 115 * (position - size + 1), 245 + 115 * position
        drawing.line((left, y - 8), (left, y), (right, y), (right, y - 8), style=style)
        window = " xor ".join(f"m{shift}\u00b7{compressed[position - shift]}" for shift in range(size))
        drawing.text(left - 12, y + 5, f"{size}-gram", style, "end")
        drawing.text(right + 12, y + 5, f"r = {window}", "mono small", "start")
        for head in range(tokenizer.engram_n_heads):
            column = (size - 2) * tokenizer.engram_n_heads + head
            prime, offset = int(primes[size - 2, head]), int(offsets[size - 2, head])
            x = 40 + 200 * column
            drawing.box(x, 300, 180, 30, "", style)
            drawing.text(x + 90, 320, f"r mod {prime} + {offset} = {rows[column]}", f"mono small {style}")
            start = left + (right - left) * (0.4 + 0.2 * head)
            drawing.arrow((start, y), (start, y + 20), (x + 90, 275 + 5 * size), (x + 90, 298), style=style)
            # The bucket range of this column in the table, drawn to scale, and the row in it.
            total = layout.num_embeddings[0]
            at, end = 40 + 780 * offset / total, 40 + 780 * (offset + prime) / total
            drawing.box(round(at, 1), row_at, round(end - at, 1), 18, "", style)
            hit = round(40 + 780 * rows[column] / total, 1)
            drawing.arrow((x + 90, 332), (hit, row_at), style=style)
            drawing.line((hit, row_at), (hit, row_at + 18), style=style)
    drawing.text(40, row_at + 34, "row 0", "soft", "start")
    drawing.text(820, row_at + 34, f"row {layout.num_embeddings[0] - 1}", "soft", "end")
    drawing.text(430, row_at + 34, "the layer's table: one range for each n-gram size and head", "soft")
    return drawing


def small_model() -> EngramModel:
    """Four copies of the stream; its layer's shapes are those in the figures."""
    fields = {"engram_layer_ids": [1], "engram_n_heads": 4, "engram_head_dim": 32, "engram_vocab_size": 100}
    sizes = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3}
    return EngramModel(EngramConfig(**sizes, **fields, num_attention_heads=4, hc_mult=4))


def draw_layer() -> Drawing:
    """Rows of a token to what is added to the copies of its stream."""
    model = small_model()
    config, layer = model.config, model.layers[1].engram
    out_features, in_features = layer.wkv.weight.shape
    copies, width = config.hc_mult, config.hidden_size
    columns = in_features // config.engram_head_dim

    drawing = Drawing(860, 350, "An Engram layer at one token")
    for column in range(columns):
        drawing.box(30, 40 + 31 * column, 110, 25, "", "b" if column < columns // 2 else "c")
        size, head = 2 + column // config.engram_n_heads, column % config.engram_n_heads
        drawing.text(85, 57 + 31 * column, f"{size}-gram, head {head}", "soft")
    drawing.text(85, 25, f"{columns} rows of {config.engram_head_dim}")
    drawing.arrow((145, 163), (185, 163))
    drawing.box(188, 118, 120, 90, f"wkv\n{out_features} \u00d7 {in_features}")
    for copy in range(copies):
        y = 30 + 62 * copy
        drawing.arrow((308, 163), (345, y + 20))
        drawing.box(348, y, 110, 40, f"key {copy}\n{width}")
        drawing.arrow((458, y + 20), (515, y + 20))
        drawing.box(518, y, 90, 40, f"gate {copy}\nin (0, 1)", "a")
        drawing.arrow((690, y + 12), (611, y + 12), dashed=True)
        drawing.arrow((608, y + 28), (690, y + 28), style="a")
        drawing.box(693, y, 140, 40, f"copy {copy}\n+ gate {copy} \u00b7 value")
    drawing.arrow((308, 163), (345, 298))
    drawing.box(348, 278, 110, 40, f"value\n{width}", "a")
    drawing.line((458, 298), (651, 298), style="a")
    drawing.arrow((651, 298), (651, 62), style="a")
    drawing.text(763, 20, f"stream: {copies} copies of {width}", "soft")
    drawing.text(651, 318, "one value for all copies", "soft")
    drawing.text(651, 336, "dashed: the copy is compared with its key", "soft")
    return drawing


def draw_gate() -> Drawing:
    """The gate against the cosine of stream and key, as the operation computes it, for three widths."""
    drawing = Drawing(560, 330, "The gate against the cosine of stream and key")
    left, top, width, height = 60, 25, 360, 250
    drawing.box(left, top, width, height)
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = top + height * (1 - value)
        drawing.line((left - 5, y), (left, y))
        drawing.text(left - 9, y + 4, f"{value:g}", "soft", "end")
        x = left + width * value
        drawing.line((x, top + height), (x, top + height + 5))
        drawing.text(x, top + height + 18, f"{2 * value - 1:g}", "soft")
    drawing.text(left + width / 2, 318, "cosine of the copy and its key (weights of one)")
    drawing.text(left, 16, "gate", "", "start")
    cosines = torch.linspace(-1, 1, 201, dtype=torch.float64)
    for dim, style in ((64, "a"), (512, "b"), (5120, "c")):
        stream = torch.zeros(len(cosines), 1, dim, dtype=torch.float64)
        stream[:, 0, 0] = 1
        keys = torch.zeros(len(cosines), dim, dtype=torch.float64)
        keys[:, 0], keys[:, 1] = cosines, (1 - cosines.square()).clamp_min(0).sqrt()
        ones = torch.ones(1, dim, dtype=torch.float64)
        gates, _ = gate_and_value(stream, torch.cat([keys, torch.zeros_like(keys)], -1), ones, ones, eps=0.0)
        points = [
            (round(left + width * (cosine + 1) / 2, 1), round(top + height * (1 - gate), 1))
            for cosine, gate in zip(cosines.tolist(), gates[:, 0].tolist(), strict=True)
        ]
        drawing.line(*points, style=style)
        drawing.text(435, 60 + 22 * ("abc".index(style)), f"D = {dim}", style, "start")
    return drawing


def draw_stream() -> Drawing:
    """One decoder layer with memory: what is read with whose weights."""
    drawing = Drawing(860, 350, "The multi-copy residual stream through one decoder layer")
    copies = small_model().config.hc_mult
    top = 95
    bottom = top + 14 * (copies - 1)
    for copy in range(copies):
        drawing.line((30, top + 14 * copy), (850, top + 14 * copy))
    drawing.text(30, 75, f"stream: {copies} copies", "soft", "start")
    drawing.box(85, top - 12, 90, bottom - top + 24, "Engram\nadds to all", "b")
    drawing.box(85, 290, 90, 40, "rows", "b")
    drawing.arrow((130, 288), (130, bottom + 16), style="b")
    for x, name, before, style in ((215, "attention", "the MLP before", "a"), (535, "MLP", "attention", "c")):
        is_last = name == "MLP"
        end = (850, 38) if is_last else (x + 310, 38)
        points = [(x + 30, top - 4), (x + 30, 38), end]
        drawing.arrow(*points, *([] if is_last else [(x + 310, top - 4)]), style=style, dashed=True)
        drawing.text(x + 38, 78, f"weights of {name}", f"small {style}", "start")
        reader = "the next layer" if is_last else "the MLP"
        drawing.text(x + 38, 30, f"its pre collapses the stream for {reader}", "soft", "start")
        drawing.arrow((x + 20, bottom + 4), (x + 20, 215))
        drawing.text(x + 28, 168, "collapse with pre", "soft", "start")
        drawing.text(x + 28, 183, f"of {before}", "soft", "start")
        drawing.box(x - 20, 218, 210, 60, f"{name}\none vector in, one out", style)
        drawing.arrow((x + 190, 248), (x + 225, 248), (x + 225, bottom + 16), style=style)
        drawing.box(x + 185, top - 12, 80, bottom - top + 24, "expand\npost, comb", style)
        drawing.text(x + 233, 183, f"{name}'s own", "soft", "start")
    return drawing


def draw_placement() -> Drawing:
    """When rows are requested and when they are needed."""
    drawing = Drawing(860, 250, "Rows are requested before the first layer and needed later")
    for name, y in (("compute", 60), ("rows of layer 1", 130), ("rows of layer 14", 185)):
        drawing.text(130, y + 5, name, "soft", "end")
    drawing.box(145, 40, 70, 40, "hash", "a")
    for layer in range(16):
        style = "b" if layer == 1 else "c" if layer == 14 else ""
        drawing.box(220 + 38 * layer, 40, 34, 40, str(layer), style)
    for layer, y, style, length in ((1, 130, "b", 34), (14, 185, "c", 340)):
        x = 220 + 38 * layer + 17
        drawing.arrow((180, 80), (180, y), (222, y), style="a")
        drawing.box(224, y - 15, length, 30, "", style)
        drawing.arrow((224 + length, y), (x, y), (x, 82), style=style)
    drawing.text(290, 135, "read while layer 0 computes", "soft", "start")
    drawing.text(234, 190, "read while layers 0 to 13 compute", "soft", "start")
    drawing.text(430, 235, "time \u2192", "soft")
    return drawing


FIGURES = {
    "hash": draw_hash,
    "layer": draw_layer,
    "gate": draw_gate,
    "stream": draw_stream,
    "placement": draw_placement,
}


def draw_all(folder: Path) -> list[Path]:
    """Writes every figure into `folder`, and says where."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, draw in FIGURES.items():
        paths.append(folder / f"{name}.svg")
        paths[-1].write_text(draw().svg(), encoding="utf-8", newline="\n")
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=IMAGES, help="where to write; by default docs/images")
    for written in draw_all(parser.parse_args().folder):
        print(written)
