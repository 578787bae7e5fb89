"""Download the texts measured on into datasets/, as folders that `datasets` loads back without a network.

python downloadData.py                                WikiText-2 (raw) and ten books of PG-19's test split
python downloadData.py pg19 --books 100               more books
python downloadData.py specbench                      the prompts of Spec-Bench, for test.py --prompts specbench
python downloadData.py wikitext --from wiki.test.raw  texts that are here already (any name, any file or folder)
python downloadData.py --list                         what is there
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from inputs import starting

if __name__ == "__main__":  # Before the imports that take seconds.
    sys.exit(starting.run(__file__, "downloadData"))

from huggingface_hub import constants

from inputs import files
from inputs.commandLine import as_command, counted, one_line, script_parser, text, whole
from inputs.files import file_errors, gigabytes, lock_folder, replace_folder
from inputs.hub import check_disk, fetch, hub_errors, list_repository, missing_bytes
from inputs.manifest import (
    UNFINISHED,
    HubFile,
    Manifest,
    damaged,
    digest_of,
    is_whole,
    print_folders,
    read_manifest,
    write_manifest,
)
from inputs.progress import followed
from inputs.prompts import SETS, read_questions
from inputs.texts import ENDINGS, FOLDERS, HEADING, is_saved, read
from utils import UserError

if TYPE_CHECKING:  # Importing it takes a second.
    from datasets import Dataset, DatasetDict

WIKITEXT, CONFIGURATION = "Salesforce/wikitext", "wikitext-2-raw-v1"
PG19 = "emozilla/pg19"
# Spec-Bench is on GitHub. The commit is the last that changed the file.
SPEC_BENCH, SPEC_BENCH_COMMIT = "hemingkx/Spec-Bench", "66230f10cb0a02aced5ef3ce1e85163c16160454"
SPEC_BENCH_URL = f"https://raw.githubusercontent.com/{SPEC_BENCH}/{SPEC_BENCH_COMMIT}/data/spec_bench/question.jsonl"
SPEC_BENCH_FILE = HubFile(
    Path(SETS["specbench"]).name, 698_768, "sha256:4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
)
SPLITS = {"train": "train", "valid": "validation"}  # {part of a file's name: its split}
KNOWN = "wikitext", "pg19", "specbench"
TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}  # {ending: the library's format}


def folder_of(name: str) -> Path:
    """The folder of a data set under datasets/. Raises UserError for a name that leads elsewhere."""
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name == "sample" or name.endswith(UNFINISHED):
        raise UserError(f"{name!r} cannot name a data set here: use letters, digits, '_' and '-', and not 'sample'")
    return files.DATASETS / FOLDERS.get(name, name)


def is_installed(
    name: str, repo: str, offline: bool, is_enough: Callable[[Manifest], bool] = lambda manifest: True
) -> bool:
    """Whether a data set was downloaded from `repo` before and is whole. Raises UserError if it is not, and may not be
    replaced or downloaded."""
    folder = folder_of(name)
    manifest = read_manifest(folder)
    broken = damaged(folder, manifest.files) if manifest else []
    if manifest and not broken and is_enough(manifest):
        print(f"{name}: whole, in {folder}; nothing to download")
        return True
    if folder.exists() and (manifest is None or manifest.repo != repo):
        raise UserError(
            f"{folder} holds texts from {manifest.repo if manifest else 'elsewhere'}, not all that is "
            f"asked for of {repo}; move it away first"
        )
    if offline and broken:
        raise UserError(f"{folder / broken[0].path} is damaged; run this again without --offline to repair it")
    if offline:
        raise UserError(
            f"{name} is not in {folder}, or not enough of it, and --offline (or HF_HUB_OFFLINE) forbids to download it"
        )
    return False


@contextmanager
def installation(name: str) -> Iterator[Path]:
    """A folder to make the data set `name` in; the block calls `install`. Raises UserError for what goes broken.

    The folder is `<the data set's>.incomplete`. Files that are downloaded into it stay there after an error, so they
    are not fetched again; everything else is removed.
    """
    folder = folder_of(name)
    staging = folder.with_name(folder.name + UNFINISHED)
    with file_errors(), lock_folder(folder), library_errors(name):
        try:
            shutil.rmtree(staging / "saved", ignore_errors=True)
            staging.mkdir(parents=True, exist_ok=True)
            yield staging
        finally:
            for unneeded in "saved", "cache":
                shutil.rmtree(staging / unneeded, ignore_errors=True)
            if staging.exists() and not any(path.is_file() for path in staging.rglob("*")):
                shutil.rmtree(staging)
    if manifest := read_manifest(folder):
        print(f"{name}: whole, in {folder} ({row_counts(manifest.rows)})")


def install(name: str, staging: Path, splits: DatasetDict, repo: str, commit: str) -> None:
    """Save a data set as the folder `datasets/<name>`, which appears when it is complete."""
    check_splits(name, splits)
    check_disk(staging, sum(rows.data.nbytes for rows in splits.values()))
    splits.save_to_disk(staging / "saved")
    finish(name, staging, {split: len(rows) for split, rows in splits.items()}, repo, commit)


def finish(name: str, staging: Path, rows: dict[str, int], repo: str, commit: str) -> None:
    """Give the folder `staging`/saved its manifest and the name of the data set."""
    saved = staging / "saved"
    hashes = [
        HubFile(path.relative_to(saved).as_posix(), path.stat().st_size, digest_of(path, "sha256"))
        for path in sorted(saved.rglob("*"))
        if path.is_file()
    ]
    write_manifest(saved, hashes, rows=rows, repo=repo, commit=commit)
    replace_folder(folder_of(name), saved)
    shutil.rmtree(staging)


@contextmanager
def library_errors(name: str) -> Iterator[None]:
    """Raise the errors of the `datasets` library as UserErrors, and silence its log: the one line says what it would
    report."""
    from datasets.exceptions import DatasetsError

    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    except (DatasetsError, ValueError, TypeError, KeyError, RuntimeError) as error:
        if isinstance(error.__cause__, OSError):  # The library wraps the error of a full disk.
            raise error.__cause__ from None
        raise UserError(
            f"{name} cannot be read as a data set ({type(error).__name__}: {one_line(error)}); choose another source"
        ) from None


def check_splits(name: str | Path, splits: DatasetDict | dict[str, Dataset]) -> None:
    """Raise UserError unless `inputs.texts.load_corpora` will find texts in a data set."""
    if "test" not in splits:
        raise UserError(f"{name} has no split 'test', only {', '.join(splits)}; measurements are made on that")
    for rows in splits.values():
        if "text" not in rows.column_names:
            raise UserError(f"{name} has no column 'text', only {', '.join(rows.column_names)}")
        if getattr(rows.features["text"], "dtype", "") not in ("string", "large_string"):
            raise UserError(f"{name} has a column 'text' that does not hold text")


def download_wikitext(offline: bool = False) -> None:
    """Download WikiText-2 in its raw form, all splits, unless it is there: the hub's Parquet files, with one line of
    text in each row. The files are verified."""
    if is_installed("wikitext", WIKITEXT, offline):
        return
    from datasets import load_dataset

    with installation("wikitext") as staging:
        commit, repository = list_repository(WIKITEXT, kind="dataset")
        tables = [
            file
            for path, file in repository.items()
            if path.startswith(f"{CONFIGURATION}/") and path.endswith(".parquet")
        ]
        if not tables:
            raise UserError(
                f"{WIKITEXT} at {constants.ENDPOINT} holds no {CONFIGURATION}/*.parquet; try another mirror"
            )
        to_fetch = damaged(staging, tables)
        missing = sum(missing_bytes(staging, file) for file in to_fetch)
        check_disk(staging, 5 * missing)  # Room for the tables and for the text in them.
        print(f"wikitext: {gigabytes(missing)} to download from {constants.ENDPOINT}", flush=True)
        for file in to_fetch:
            fetch(WIKITEXT, commit, file, staging, "dataset")
        paths: dict[str, list[str]] = {}
        for file in tables:
            paths.setdefault(Path(file.path).name.split("-")[0], []).append(str(staging / file.path))
        splits = load_dataset("parquet", data_files=paths, cache_dir=str(staging / "cache"))
        install("wikitext", staging, splits, WIKITEXT, commit)


def download_pg19(books: int = 10, offline: bool = False) -> None:
    """Download the first `books` books of PG-19's test split, unless they are there. They are streamed: only the row
    groups of the Parquet file that hold them are fetched."""
    if is_installed("pg19", PG19, offline, lambda manifest: manifest.rows.get("test", 0) >= books):
        return
    from pyarrow.dataset import ParquetFragmentScanOptions

    from datasets import Dataset, DatasetDict, load_dataset

    with installation("pg19") as staging:
        commit, _ = list_repository(PG19, kind="dataset")
        print(f"pg19: {counted(books, 'book')} to stream from {constants.ENDPOINT}", flush=True)
        with hub_errors(PG19, commit):
            stream = load_dataset(
                PG19,
                split="test",
                revision=commit,
                streaming=True,
                fragment_scan_options=ParquetFragmentScanOptions(pre_buffer=False),
            )
            rows = list(followed(itertools.islice(stream, books), "books", books))
        if not rows:
            raise UserError(f"{PG19} at {constants.ENDPOINT} holds no book; try another mirror")
        if len(rows) < books:
            print(f"pg19: the test split has only {counted(len(rows), 'book')}")
        install("pg19", staging, DatasetDict(test=Dataset.from_list(rows)), PG19, commit)


def download_specbench(offline: bool = False, source: Path | None = None) -> None:
    """Install the prompts of Spec-Bench, unless they are there: from GitHub, or from the file `source`. The content is
    verified."""
    if is_installed("specbench", SPEC_BENCH, offline):
        return
    with installation("specbench") as staging:
        file = staging / "saved" / SPEC_BENCH_FILE.path
        file.parent.mkdir()
        if source is not None:
            shutil.copyfile(source, file)
        else:
            print(f"specbench: {gigabytes(SPEC_BENCH_FILE.size)} to download from {SPEC_BENCH_URL}", flush=True)
            file.write_bytes(fetch_specbench())
        if not is_whole(file, SPEC_BENCH_FILE):
            raise UserError(
                f"{source or SPEC_BENCH_URL} has another hash than Spec-Bench's file; "
                + (f"test.py --prompts {source} reads it as it is" if source else "try again later")
            )
        finish("specbench", staging, {"test": len(read_questions(str(file)))}, SPEC_BENCH, SPEC_BENCH_COMMIT)


def fetch_specbench() -> bytes:
    """The content of Spec-Bench's file, as far as it is as long as it should be. Raises UserError if it does not
    come."""
    try:
        with urllib.request.urlopen(SPEC_BENCH_URL, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as answer:
            return answer.read(SPEC_BENCH_FILE.size + 1)
    except (OSError, HTTPException) as error:
        raise UserError(
            f"specbench does not come from {urlsplit(SPEC_BENCH_URL).hostname} ({one_line(error)}); check the network, "
            f"or get {SPEC_BENCH_URL} elsewhere and give it with --from"
        ) from None


def install_from(name: str, source: str) -> None:
    """Install texts of this machine as `name`: a text file, a table (Parquet, JSON lines, CSV) with a column 'text', a
    folder of such files, or a folder that `datasets` saved."""
    path = Path(os.path.expanduser(source))
    if not os.path.exists(path):
        raise UserError(f"--from {path}: no such file or folder")
    if folder_of(name).exists():
        raise UserError(f"{folder_of(name)} is there already; move it away first")
    if name == "specbench":
        return download_specbench(source=path)
    with installation(name) as staging:
        install(name, staging, read_splits(path, staging / "cache"), str(path), "")


def read_splits(source: Path, cache: Path) -> DatasetDict:
    """The data set of `install_from`. A file named *train* or *valid* is that split, all others are 'test'."""
    from datasets import DatasetDict, concatenate_datasets, load_from_disk

    if is_saved(source):
        saved = load_from_disk(str(source))
        return saved if isinstance(saved, DatasetDict) else DatasetDict(test=saved)
    splits: dict[str, list[Dataset]] = {}
    for path in [source] if source.is_file() else sorted(source.rglob("*")):
        if path.is_file() and path.suffix.lower() in (*ENDINGS, *TABLES) or path == source:
            split = next((split for word, split in SPLITS.items() if word in path.stem.lower()), "test")
            splits.setdefault(split, []).append(read_rows(path, cache))
    if not any(map(len, itertools.chain.from_iterable(splits.values()))):
        raise UserError(f"--from {source} holds no text ({', '.join((*ENDINGS, *TABLES))})")
    return DatasetDict({split: concatenate_datasets(parts) for split, parts in splits.items()})


def read_rows(path: Path, cache: Path) -> Dataset:
    """The rows of a file: those of a table, the lines of a text in WikiText's format, or one row for any other text."""
    from datasets import Dataset, Value, load_dataset

    if path.suffix.lower() not in TABLES:
        content = read(path)
        wiki = any(HEADING.match(line) for line in content.split("\n")[:50])
        return Dataset.from_dict({"text": re.findall(r"[^\n]*\n|[^\n]+", content) if wiki else [content]})
    try:
        rows = load_dataset(TABLES[path.suffix.lower()], data_files=str(path), split="train", cache_dir=str(cache))
    except Exception as error:  # The library raises types of its own, of pyarrow and of Python.
        raise UserError(f"{path} cannot be read as a table ({type(error).__name__}: {one_line(error)})") from None
    check_splits(path, {"test": rows})
    return rows.select_columns("text").cast_column("text", Value("string"))


