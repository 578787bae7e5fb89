"""Blocks of the documentation that are read from the code: layout, imports between folders, methods, flags, models."""

from __future__ import annotations

import ast
import graphlib
import re
from argparse import Action
from collections.abc import Callable
from functools import cache
from textwrap import fill

from experiments.flags import parser
from inputs.files import ROOT
from methods.catalogue import METHODS
from report.tables import Cell, Table, markdown
from scripts.keepRecord import Records

ROOT_FILES = ("test", "specSampling", "regrSampling", "PPL", "utils", "downloadModel", "downloadData")
WIDTH = 119  # characters of a line of the layout
# Folders without code, and their descriptions in the layout.
OTHERS = {
    "docs/ tests/": "the documentation, in docs/records/ the record of each figure in it; the test suite",
    "custom_generate/": "what `generate` of transformers loads by the folder's name",
    "models/ datasets/": "the bundled models and sample texts, and what you download",
    "results.txt": "the tables of every run, newest first; with an index above if there are several",
}


@cache
def imports() -> dict[str, list[str]]:
    """{folder of code or file in the root: the others among them that it imports}, from the lowest to the highest."""
    files = {folder.parent.name: [*folder.parent.rglob("*.py")] for folder in ROOT.glob("*/__init__.py")}
    files = {name: of for name, of in files.items() if name != "tests"} | {f.stem: [f] for f in ROOT.glob("*.py")}
    imported: dict[str, set[str]] = {}
    for name, of in files.items():
        nodes = [node for file in of for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
        modules = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        modules |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
        imported[name] = {module.split(".")[0] for module in modules} & files.keys() - {name}
    sorted_names = {name: sorted(imported[name]) for name in sorted(imported)}
    order = list(graphlib.TopologicalSorter(sorted_names).static_order())
    return {name: [other for other in order if other in imported[name]] for name in order}


def docstring(name: str) -> str:
    """The docstring of a code folder or of a file in the root, in one line."""
    file = ROOT / name / "__init__.py" if (ROOT / name).is_dir() else ROOT / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def first_sentence(text: str) -> str:
    """The first sentence of a text, without its full stop."""
    return re.split(r"(?<=[^.])\.(?: |$)", text)[0]


def shown(name: str) -> str:
    """A name as the documentation writes it: engine/, test.py."""
    return f"{name}/" if (ROOT / name).is_dir() else f"{name}.py"


def layout(records: Records) -> str:
    """The annotated tree of the project."""
    folders = [name for name in imports() if (ROOT / name).is_dir()]
    rows = {shown(name): docstring(name) for name in (*ROOT_FILES, *folders)} | OTHERS
    left = max(map(len, rows)) + 2
    lines = [
        fill(first_sentence(text), WIDTH, initial_indent=f"{name:{left}}", subsequent_indent=" " * left)
        for name, text in rows.items()
    ]
    return "\n".join(["```text", *lines, "```"])


def graph(records: Records) -> str:
    """The folders and files as a Mermaid graph, each above what it imports. An import that others imply is left out."""
    reach: dict[str, set[str]] = {}
    lines: list[str] = []
    for name, others in imports().items():
        reach[name] = set(others).union(*(reach[other] for other in others))
        direct = [other for other in others if not any(other in reach[via] for via in others)]
        box = f'{name}["{shown(name)}"]' if (ROOT / name).is_dir() else f'{name}(["{shown(name)}"])'
        lines = [f"    {box} --> {' & '.join(direct)}" if direct else f"    {box}", *lines]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def methods(records: Records) -> str:
    """The catalogue of methods."""
    table = Table("", ["method", "what it is", "needs", "measured by, beside `--compare`", "lossless"])
    for method in (method for method in METHODS.values() if not method.engine):
        modes = " ".join(f"`--{mode}`" for mode in method.modes)
        table.add(f"`{method.name}`", method.title, ", ".join(method.needs), modes, "yes" if method.lossless else "")
    return markdown(table)


def value_of(action: Action) -> str:
    """The values of a flag, as in its usage line."""
    if action.nargs == 0:
        return ""
    one = " or ".join(f"`{choice}`" for choice in action.choices) if action.choices else f"`{action.metavar or 'NAME'}`"
    return {"+": f"{one} ...", "?": f"[{one}]"}.get(str(action.nargs), one)


def meaning_of(action: Action) -> tuple[str, str]:
    """(default, meaning) of a flag: its help ends with "Default: ..." if it has one."""
    text = " ".join((action.help or "").split()).replace("%%", "%")
    text = re.sub(r"(?<![\w-])--\w+", r"`\g<0>`", text)
    meaning, _, default = text.partition(" Default: ")
    return default.removesuffix("."), meaning


def flags(records: Records) -> str:
    """Every flag of test.py, group by group."""
    pieces = []
    for group in parser()._action_groups:
        actions = [action for action in group._group_actions if action.option_strings and action.dest != "help"]
        rows: list[list[Cell]] = [[f"`{a.option_strings[0]}`", value_of(a), *meaning_of(a)] for a in actions]
        if rows:
            table, title = Table("", ["flag", "value", "default", "meaning"], rows), str(group.title)
            pieces.append(f"## {title[0].upper()}{title[1:]}\n\n{markdown(table)}")
    return "\n\n".join(pieces)


def architectures(records: Records) -> str:
    """The verdict on each type of model in transformers: right, or refused, and why."""
    record = records.file("kinds")
    groups: dict[str, list[str]] = {}
    for kind, (verdict, why) in record["kinds"].items():
        reason = re.sub(r"^.* are not (decoded here|supported): |; (name|choose) a model whose .*$", "", why)
        reason = re.sub(r" \(\w*Error.*\)$|(?<=logits are off) by \d+%", "", reason)  # which error: kinds.json says it
        reason = re.sub("of (the kind|type) [a-z_]+ keep", "keep", reason)
        groups.setdefault(f"{verdict}: {reason}" if reason else verdict, []).append(f"`{kind}`")
    table = Table("", ["verdict", "kinds", "transformers' names of them"])
    for name, kinds in sorted(
        groups.items(), key=lambda of: (of[0][:5] != "right", of[0][:6] == "unmade", -len(of[1]))
    ):
        table.add(name, str(len(kinds)), ", ".join(kinds))
    return markdown(table)


BLOCKS: dict[str, Callable[[Records], str]] = {
    "architectures": architectures,
    "layout": layout,
    "graph": graph,
    "methods": methods,
    "flags": flags,
}
