"""Download the texts measured on into datasets/, as folders that `datasets` loads back without a network.

python downloadData.py                                WikiText-2 (raw) and ten books of PG-19's test split
python downloadData.py pg19 --books 100               more books
python downloadData.py specbench                      the prompts of Spec-Bench, for test.py --prompts specbench
python downloadData.py wikitext --from wiki.test.raw  texts on this machine (any name, any file or folder)
python downloadData.py --list                         what is installed
"""

import argparse
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from inputs import starting

if __name__ == "__main__":  # Before the imports that take seconds.
    sys.exit(starting.run(__file__, "downloadData.data_flags"))

from huggingface_hub import constants

from inputs import files, hub
from inputs.commandLine import as_script, counted, did_you_mean, one_line, script_parser, text, whole
from inputs.files import file_errors, gigabytes, library_errors, new_folder
from inputs.texts import ENDINGS, FOLDERS, SETS, is_saved, read, read_questions
from utils import UserError

# Spec-Bench is on GitHub. The commit is the last that changed the file.
SPEC_BENCH, SPEC_BENCH_COMMIT = "hemingkx/Spec-Bench", "66230f10cb0a02aced5ef3ce1e85163c16160454"
SPEC_BENCH_URL = f"https://raw.githubusercontent.com/{SPEC_BENCH}/{SPEC_BENCH_COMMIT}/data/spec_bench/question.jsonl"
SPEC_BENCH_FILE = hub.HubFile(
    Path(SETS["specbench"]).name, 698_768, "sha256:4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
)
REPOSITORIES = {"wikitext": "Salesforce/wikitext", "pg19": "emozilla/pg19", "specbench": SPEC_BENCH}
PARQUET = {"wikitext": "wikitext-2-raw-v1/*.parquet", "pg19": "data/test-*.parquet"}  # files of these repositories
TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # {ending: the library's format}


@file_errors()
def install_data(name: str, source: str | None = None, books: int = 10, offline: bool = False) -> None:
    """Download a data set, or install texts of this machine as `name`. Its folder appears when it is complete.

    source: what to install: a text file, a table (Parquet, JSON lines, CSV) with a column 'text', a folder of such
        files, or a folder that `datasets` saved. None: the data set is downloaded, unless it is complete.
    books: how many of pg19. Raises UserError.
    """
    if name == "sample":
        raise UserError("'sample' is the data set that comes with the project; use another name")
    folder = hub.folder_in(files.DATASETS, FOLDERS.get(name, name))
    path = Path(os.path.expanduser(source)) if source else None
    repo = str(path) if path and name != "specbench" else REPOSITORIES[name]
    manifest = hub.Manifest.read(folder)
    if path is None:
        enough = manifest and (name != "pg19" or manifest.rows.get("test", 0) >= books)
        if hub.is_downloaded(name, folder, manifest.damaged(folder) if manifest and enough else None, offline):
            return
    elif not os.path.exists(path):
        raise UserError(f"--from {path}: no such file or folder")
    if folder.exists() and (path or manifest is None or manifest.repo != repo):
        earlier = manifest.repo if manifest else "elsewhere"
        raise UserError(f"{folder} already exists, with texts from {earlier}; move it away first")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # The one line says what it would report.
    datasets.disable_progress_bars()
    with new_folder(folder) as written:
        with library_errors(f"{repo} cannot be read as a data set", "choose another source"):
            if name == "specbench":
                commit, rows = write_specbench(written, path)
            elif path:
                commit, rows = "", save_splits(path, read_splits(path, written), written)
            else:
                commit, rows = write_parquet(name, written, books)
        hub.Manifest(repo, commit, rows=rows, files=hub.files_of(written)).write(written)
    print(f"{name}: complete, in {folder}")


def save_splits(name: str | Path, splits: Any, folder: Path) -> dict[str, int]:
    """Save a data set; returns {split: rows}. Raises UserError unless `inputs.texts.load_corpora` will find texts."""
    if "test" not in splits:
        raise UserError(f"{name} has no split 'test', only {', '.join(splits)}; measurements use the test split")
    for rows in splits.values():
        if getattr(rows.features.get("text"), "dtype", "") not in ("string", "large_string"):
            raise UserError(f"{name} has no column 'text' that holds text, only {', '.join(rows.column_names)}")
    splits.save_to_disk(folder)
    return {split: len(rows) for split, rows in splits.items()}


