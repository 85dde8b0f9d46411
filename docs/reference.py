"""Writes docs/reference from the docstrings: one page for each part of the package that people import.

    python docs/reference.py            # into docs/reference
    python docs/reference.py FOLDER

The sources are read, not imported, so the pages do not depend on what is installed.
"""

import argparse
import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path


REPOSITORY = Path(__file__).resolve().parents[1]
REFERENCE = REPOSITORY / "docs" / "reference"


@dataclass(frozen=True)
class Page:
    """A page: its file, its title, what it says of where its names are, and the names of each source file.

    `intro` says whether the first source file's own docstring stands at the top.
    """

    file: str
    title: str
    lead: str
    sources: dict[str, list[str]]
    intro: bool = True


MODELS_LEAD = """`from hf_engram import ...` gives the models. Their parts are reached through them:
`model.engram_memory`, `model.engram_memory.tables[i]`, `model.base_model.layers[i].engram`,
`model.base_model.layers[i].attn_hc`. What is not listed is as in Transformers.
"""
OPS_LEAD = """Each operation has an eager implementation and Triton kernels. `backend` is `"eager"`, `"triton"` or
None: what the environment variable `HF_ENGRAM_BACKEND` names, else Triton where it can run.

    from hf_engram.modeling_engram.ops.engram_gate import engram_gate, gate_and_value
    from hf_engram.modeling_engram.ops.gather_rows import gather_rows
    from hf_engram.modeling_engram.ops.ngram_hash import ngram_hash
    from hf_engram.modeling_engram.ops.residual_stream import (
        stream_collapse, stream_expand, stream_mixes, stream_update,
    )
"""


def imported_from(module: str) -> str:
    return f"`from {module} import ...`\n"


PAGES = [
    Page(
        "config.md",
        "Configuration",
        imported_from("hf_engram"),
        {"configuration/configuration_engram.py": ["EngramConfig"]},
        False,
    ),
    Page(
        "deepseek_v41_model.md",
        "DeepSeek-V4.1",
        imported_from("hf_engram"),
        {
            "modeling_engram/deepseek_v41/modeling_deepseek_v41.py": ["DeepseekV41ForCausalLM", "DeepseekV41Model"],
            "configuration/configuration_deepseek_v41.py": ["DeepseekV41Config", "DeepseekV41TextConfig"],
        },
    ),
    Page(
        "tokenizer.md",
        "Tokenizer",
        imported_from("hf_engram"),
        {"tokenization/tokenization_engram.py": ["EngramTokenizer"]},
        False,
    ),
    Page(
        "models.md",
        "Models",
        MODELS_LEAD,
        {
            "modeling_engram/modeling_engram.py": [
                "EngramForCausalLM",
                "EngramModel",
                "EngramForSequenceClassification",
                "EngramForTokenClassification",
                "EngramForQuestionAnswering",
            ],
            "modeling_engram/pretrained_model.py": ["EngramPreTrainedModel"],
            "modeling_engram/placement_mixin.py": ["EngramPlacementMixin"],
            "modeling_engram/engram_memory.py": ["EngramMemory"],
            "modeling_engram/engram_table.py": ["EngramTable"],
            "modeling_engram/engram_layer.py": ["EngramLayer"],
            "modeling_engram/hyper_connection.py": ["HyperConnection"],
        },
        False,
    ),
    Page(
        "optim.md",
        "Optimizer",
        imported_from("hf_engram.optim"),
        {
            "hf_engram/optim.py": ["EngramOptimizer", "trainer_optimizer"],
            "hf_engram/optim_clipping.py": ["clip_grad_norm_"],
        },
    ),
    Page(
        "adapters.md",
        "Adapters",
        imported_from("hf_engram.adapters"),
        {
            "hf_engram/adapters.py": [
                "unfreeze_tables",
                "save_table_delta",
                "load_table_delta",
                "engram_tables",
            ],
            "modeling_engram/table_delta.py": ["TableDelta"],
        },
    ),
    Page(
        "convert.md",
        "Conversion",
        imported_from("hf_engram.convert"),
        {"hf_engram/convert.py": ["convert_backbone", "drop_memory", "prepare_conversion", "saved_bytes"]},
    ),
    Page(
        "inspect.md",
        "Inspection",
        imported_from("hf_engram.inspect"),
        {
            "hf_engram/inspect/__init__.py": [],
            "hf_engram/inspect/trace.py": ["trace_memory", "MemoryTrace", "LayerTrace"],
            "hf_engram/inspect/ablation.py": ["ablate", "Ablation", "shut_off"],
            "hf_engram/inspect/tables.py": ["row_usage", "RowUsage", "row_norms", "RowNorms", "expected_rows"],
            "hf_engram/inspect/page.py": ["write_page"],
            "hf_engram/inspect/plots.py": ["plot_gates", "plot_gate_frequency", "plot_row_usage", "plot_row_norms"],
            "hf_engram/inspect/report.py": ["report"],
            "hf_engram/inspect/screenshot.py": ["find_browser", "take_screenshot"],
        },
    ),
    Page(
        "deepseek_v41.md",
        "The memory of DeepSeek-V4.1",
        imported_from("hf_engram.deepseek_v41"),
        {"hf_engram/deepseek_v41.py": ["import_memory", "load_memory", "ReleasedMemory"]},
    ),
    Page(
        "training_record.md",
        "Training record",
        imported_from("hf_engram.training_record"),
        {"hf_engram/training_record.py": ["RecordTraining", "data_record", "run_record"]},
    ),
    Page(
        "ops.md",
        "Operations",
        OPS_LEAD,
        {
            "modeling_engram/ops/residual_stream.py": [],
            "modeling_engram/ops/engram_gate.py": ["engram_gate", "gate_and_value"],
            "modeling_engram/ops/stream_mixes.py": ["stream_mixes"],
            "modeling_engram/ops/stream_update.py": ["stream_collapse", "stream_expand", "stream_update"],
            "modeling_engram/ops/gather_rows.py": ["gather_rows"],
            "modeling_engram/ops/ngram_hash.py": ["ngram_hash"],
        },
        False,
    ),
]

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises):$")
# `names (kind): text`, of which the kind may be missing.
ITEM = re.compile(r"^([\w*]+(?:, [\w*]+)*)(?: \((.*?)\))?: (.*)$", re.DOTALL)
LINK = re.compile(r"\[`~?([\w.]+)`\]")

