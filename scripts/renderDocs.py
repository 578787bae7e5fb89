"""Render the documentation: write every table and quoted output in it from the records in docs/records/ and the code.

    python -m scripts.renderDocs            writes README.md, README.zh-CN.md, docs/*.md and their pictures
    python -m scripts.renderDocs --check    changes nothing, and says what is not as it would be written

A block stands between two comments, `begin NAME` and `end NAME`. A comment alone in its line begins a block of lines;
one within a line begins a block of words.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from inputs.commandLine import Parser, as_command
from inputs.files import ROOT, replace_file
from scripts import docsBenchmark, docsCode, docsRuns
from scripts.docsPictures import PICTURES, fault_of, redraw
from scripts.docsRecords import BENCHMARKS, Records
from scripts.docsRuns import CHINESE, ENGLISH, command_of, table
from utils import UserError

MARK = re.compile(r"<!-- (begin|end) ([a-zA-Z0-9.-]+) -->")
FENCE = re.compile(r"^(```+|~~~+).*\n((?:.*\n)*?)\1[ ]*$", re.M)


def records_table(records: Records, language: str) -> str:
    """The table of docs/records/README.md: every record, its command and its machine."""
    found = []
    for name in records.index:
        run, _ = records.run(name)
        found.append((name, f"run `{run['run']}` in results.jsonl", command_of(run), run))
    for benchmark in BENCHMARKS:
        for name, record in records.benchmarks(benchmark).items():
            found.append((name, f"{name}.json", f"python -m benchmark {record['command']}".rstrip(), record))
    rows = []
    for name, place, command, record in found:
        made_on = record["machine"]
        machine = f"{made_on['processor']}, threads: {made_on['threads']}, {record['device']}; torch {made_on['torch']}"
        rows.append([f"`{name}`", place, f"`{command}`", machine, record["time"][:10]])
    return table(["name", "record", "made by", "machine", "on"], rows)


BLOCKS = docsRuns.BLOCKS | docsBenchmark.BLOCKS | docsCode.BLOCKS | {"records": records_table}


class Block(NamedTuple):
    """A block of a text: its name, its content's place in the text, the line it begins in, and whether it is a block of
    lines."""

    name: str
    start: int
    end: int
    line: int
    of_lines: bool


def files(root: Path) -> list[Path]:
    """All texts of the documentation."""
    return [*sorted(root.glob("README*.md")), *sorted((root / "docs").rglob("*.md"))]


def language_of(path: Path) -> str:
    """The language of a text, by its name."""
    return CHINESE if path.name.endswith(".zh-CN.md") else ENGLISH


def blocks_of(text: str) -> tuple[list[Block], list[tuple[int, str]]]:
    """(the blocks of a text, its faults as (line, words))."""
    found: list[Block] = []
    faults: list[tuple[int, str]] = []
    opened: tuple[str, int, int] | None = None  # name, where the content starts, line
    for mark in MARK.finditer(text):
        line, name = text.count("\n", 0, mark.start()) + 1, mark[2]
        if mark[1] == "begin":
            if opened:
                faults.append((opened[2], f"block {opened[0]} has no end"))
            opened = name, mark.end(), line
        elif not opened or opened[0] != name:
            faults.append((line, f"the end of block {name} has no beginning"))
        else:
            before = text[: opened[1]].rsplit("\n", 1)[-1]
            of_lines = not MARK.sub("", before, count=1) and text[opened[1]] == "\n"
            if not of_lines and before.startswith("<!--"):
                faults.append((line, f"block {name} of words begins its line: Markdown takes such a line as HTML"))
            found.append(Block(name, opened[1], mark.start(), opened[2], of_lines))
            opened = None
    if opened:
        faults.append((opened[2], f"block {opened[0]} has no end"))
    return found, faults


@cache
def content_of(name: str, records: Records, language: str) -> str:
    """What a block holds. Raises UserError if it has no renderer or no record."""
    if name not in BLOCKS:
        raise UserError("there is no renderer of this name")
    content = BLOCKS[name](records, language)
    if not content.strip():
        raise UserError("its record gives nothing to show")
    return content


def rendered(block: Block, records: Records, language: str) -> str:
    """What stands between the comments of a block. Raises UserError as `content_of`."""
    content = content_of(block.name, records, language)
    return f"\n{content}\n" if block.of_lines else content


def faults_of(path: Path, records: Records) -> list[str]:
    """Everything in a text that is not as it would be written."""
    text = path.read_text(encoding="utf-8")
    blocks, faults = blocks_of(text)
    for fence in FENCE.finditer(text):
        if not fence[2].strip():
            faults.append((text.count("\n", 0, fence.start()) + 1, "an empty code block"))
    for block in blocks:
        content = text[block.start : block.end]
        try:
            expected = rendered(block, records, language_of(path))
        except UserError as error:
            faults.append((block.line, f"block {block.name}: {error}"))
            continue
        if not content.strip():
            faults.append((block.line, f"block {block.name} is empty"))
        elif content != expected:
            faults.append((block.line, f"block {block.name} differs from its record"))
    name = path.relative_to(records.root)
    return [f"{name}:{line}: {words}" for line, words in sorted(faults)]


def check(root: Path) -> list[str]:
    """All faults of the documentation in the folder `root`."""
    records = Records(root)
    faults = [fault for path in files(root) for fault in faults_of(path, records)]
    for name in PICTURES:
        try:
            fault = fault_of(name, records)
        except UserError as error:
            fault = f"has no record: {error}"
        if fault:
            faults.append(f"{name} {fault}")
    return faults


def written(path: Path, records: Records) -> str:
    """A text with all its blocks rendered. Raises UserError for the first fault that rendering cannot mend."""
    text = path.read_text(encoding="utf-8")
    blocks, faults = blocks_of(text)
    if faults:
        raise UserError(f"{path.relative_to(records.root)}:{faults[0][0]}: {faults[0][1]}")
    for block in reversed(blocks):  # From the end, so that the places before stay right.
        text = text[: block.start] + rendered(block, records, language_of(path)) + text[block.end :]
    return text


def render(root: Path) -> list[str]:
    """Render the documentation in the folder `root`; returns the files that changed. Raises UserError, and then no text
    has changed."""
    records = Records(root)
    texts = {path: written(path, records) for path in files(root)}
    changed = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    for path in changed:
        replace_file(path, texts[path])
    drawn = [name for name in PICTURES if redraw(name, records)]
    return [*(str(path.relative_to(root)) for path in changed), *drawn]


def work(root: Path, argv: Sequence[str] | None) -> int:
    """Parse the flags, render or check. Returns 1 if a check finds faults."""
    parser = Parser(
        prog="python -m scripts.renderDocs",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="change nothing, and say what would change")
    if parser.parse_args(argv).check:
        faults = check(root)
        print(*faults or ["Everything is as its record says."], sep="\n")
        return 1 if faults else 0
    changed = render(root)
    print(*(f"Written: {name}" for name in changed), *[] if changed else ["Nothing has changed."], sep="\n")
    return 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line `argv` on the documentation in the folder `root`; returns the exit code."""
    return as_command("renderDocs", partial(work, root, argv), "No text was written.")


if __name__ == "__main__":
    sys.exit(main())
