"""Texts to measure on: the bundled samples, WikiText-2 and PG-19 from `datasets/`, or any file or folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from inputs import files
from inputs.commandLine import one_line
from inputs.manifest import MANIFEST
from utils import UserError

T = TypeVar("T")

FOLDERS = {"sample": "sample", "wikitext": "wikitext", "pg19": "pg19_sample"}  # {data set: folder of datasets/}
ENDINGS = (".txt", ".raw", ".tokens")
HEADING = re.compile(r"^ *= .* = *$")


@dataclass
class Corpus:
    """A named collection of documents (whole texts)."""

    name: str
    documents: list[str]

    def passages(self, least: int, reach: int | None = None) -> list[str]:
        """The passages of at least `least` characters, in order.

        A passage is a line of a document in WikiText's format, headings left out, or a paragraph of any other document.
        reach: each passage is extended by the text that follows, up to this many characters or the document's end.
        """
        passages = []
        for document in self.documents:
            wiki = re.search(r"^ = [^=\n]* = $", document, re.M)
            gaps = [gap.span() for gap in re.finditer(r"\n" if wiki else r"\n\s*\n", document)]
            start = 0
            for end, following in (*gaps, (len(document), len(document))):
                passage = document[start:end]
                if len(passage.strip()) >= least and not HEADING.match(passage):
                    passages.append(document[start : start + reach] if reach else passage)
                start = following
        return passages


def load_corpora(name: str, books: int | None = None) -> list[Corpus]:
    """The corpora of a data set, at least one, each with at least one document that is not blank.

    name: 'sample', 'wikitext', 'pg19', another data set installed in `datasets/`, or the path of a text file, of a
        folder of text files, or of a folder written by the `datasets` library's `save_to_disk` with a column `text`
        (its split `test`, if it has splits).
    books: the most documents of each corpus.
    """
    path = find_texts(name)
    label = name if name in FOLDERS else path.name
    if path.is_file():
        corpora = [Corpus(path.name, [read(path)])]
    elif is_saved(path):
        corpora = [Corpus(label, read_saved(path))]
    else:
        texts = sorted(file for file in path.rglob("*") if file.suffix.lower() in ENDINGS and file.is_file())
        if name == "sample":  # Two styles, reported separately. Any other folder is one corpus of many documents.
            corpora = [Corpus(file.name, [read(file)]) for file in texts]
        else:
            corpora = [Corpus(label, [read(file) for file in texts])]
    for corpus in corpora:
        corpus.documents = [document for document in corpus.documents if document.strip()][:books]
    corpora = [corpus for corpus in corpora if corpus.documents]
    if not corpora:
        raise UserError(f"{path} contains no text; give non-empty {', '.join(ENDINGS)} files or a saved data set")
    return corpora


def find_texts(name: str) -> Path:
    """The file or folder of a data set. Raises UserError if it does not exist."""
    if name in FOLDERS or os.path.isfile(files.DATASETS / name / MANIFEST):
        folder = FOLDERS.get(name, name)
        path = files.DATASETS / folder
        if not path.exists():
            raise UserError(
                f"the data set {name!r} is not in datasets/{FOLDERS[name]}; get it with downloadData.py "
                f"({name}), or use --dataset sample"
            )
        return path
    path = Path(os.path.abspath(os.path.expanduser(name)))
    if not os.path.exists(path):
        raise UserError(f"unknown data set {name!r}: it is not one of {', '.join(FOLDERS)}, and no such path exists")
    return path


def read(path: Path) -> str:
    """The content of a text file. Raises UserError if it is not UTF-8 text."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # Project Gutenberg's files begin with a byte order mark.
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as UTF-8 text ({error}); convert it, or name another") from None
    if "\0" in text:
        raise UserError(f"{path} is a binary file; name a text file")
    return text


def parse_lines(flag: str, file: Path, fields: str, parse: Callable[[int, Any], T]) -> list[T]:
    """`parse(number of the line, its JSON value)` of each line of a file that is not blank. Raises UserError, which
    names the flag and the line, for a line that is not JSON or of which `parse` raises ValueError.

    fields: what a line has, in words.
    """
    lines = [(number, line) for number, line in enumerate(read(file).split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{flag} {file} is empty; write one JSON object a line, with {fields}")
    parsed = []
    for number, line in lines:
        try:
            parsed.append(parse(number, json.loads(line)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{flag} {file}, line {number}: this is not JSON ({one_line(error)})") from None
        except ValueError as error:
            raise UserError(f"{flag} {file}, line {number}: {one_line(error)}") from None
    return parsed


def is_saved(path: Path) -> bool:
    """Whether the `datasets` library's `save_to_disk` wrote this folder."""
    return any(os.path.exists(path / name) for name in ("dataset_dict.json", "dataset_info.json"))


def read_saved(path: Path) -> list[str]:
    """The documents of a folder written by `save_to_disk`. WikiText has one line in each row: its rows are joined."""
    from datasets import load_from_disk  # Importing it takes a second, and most runs do not need it.

    try:
        saved = load_from_disk(str(path))
        rows = (saved["test"] if hasattr(saved, "keys") else saved)["text"]
        rows = [row for row in rows if row is not None]
        if not any(HEADING.match(row.rstrip("\n")) for row in rows[:50]):
            return rows
        return [("" if any(row.endswith("\n") for row in rows) else "\n").join(rows)]
    except Exception as error:
        raise UserError(
            f"{path} is not a data set with a column 'text' and, if it has splits, a split 'test' "
            f"({one_line(error)}); save one, or name a text file"
        ) from None