Definition = ast.ClassDef | ast.FunctionDef


def anchor(title: str) -> str:
    """The anchor that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


class Writer:
    """Turns definitions into Markdown; knows on which page each name is."""

    def __init__(self) -> None:
        self.trees = {name: ast.parse(self.source(name)) for page in PAGES for name in page.sources}
        self.places: dict[str, str] = {}
        for page in PAGES:
            for file, names in page.sources.items():
                for name in names:
                    self.places[name] = f"{page.file}#{anchor(name)}"
                    definition = self.find(file, name)
                    for method in public_methods(definition):
                        self.places[f"{name}.{method.name}"] = f"{page.file}#{anchor(f'{name}.{method.name}')}"

    @staticmethod
    def source(file: str) -> str:
        return (REPOSITORY / file).read_text(encoding="utf-8")

    def find(self, file: str, name: str) -> Definition:
        for node in self.trees[file].body:
            if isinstance(node, Definition) and node.name == name:
                if ast.get_docstring(node) is None:
                    raise ValueError(f"{name} in {file} has no docstring: write one, or take it from PAGES.")
                return node
        raise ValueError(f"PAGES names {name}, which {file} does not define: correct PAGES.")

    def page(self, page: Page) -> str:
        lines = [f"# {page.title}", "", "<!-- Written by docs/reference.py from the docstrings: change those. -->", ""]
        lines.append(page.lead)
        if page.intro:
            lines += [self.text(ast.get_docstring(self.trees[next(iter(page.sources))]) or ""), ""]
        for file, names in page.sources.items():
            for name in names:
                lines += self.definition(self.find(file, name), Writer.source(file))
        return "\n".join(lines).rstrip() + "\n"

    def definition(self, node: Definition, source: str) -> list[str]:
        lines = [f"## `{node.name}`", "", "```python", signature(node, source), "```", ""]
        lines += [self.text(ast.get_docstring(node)), ""]
        for method in public_methods(node):
            full_name = f"{node.name}.{method.name}"
            kinds = {ast.unparse(decorator) for decorator in method.decorator_list}
            lines += [f"### `{full_name}`", ""]
            if "property" in kinds:
                lines += [f"*property*, `{ast.get_source_segment(source, method.returns)}`" if method.returns else
                          "*property*", ""]  # fmt: skip
            else:
                prefix = (
                    "@classmethod\n"
                    if "classmethod" in kinds
                    else "@staticmethod\n"
                    if "staticmethod" in kinds
                    else ""
                )
                lines += ["```python", prefix + signature(method, source), "```", ""]
            lines += [self.text(ast.get_docstring(method)), ""]
        return lines

    def text(self, docstring: str) -> str:
        """A docstring as Markdown: its sections as lists."""
        out: list[str] = []
        lines = inspect.cleandoc(docstring).splitlines()
        index = 0
        while index < len(lines):
            if not (section := SECTION.match(lines[index])):
                # What is indented is code, of which Markdown wants to see that it is a block of its own.
                if lines[index].startswith("    ") and out and out[-1].strip() and not out[-1].startswith("    "):
                    out.append("")
                out.append(lines[index])
                index += 1
                continue
            body = []
            index += 1
            while index < len(lines) and (not lines[index] or lines[index].startswith(" ")):
                body.append(lines[index])
                index += 1
            out += [f"**{section[1]}**", "", *section_items(section[1], inspect.cleandoc("\n".join(body))), ""]
        return LINK.sub(self.link, "\n".join(out).rstrip())

    def link(self, match: re.Match) -> str:
        place = self.places.get(match[1])
        return f"[`{match[1]}`]({place})" if place else f"`{match[1]}`"


def public_methods(node: Definition) -> list[ast.FunctionDef]:
    """A class's methods that have no underscore but a docstring; setters of properties are left out."""
    if not isinstance(node, ast.ClassDef):
        return []
    return [
        child
        for child in node.body
        if isinstance(child, ast.FunctionDef) and not child.name.startswith("_") and ast.get_docstring(child)
    ]