def row_counts(rows: dict[str, int]) -> str:
    """The number of rows of each split, as a person reads it."""
    return ", ".join(f"{count:,} rows of {split}" for split, count in rows.items())


def show_data_sets() -> None:
    """Print a line for each folder of datasets/: its size, whether it is whole, where it is from, and its rows."""

    def origin(manifest: Manifest) -> str:
        return f"{manifest.repo} {manifest.commit[:12]}".strip() + f"; {row_counts(manifest.rows)}".rstrip("; ")

    print_folders(files.DATASETS, origin, ("no record", ""))


def read_flags(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = script_parser("downloadData.py", __doc__)
    parser.add_argument(
        "names",
        nargs="*",
        type=text,
        metavar="NAME",
        help="wikitext, pg19 (default: both), specbench, or any with --from",
    )
    parser.add_argument("--books", type=whole(1, 100_000), default=10, metavar="N", help="books of PG-19 (10)")
    parser.add_argument(
        "--from", dest="source", type=text, metavar="PATH", help="a file or folder to install under NAME"
    )
    parser.add_argument("--offline", action="store_true", help="only verify what is there")
    parser.add_argument("--list", action="store_true", help="show what is there, and whether it is whole")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    def work() -> None:
        args = read_flags(argv)
        names = args.names or ["wikitext", "pg19"]
        if args.source and len(args.names) != 1:
            raise UserError("--from needs one name to install the texts under: wikitext --from wiki.test.raw")
        if not args.source and (unknown := [name for name in names if name not in KNOWN]):
            raise UserError(f"{unknown[0]!r} is none of {', '.join(KNOWN)}; other texts are installed with --from")
        offline = args.offline or constants.HF_HUB_OFFLINE
        if args.list:
            return show_data_sets()
        if args.source:
            return install_from(args.names[0], args.source)
        if "wikitext" in names:
            download_wikitext(offline)
        if "pg19" in names:
            download_pg19(args.books, offline)
        if "specbench" in names:
            download_specbench(offline)

    return as_command("downloadData.py", work, "What came is kept; run this again to go on.")