def write_parquet(name: str, folder: Path, books: int) -> tuple[str, dict[str, int]]:
    """Save the splits of WikiText-2 in its raw form, a row for each line, or the first books of PG-19's test split;
    returns the commit and {split: rows}. The hub's files are verified, and stay in `<folder>.incomplete` until all have
    come."""
    from datasets import load_dataset

    repo, pattern = REPOSITORIES[name], PARQUET[name]
    repository = hub.list_repository(repo, kind="dataset")
    tables = [file for file in repository.files if fnmatch(file.path, pattern)]
    if not tables:
        raise UserError(f"{repo} at {constants.ENDPOINT} holds no {pattern}; try another mirror")
    staging = files.DATASETS / (FOLDERS[name] + hub.UNFINISHED)
    hub.fetch(replace(repository, files=tables), staging, "dataset")
    splits = load_dataset(str((staging / pattern).parent), cache_dir=str(folder.with_name("cache")))
    if name == "pg19":
        if len(splits["test"]) < books:
            print(f"pg19: the test split has only {counted(len(splits['test']), 'book')}")
        splits["test"] = splits["test"].take(min(books, len(splits["test"])))
    rows = save_splits(name, splits, folder)
    shutil.rmtree(staging)
    return repository.commit, rows


def write_specbench(folder: Path, source: Path | None = None) -> tuple[str, dict[str, int]]:
    """Copy and verify the prompts of Spec-Bench, from GitHub or a file; returns the commit and {"test": the number}."""
    file = folder / SPEC_BENCH_FILE.path
    if source is not None:
        shutil.copyfile(source, file)
    else:
        print(f"specbench: {gigabytes(SPEC_BENCH_FILE.size)} to download from {SPEC_BENCH_URL}", flush=True)
        try:
            with urllib.request.urlopen(SPEC_BENCH_URL, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
                file.write_bytes(answer.read(SPEC_BENCH_FILE.size + 1))
        except (OSError, HTTPException) as error:
            why = f"from {urlsplit(SPEC_BENCH_URL).hostname} ({one_line(error)})"
            remedy = f"check the network, or download {SPEC_BENCH_URL} by other means and give it with --from"
            raise UserError(f"specbench could not be downloaded {why}; {remedy}") from None
    if not SPEC_BENCH_FILE.matches(file):
        remedy = f"test.py --prompts {source} reads it unchanged" if source else "try again later"
        raise UserError(f"{source or SPEC_BENCH_URL} does not have the hash of Spec-Bench's file; {remedy}")
    return SPEC_BENCH_COMMIT, {"test": len(read_questions(str(file)))}


def read_splits(source: Path, folder: Path) -> Any:
    """The texts of `--from`, a `DatasetDict`. A file with the word train, valid or validation in its name is of that
    split. All others are 'test'.

    A table gives its rows, a text is one row. folder: temporary files are written beside it.
    """
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    if is_saved(source):
        saved = load_from_disk(str(source))
        return saved if isinstance(saved, DatasetDict) else DatasetDict(test=saved)
    splits: dict[str, list[str]] = {}
    for path in [source] if source.is_file() else sorted(file for file in source.rglob("*") if file.is_file()):
        ending, name = path.suffix.lower(), path.stem.lower()
        if ending in TABLES:
            cache = str(folder.with_name("cache"))
            rows = load_dataset(TABLES[ending], data_files=str(path), split="train", cache_dir=cache)
            texts = list(rows.select_columns("text")["text"])
        elif path == source or ending in ENDINGS:
            texts = [read(path)]
        else:
            continue
        word = re.search(r"(?<![a-z])(train|valid)(ation)?(?![a-z])", name)
        split = {"train": "train", "valid": "validation"}[word[1]] if word else "test"
        splits.setdefault(split, []).extend(texts)
    if not any(str(text or "").strip() for texts in splits.values() for text in texts):
        raise UserError(f"--from {source} contains no text ({', '.join((*ENDINGS, *TABLES))})")
    return DatasetDict({split: Dataset.from_dict({"text": texts}) for split, texts in splits.items()})


def data_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser("downloadData.py", __doc__)
    names = "wikitext, pg19 (default: both), specbench, or any with --from"
    parser.add_argument("names", nargs="*", type=text, metavar="NAME", help=names)
    parser.add_argument("--books", type=whole(1, 100_000), default=10, metavar="N", help="books of PG-19 (10)")
    source = "a file or folder to install under NAME"
    parser.add_argument("--from", dest="source", type=text, metavar="PATH", help=source)
    parser.add_argument("--offline", action="store_true", help="only verify existing files")
    parser.add_argument("--list", action="store_true", help="list what is installed, and whether it is complete")
    return parser.parse_args(argv)


@as_script("downloadData.py", "What was downloaded is kept; run the command again to resume.")
def main(argv: Sequence[str] | None = None) -> None:
    args = data_flags(argv)
    names = args.names or ["wikitext", "pg19"]
    if args.source and len(args.names) != 1:
        raise UserError("--from needs one name to install the texts under: wikitext --from wiki.test.raw")
    if not args.source and (unknown := [name for name in names if name not in REPOSITORIES]):
        near = did_you_mean(unknown[0], REPOSITORIES)
        raise UserError(
            f"{unknown[0]!r} is not one of {', '.join(REPOSITORIES)}; install other texts with --from{near}"
        )
    if args.list:
        return hub.print_folders(files.DATASETS)
    for name in dict.fromkeys(names):
        install_data(name, args.source, args.books, args.offline or constants.HF_HUB_OFFLINE)
