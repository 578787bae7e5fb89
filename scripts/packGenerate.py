"""Writes FOLDER/custom_generate/ with everything that `generate(custom_generate=FOLDER)` of transformers needs.

The folder works without this project, and on the hub. transformers loads generate.py and what that imports from the
same folder. So the modules of this project that it needs are copied beside it, and their imports are rewritten.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from inputs.commandLine import Parser, as_command, path
from inputs.files import ROOT
from utils import UserError

SOURCE = ROOT / "custom_generate"


def imported(file: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of each module of this project that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = ROOT / f"{node.module.replace('.', '/')}.py"
            if module.exists():
                yield node.module, module


def packed() -> dict[str, str]:
    """{file name: its text} of the folder. A module keeps the last part of its name."""
    found, files = {}, [SOURCE / "generate.py"]
    for file in files:  # It grows.
        text = file.read_text(encoding="utf-8")
        for name, module in imported(file):
            text = re.sub(rf"^(\s*)from {re.escape(name)} import", rf"\1from .{module.stem} import", text, flags=re.M)
            if module not in files:
                files.append(module)
        found[file.name] = text
    assert len(found) == len(files), "two modules have one name"
    return found | {"requirements.txt": (SOURCE / "requirements.txt").read_text(encoding="utf-8")}


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        parser = Parser(prog="python -m scripts.packGenerate", allow_abbrev=False, description=__doc__)
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.add_argument("folder", type=path)
        folder = parser.parse_args(argv).folder / "custom_generate"
        if folder.exists():
            raise UserError(f"{folder} exists already; name another folder, or remove it first")
        folder.mkdir(parents=True)
        for name, text in packed().items():
            (folder / name).write_text(text, encoding="utf-8")
        print(f"Written to {folder}")

    return as_command("packGenerate", work, "Nothing was written.")


if __name__ == "__main__":
    sys.exit(main())