def section_items(section: str, body: str) -> list[str]:
    """The items of a section, each with its continuation lines on one line; free text as it is."""
    items: list[str] = []
    for line in body.splitlines():
        if line.startswith(" ") and items:
            items[-1] += " " + line.strip()
        elif line:
            items.append(line)
    if section in ("Returns", "Raises"):
        # An item that goes on without indent is one sentence over several lines.
        return [f"- {item}" for item in items] if section == "Raises" else [" ".join(items)]
    out = []
    for item in items:
        names, kind, text = match.groups() if (match := ITEM.match(item)) else (None, None, item)
        label = ", ".join(f"**`{name}`**" for name in names.split(", ")) if names else ""
        out.append(f"- {label}{f' ({kind})' if kind else ''}{': ' if names else ''}{text}")
    return out


def signature(node: Definition, source: str) -> str:
    """How it is called, as the source has it: one argument a line where it is long."""
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        head = f"class {node.name}({bases})" if bases else f"class {node.name}"
        init = next((n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)
        return head if init is None else f"{head}\n{call(node.name, init, source, skip_first=True)}"
    in_class = bool(node.args.args) and node.args.args[0].arg in ("self", "cls")
    return call(node.name, node, source, skip_first=in_class)


def call(name: str, node: ast.FunctionDef, source: str, skip_first: bool) -> str:
    def shown(argument: ast.arg, default: ast.expr | None = None, stars: str = "") -> str:
        text = stars + argument.arg
        if argument.annotation is not None:
            text += f": {one_line(argument.annotation, source)}"
        if default is not None:
            text += f"{' = ' if argument.annotation is not None else '='}{one_line(default, source)}"
        return text

    args = node.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + list(args.defaults)
    parts = [shown(*pair) for pair in zip(positional, defaults, strict=True)][1 if skip_first else 0 :]
    if args.vararg:
        parts.append(shown(args.vararg, stars="*"))
    elif args.kwonlyargs:
        parts.append("*")
    parts += [shown(*pair) for pair in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg:
        parts.append(shown(args.kwarg, stars="**"))
    returns = f" -> {one_line(node.returns, source)}" if node.returns is not None else ""
    line = f"{name}({', '.join(parts)}){returns}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){returns}"


def one_line(node: ast.expr, source: str) -> str:
    return " ".join(ast.get_source_segment(source, node).split())


def write_all(folder: Path) -> list[Path]:
    """Writes every page into `folder`, and an index of them, and says where."""
    folder.mkdir(parents=True, exist_ok=True)
    writer = Writer()
    texts = {page.file: writer.page(page) for page in PAGES}
    index = ["# Reference", "", "<!-- Written by docs/reference.py from the docstrings: change those. -->", ""]
    for page in PAGES:
        names = ", ".join(f"[`{n}`]({writer.places[n]})" for names in page.sources.values() for n in names)
        index += [f"- [{page.title}]({page.file}): {names}"]
    texts["README.md"] = "\n".join(index) + "\n"
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
    return [folder / name for name in texts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=REFERENCE, help="where to write; by default docs/reference"
    )
    for written in write_all(parser.parse_args().folder):
        print(written)
