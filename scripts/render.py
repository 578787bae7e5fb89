"""Render the documentation: write every table and quoted output in it from the records in docs/records/ and the code.

    python -m scripts.render            writes README.md and the like, docs/ and the pictures
    python -m scripts.render --check    changes nothing, and lists everything that is out of date

A block stands between two comments, `begin NAME` and `end NAME`; scripts/blocks.py computes its content. A comment
alone in its line begins a block of lines; one within a line begins a block of words. A picture carries the digest of
its record in a text field of its PNG file or in the comment of its GIF file: is it older than the record?
"""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from inputs.commandLine import as_script, script_parser
from inputs.files import ROOT, replace_file
from report import figures
from report.runTables import measured_on
from scripts.blocks import BENCHMARKS, BLOCKS, CATEGORIES, COSTED, TRAININGS
from scripts.costFrontier import OFF_GRID, draw_cost
from scripts.drawRounds import draw_rounds
from scripts.keepRecord import CAPABILITY, MEASURED, Records, command_of
from utils import UserError

MARK = re.compile(r"<!-- (begin|end) ([a-zA-Z0-9.+-]+) -->")
BLOCK = re.compile(
    r"<!-- begin (?P<name>[a-zA-Z0-9.+-]+) -->(?P<content>(?:(?!<!-- (?:begin|end) ).)*?)<!-- end (?P=name) -->", re.S
)
FENCE = re.compile(r"^(```+|~~~+).*\n((?:.*\n)*?)\1[ ]*$", re.M)
FIGURES: dict[str, Callable[[Any], Figure]] = {  # of the lines of a run, or of a record of one file
    "sweep": figures.draw_sweep,
    "lossless": figures.draw_lossless,
    **dict.fromkeys(("batch-copy", "batch-bundled"), figures.draw_batches),
    **dict.fromkeys(CATEGORIES, figures.draw_categories),
    **dict.fromkeys(BENCHMARKS, figures.draw_speed),
    **dict.fromkeys(TRAININGS, figures.draw_trainings),
    **{f"cost-{target}": draw_cost for target in COSTED if target != OFF_GRID},
}
PICTURES = {f"figures/{name}.png": name for name in FIGURES} | {"figures/rounds.gif": "rounds"}
DIGEST = "Record"  # the text field of a PNG file; a GIF file has one comment


def documents(root: Path) -> list[Path]:
    """All texts of the documentation: README.md, its Chinese, CONTRIBUTING.md, CHANGELOG.md, and docs/."""
    return [*sorted(root.glob("[CR]*.md")), *sorted((root / "docs").rglob("*.md"))]


def rendered(text: str, records: Records) -> tuple[str, list[str], list[str]]:
    """(the text with its blocks rendered, its errors, what else differs)."""
    errors: list[str] = []
    stale: list[str] = []

    def render_block(block: re.Match[str]) -> str:
        name, old = block["name"], block["content"]
        begins_line = block.start() == 0 or text[block.start() - 1] == "\n"
        of_lines = begins_line and old.startswith("\n")
        if begins_line and not of_lines:
            errors.append(f"block {name} of words begins its line: Markdown takes such a line as HTML")
        try:
            if name not in BLOCKS:
                raise UserError("there is no renderer of this name")
            new = BLOCKS[name](records)
        except UserError as error:
            errors.append(f"block {name}: {error}")
            return block[0]
        new = f"\n{new}\n" if of_lines else new
        if new != old:
            stale.append(f"block {name} {'differs from its record' if old.strip() else 'is empty'}")
        return f"<!-- begin {name} -->{new}<!-- end {name} -->"

    result = BLOCK.sub(render_block, text)
    for mark in MARK.finditer(BLOCK.sub("", text)):
        errors.append(f"block {mark[2]} has no {'end' if mark[1] == 'begin' else 'beginning'}")
    stale += ["an empty code block" for fence in FENCE.finditer(text) if not fence[2].strip()]
    return result, errors, stale


def digest_of(picture: str, records: Records) -> str:
    """16 hexadecimal digits that stand for the record of a picture. Its code is not in them: it is not drawn."""
    record, lines = records[PICTURES[picture]]
    content = re.sub('"code": "[^"]*"', "", json.dumps((record, lines) if lines else record, sort_keys=True))
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def picture_fault(picture: str, records: Records) -> str:
    """What is wrong with a picture, or nothing."""
    try:
        with Image.open(records.root / picture) as image:
            digest = image.info.get(DIGEST) or image.info.get("comment", b"").decode()
        return "" if digest == digest_of(picture, records) else "was drawn from another record"
    except FileNotFoundError:
        return "is missing"
    except OSError:
        return "cannot be read"
    except UserError as error:
        return f"has no record: {error}"


def render(root: Path, check: bool) -> int:
    """Render the documentation in `root`, or list its faults; the exit code. Raises UserError if it cannot be rendered;
    then no text is changed."""
    records, faults, changed = Records(root), [], dict[Path, str]()
    for path in documents(root):
        old = path.read_text(encoding="utf-8")
        text, errors, stale = rendered(old, records)
        page = path.relative_to(root)
        if errors and not check:
            raise UserError(f"{page}: {errors[0]}")
        faults += [f"{page}: {words}" for words in errors + stale]
        changed |= {path: text} if text != old else {}
    pictures = {picture: fault for picture in PICTURES if (fault := picture_fault(picture, records))}
    if check:
        faults += [f"{picture} {fault}" for picture, fault in pictures.items()]
        for name in filter(records.is_stale, dict.fromkeys([*MEASURED, *records.runs, *records.files])):
            remedy = "make records" if name in MEASURED else command_of(records[name][0])
            remedy += f", on a machine of the kind {CAPABILITY[name]}" if name in CAPABILITY else ""
            faults.append(f"record {name} is of other code, weights or flags, or too few processes: {remedy}")
        print(*faults or ["Everything is as its record says."], sep="\n")
        return 1 if faults else 0
    for picture in pictures:
        name, digest = PICTURES[picture], digest_of(picture, records)
        record, lines = records[name]
        if picture.endswith(".gif"):
            draw_rounds(record, root / picture, digest)
        else:
            figure = FIGURES[name](lines or record)
            figures.write_figure(figure, root / picture, measured_on(record, lines), {DIGEST: digest})
    for path, text in changed.items():
        replace_file(path, text)
    written = [*(str(path.relative_to(root)) for path in changed), *pictures]
    print(*[f"Written: {name}" for name in written] or ["Nothing has changed."], sep="\n")
    return 0


@as_script("render", "No text was written.")
def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = script_parser("python -m scripts.render", __doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, and list what would change")
    return render(root, parser.parse_args(argv).check)


if __name__ == "__main__":
    sys.exit(main())
