"""Render the documentation: write every table and quoted output in it from the records in docs/records/ and the code.

    python -m scripts.render            writes README.md and the like, docs/ and the pictures
    python -m scripts.render --check    changes nothing, and lists everything that is out of date

A block stands between two comments, `begin NAME` and `end NAME`; scripts/blocks.py computes its content. A comment
alone in its line begins a block of lines; one within a line begins a block of words. A picture carries the digest of
its record in a text field of its PNG file or in the comment of its GIF file: is it older than the record?
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from inputs.commandLine import as_command, script_parser
from inputs.files import ROOT, replace_file
from report.figures import draw_batches, draw_categories, draw_lossless, draw_speed, draw_sweep, draw_trainings
from scripts.blocks import BENCHMARKS, BLOCKS, CATEGORIES, TRAININGS
from scripts.drawRounds import draw_rounds
from scripts.keepRecord import Records
from utils import UserError

MARK = re.compile(r"<!-- (begin|end) ([a-zA-Z0-9.+-]+) -->")
BLOCK = re.compile(
    r"<!-- begin (?P<name>[a-zA-Z0-9.+-]+) -->(?P<content>(?:(?!<!-- (?:begin|end) ).)*?)<!-- end (?P=name) -->", re.S
)
FENCE = re.compile(r"^(```+|~~~+).*\n((?:.*\n)*?)\1[ ]*$", re.M)
FIGURES = {  # of runs
    "sweep": draw_sweep,
    "lossless": draw_lossless,
    **dict.fromkeys(("batch-copy", "batch-lookup", "batch-bundled"), draw_batches),
    **dict.fromkeys(CATEGORIES, draw_categories),
    **dict.fromkeys(BENCHMARKS, draw_speed),
}
FILES: dict[str, Callable[[Any, Path], object]] = dict.fromkeys(TRAININGS, draw_trainings)  # of records of one file
PICTURES = {f"figures/{name}.png": name for name in (*FIGURES, *FILES)} | {"figures/rounds.gif": "rounds"}
DIGEST = "Record"  # the text field of a PNG file; a GIF file has one comment


class Fault(NamedTuple):
    """A fault of a text: its line, what it is, and whether the text cannot be rendered because of it."""

    line: int
    words: str
    final: bool


def files(root: Path) -> list[Path]:
    """All texts of the documentation: README.md, its Chinese, CONTRIBUTING.md, CHANGELOG.md, and docs/."""
    return [*sorted(root.glob("[CR]*.md")), *sorted((root / "docs").rglob("*.md"))]


@cache
def content_of(name: str, records: Records) -> str:
    """The content of a block. Raises UserError if it has no renderer or no record."""
    if name not in BLOCKS:
        raise UserError("there is no renderer of this name")
    return BLOCKS[name](records)


def rendered(text: str, records: Records) -> tuple[str, list[Fault]]:
    """(the text with its blocks rendered, the faults of `text`)."""
    faults: list[Fault] = []

    def note(place: int, words: str, final: bool = True) -> None:
        faults.append(Fault(text.count("\n", 0, place) + 1, words, final))

    def render_block(block: re.Match[str]) -> str:
        name, old = block["name"], block["content"]
        begins_line = block.start() == 0 or text[block.start() - 1] == "\n"
        of_lines = begins_line and old.startswith("\n")
        if begins_line and not of_lines:
            note(block.start(), f"block {name} of words begins its line: Markdown takes such a line as HTML")
        try:
            new = content_of(name, records)
        except UserError as error:
            note(block.start(), f"block {name}: {error}")
            return block[0]
        new = f"\n{new}\n" if of_lines else new
        if new != old:
            note(block.start(), f"block {name} {'differs from its record' if old.strip() else 'is empty'}", False)
        return f"<!-- begin {name} -->{new}<!-- end {name} -->"

    whole = {place for block in BLOCK.finditer(text) for place in (block.start(), block.end("content"))}
    for mark in MARK.finditer(text):
        if mark.start() not in whole:
            begins, name = mark[1] == "begin", mark[2]
            note(mark.start(), f"block {name} has no end" if begins else f"the end of block {name} has no beginning")
    for fence in FENCE.finditer(text):
        if not fence[2].strip():
            note(fence.start(), "an empty code block", False)
    return BLOCK.sub(render_block, text), faults


def pages(records: Records) -> Iterator[tuple[Path, str, list[Fault]]]:
    """(path, text with its blocks rendered, faults in the order of their lines) of all texts of the documentation."""
    for path in files(records.root):
        text, faults = rendered(path.read_text(encoding="utf-8"), records)
        yield path, text, sorted(faults)


def digest_of(picture: str, records: Records) -> str:
    """16 hexadecimal digits that stand for the record of a picture."""
    name = PICTURES[picture]
    record = records.run(name) if name in FIGURES else records.file(name)
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def stamp_of(path: Path) -> str | None:
    """The digest in a picture; None if it has none."""
    with Image.open(path) as image:
        return image.info.get(DIGEST) or image.info.get("comment", b"").decode() or None


def fault_of(picture: str, records: Records) -> str | None:
    """The fault of a picture, or None."""
    if not (records.root / picture).exists():
        return "is missing"
    stamp = stamp_of(records.root / picture)
    try:
        return None if stamp == digest_of(picture, records) else "was drawn from another record"
    except UserError as error:
        return f"has no record: {error}"


def redraw(picture: str, records: Records) -> bool:
    """Draw a picture, unless it was drawn from this record. Returns whether it was drawn."""
    path, name, digest = records.root / picture, PICTURES[picture], digest_of(picture, records)
    if path.exists() and stamp_of(path) == digest:
        return False
    if path.suffix == ".gif":
        draw_rounds(records.file(name), path, digest)
        return True
    if name in FILES:
        FILES[name](records.file(name), path)
    else:
        FIGURES[name](records.run(name)[1], path)
    info = PngInfo()
    info.add_text(DIGEST, digest)
    with Image.open(path) as image:
        image.load()
        image.save(path, pnginfo=info, optimize=True)
    return True


def check(root: Path) -> list[str]:
    """All faults of the documentation in the folder `root`."""
    records = Records(root)
    faults = [
        f"{path.relative_to(root)}:{fault.line}: {fault.words}"
        for path, _, faults in pages(records)
        for fault in faults
    ]
    return faults + [f"{name} {fault}" for name in PICTURES if (fault := fault_of(name, records))]


def render(root: Path) -> list[str]:
    """Render the documentation in the folder `root`; returns the files that changed. Raises UserError, and then no text
    has changed."""
    records, changed = Records(root), {}
    for path, text, faults in pages(records):
        for fault in faults:
            if fault.final:
                raise UserError(f"{path.relative_to(root)}:{fault.line}: {fault.words}")
        if text != path.read_text(encoding="utf-8"):
            changed[path] = text
    for path, text in changed.items():
        replace_file(path, text)
    return [*(str(path.relative_to(root)) for path in changed), *(name for name in PICTURES if redraw(name, records))]


def work(root: Path, argv: Sequence[str] | None) -> int:
    """Parse the flags, render or check. Returns 1 if a check finds faults."""
    parser = script_parser("python -m scripts.render", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, and list what would change")
    if parser.parse_args(argv).check:
        faults = check(root)
        print(*faults or ["Everything is as its record says."], sep="\n")
        return 1 if faults else 0
    changed = render(root)
    print(*(f"Written: {name}" for name in changed), *[] if changed else ["Nothing has changed."], sep="\n")
    return 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command line `argv` on the documentation in the folder `root`; returns the exit code."""
    return as_command("render", partial(work, root, argv), "No text was written.")


if __name__ == "__main__":
    sys.exit(main())
