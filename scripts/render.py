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
from functools import cache
from pathlib import Path
from typing import Any

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
FIGURES: dict[str, Callable[[Any, Path], object]] = {  # of the lines of a run, or of a record of one file
    "sweep": draw_sweep,
    "lossless": draw_lossless,
    **dict.fromkeys(("batch-copy", "batch-lookup", "batch-bundled"), draw_batches),
    **dict.fromkeys(CATEGORIES, draw_categories),
    **dict.fromkeys(BENCHMARKS, draw_speed),
    **dict.fromkeys(TRAININGS, draw_trainings),
}
PICTURES = {f"figures/{name}.png": name for name in FIGURES} | {"figures/rounds.gif": "rounds"}
Fault = tuple[int, str, bool]  # of a text: its line, what it is, whether the text cannot be rendered because of it
DIGEST = "Record"  # the text field of a PNG file; a GIF file has one comment


def documents(root: Path) -> list[Path]:
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
        faults.append((text.count("\n", 0, place) + 1, words, final))

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
    return BLOCK.sub(render_block, text), sorted(faults)


def pages(records: Records) -> Iterator[tuple[Path, str, list[Fault]]]:
    """(path, text with its blocks rendered, faults in the order of their lines) of all texts of the documentation."""
    for path in documents(records.root):
        yield path, *rendered(path.read_text(encoding="utf-8"), records)


def picture_digest(picture: str, records: Records) -> str:
    """16 hexadecimal digits that stand for the record of a picture."""
    record = records.files.get(PICTURES[picture]) or records.run(PICTURES[picture])
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:16]


def picture_fault(picture: str, records: Records) -> str | None:
    """The fault of a picture, or None."""
    if not (records.root / picture).exists():
        return "is missing"
    with Image.open(records.root / picture) as image:
        digest = image.info.get(DIGEST) or image.info.get("comment", b"").decode()
    try:
        return None if digest == picture_digest(picture, records) else "was drawn from another record"
    except UserError as error:
        return f"has no record: {error}"


def check(root: Path) -> list[str]:
    """All faults of the documentation in the folder `root`."""
    records = Records(root)
    faults = [f"{path.relative_to(root)}:{line}: {words}" for path, _, of in pages(records) for line, words, _ in of]
    return faults + [f"{picture} {fault}" for picture in PICTURES if (fault := picture_fault(picture, records))]


def render_all(root: Path) -> list[str]:
    """Render the documentation in `root`; returns the files that changed. Raises UserError; then no text is changed."""
    records, changed = Records(root), {}
    for path, text, faults in pages(records):
        for line, words, final in faults:
            if final:
                raise UserError(f"{path.relative_to(root)}:{line}: {words}")
        if text != path.read_text(encoding="utf-8"):
            changed[path] = text
    for path, text in changed.items():
        replace_file(path, text)
    pictures = [picture for picture in PICTURES if picture_fault(picture, records)]
    for picture in pictures:
        path, name, digest = root / picture, PICTURES[picture], picture_digest(picture, records)
        if path.suffix == ".gif":
            draw_rounds(records.file(name), path, digest)
            continue
        FIGURES[name](records.files.get(name) or records.run(name)[1], path)
        info = PngInfo()
        info.add_text(DIGEST, digest)
        with Image.open(path) as image:
            image.load()
            image.save(path, pnginfo=info, optimize=True)
    return [*(str(path.relative_to(root)) for path in changed), *pictures]


def render_or_check(root: Path, argv: Sequence[str] | None) -> int:
    """The exit code: 1 if a check finds faults."""
    parser = script_parser("python -m scripts.render", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, and list what would change")
    if parser.parse_args(argv).check:
        faults = check(root)
        print(*faults or ["Everything is as its record says."], sep="\n")
        return 1 if faults else 0
    changed = render_all(root)
    print(*(f"Written: {name}" for name in changed), *[] if changed else ["Nothing has changed."], sep="\n")
    return 0


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    return as_command("render", lambda: render_or_check(root, argv), "No text was written.")


if __name__ == "__main__":
    sys.exit(main())
