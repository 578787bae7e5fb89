"""Download the texts measured on into datasets/, as folders that `datasets` loads back without a network.

python downloadData.py                                WikiText-2 (raw) and ten books of PG-19's test split
python downloadData.py pg19 --books 100               more books
python downloadData.py wikitext --from wiki.test.raw  texts that are here already (any name, any file or folder)
python downloadData.py --list                         what is there
"""

import argparse
import itertools
import os
import re
import shutil
import sys
from pathlib import Path

from huggingface_hub import constants
from tqdm import tqdm

from inputs.commandLine import Parser, as_command, text, whole
from inputs.escape import visible
from inputs.hub import (
    UNFINISHED,
    HubFile,
    check_disk,
    damaged,
    describe,
    digest_of,
    fetch,
    file_errors,
    gigabytes,
    hub_errors,
    lock,
    one_line,
    read_manifest,
    swap,
    to_move,
    write_manifest,
)
from inputs.texts import DATASETS, ENDINGS, FOLDERS, HEADING, read
from utils import UserError

WIKITEXT, CONFIGURATION = "Salesforce/wikitext", "wikitext-2-raw-v1"
PG19 = "emozilla/pg19"
SPLITS = {"train": "train", "valid": "validation"}
TABLES = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def folder_of(name):
    """The folder of a data set under datasets/. Raises UserError for a name that would lead elsewhere."""
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII) or name == "sample" or name.endswith(UNFINISHED):
        raise UserError(f"{name!r} cannot name a data set here: use letters, digits, '_' and '-', and not 'sample'")
    return DATASETS / FOLDERS.get(name, name)


def install(name, make, replace=False):
    """Put a data set into `datasets/<name>`.

    make(staging): returns a `DatasetDict` and what is to be recorded of its origin; what it fetched into the staging
    folder stays after an error, and is not fetched again. The data set's folder appears when it is written and
    recorded, whole. Raises UserError."""
    from datasets.exceptions import DatasetsError

    import datasets  # takes a second to import

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it reports is in the one line below
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    folder = folder_of(name)
    if folder.exists() and not replace:
        raise UserError(f"{folder} is there already; move it away first")
    staging = folder.with_name(folder.name + UNFINISHED)
    saved = staging / "saved"
    with file_errors(), lock(folder):
        try:
            shutil.rmtree(saved, ignore_errors=True)
            staging.mkdir(parents=True, exist_ok=True)
            splits, origin = make(staging)
            check(name, splits)
            check_disk(staging, sum(rows.data.nbytes for rows in splits.values()))
            splits.save_to_disk(saved)
            files = [
                HubFile(path.relative_to(saved).as_posix(), path.stat().st_size, digest_of(path, "sha256"))
                for path in sorted(saved.rglob("*"))
                if path.is_file()
            ]
            rows = {split: len(rows) for split, rows in splits.items()}
            write_manifest(saved, files, rows=rows, **origin)
            swap(saved, folder)
            shutil.rmtree(staging)
        except (DatasetsError, ValueError, TypeError, KeyError, RuntimeError) as error:
            if isinstance(error.__cause__, OSError):  # the library's cloak for a full disk
                raise error.__cause__ from None
            raise UserError(
                f"{name} cannot be read as a data set ({type(error).__name__}: {one_line(error)}); choose "
                "another source"
            ) from None
        finally:
            for unneeded in saved, staging / "cache":
                shutil.rmtree(unneeded, ignore_errors=True)
            if staging.exists() and not any(file.is_file() for file in staging.rglob("*")):
                shutil.rmtree(staging)
    print(f"{name}: whole, in {folder} ({', '.join(f'{count:,} rows of {split}' for split, count in rows.items())})")


def check(name, splits):
    """Raise UserError unless `texts.load_corpora` will find texts in a `DatasetDict`."""
    if "test" not in splits:
        raise UserError(f"{name} has no split 'test', only {', '.join(splits)}; measurements are made on that")
    for rows in splits.values():
        if "text" not in rows.column_names:
            raise UserError(f"{name} has no column 'text', only {', '.join(rows.column_names)}")
        if getattr(rows.features["text"], "dtype", "") not in ("string", "large_string"):
            raise UserError(f"{name} has a column 'text' that does not hold text")


def present(name, repo, offline, enough=lambda manifest: True):
    """Whether a data set is there, downloaded from `repo` before, and whole. Raises UserError where it may not be
    replaced."""
    folder = folder_of(name)
    manifest = read_manifest(folder)
    wrong = damaged(folder, manifest["files"]) if manifest else []
    if manifest and not wrong and enough(manifest):
        print(f"{name}: whole, in {folder}; nothing to download")
        return True
    if folder.exists() and (manifest is None or manifest["repo"] != repo):
        raise UserError(
            f"{folder} holds texts from {manifest['repo'] if manifest else 'elsewhere'}, not all that is "
            f"asked for of {repo}; move it away first"
        )
    if offline and wrong:
        raise UserError(f"{folder / wrong[0].path} is damaged; run this again without --offline to repair it")
    if offline:
        raise UserError(
            f"{name} is not in {folder}, or not enough of it, and --offline (or HF_HUB_OFFLINE) forbids to download it"
        )
    return False


def download_wikitext(offline=False):
    """WikiText-2 in its raw form, all splits: the hub's Parquet files, verified, then one row a line of text."""
    if present("wikitext", WIKITEXT, offline):
        return

    def make(staging):
        from datasets import load_dataset

        commit, files = describe(WIKITEXT, kind="dataset")
        tables = [
            file for path, file in files.items() if path.startswith(f"{CONFIGURATION}/") and path.endswith(".parquet")
        ]
        if not tables:
            raise UserError(
                f"{WIKITEXT} at {constants.ENDPOINT} holds no {CONFIGURATION}/*.parquet; try another mirror"
            )
        wrong = damaged(staging, tables)
        moving = sum(to_move(staging, file) for file in wrong)
        check_disk(staging, 5 * moving)  # the tables, and the text in them
        print(f"wikitext: {gigabytes(moving)} to download from {constants.ENDPOINT}", flush=True)
        for file in wrong:
            fetch(WIKITEXT, commit, file, staging, "dataset")
        splits = {}
        for file in tables:
            splits.setdefault(Path(file.path).name.split("-")[0], []).append(str(staging / file.path))
        return (
            load_dataset("parquet", data_files=splits, cache_dir=str(staging / "cache")),
            {"repo": WIKITEXT, "commit": commit},
        )

    install("wikitext", make, replace=True)


def download_pg19(books=10, offline=False):
    """The first `books` books of PG-19's test split, streamed: of its Parquet file only the groups of rows that hold
    them are moved."""
    if present("pg19", PG19, offline, lambda manifest: manifest["rows"].get("test", 0) >= books):
        return

    def make(staging):
        from pyarrow.dataset import ParquetFragmentScanOptions

        from datasets import Dataset, DatasetDict, load_dataset

        commit, _ = describe(PG19, kind="dataset")
        print(f"pg19: {books} books to stream from {constants.ENDPOINT}", flush=True)
        with hub_errors(PG19, commit):
            stream = load_dataset(
                PG19,
                split="test",
                revision=commit,
                streaming=True,
                fragment_scan_options=ParquetFragmentScanOptions(pre_buffer=False),
            )
            rows = list(tqdm(itertools.islice(stream, books), total=books, desc="books", disable=None, leave=False))
        if not rows:
            raise UserError(f"{PG19} at {constants.ENDPOINT} holds no book; try another mirror")
        if len(rows) < books:
            print(f"pg19: the test split has only {len(rows)} books")
        return DatasetDict(test=Dataset.from_list(rows)), {"repo": PG19, "commit": commit}

    install("pg19", make, replace=True)


def install_from(name, source):
    """Install texts that are here as `name`: a text file, a table (Parquet, JSON lines, CSV) with a column 'text', a
    folder of either, or one that `datasets` saved. A file named *train* or *valid* is that split, others 'test'."""
    from datasets import Dataset, DatasetDict, Value, concatenate_datasets, load_dataset, load_from_disk

    source = Path(os.path.expanduser(source))
    if not os.path.exists(source):
        raise UserError(f"--from {source}: no such file or folder")
    origin = {"repo": str(source), "commit": ""}

    def rows_of(path, staging):
        if path.suffix.lower() not in TABLES:
            text = read(path)
            wiki = any(HEADING.match(line) for line in text.split("\n")[:50])
            return Dataset.from_dict({"text": re.findall(r"[^\n]*\n|[^\n]+", text) if wiki else [text]})
        try:
            rows = load_dataset(
                TABLES[path.suffix.lower()], data_files=str(path), split="train", cache_dir=str(staging / "cache")
            )
        except Exception as error:  # the library raises its own types, pyarrow's, and Python's
            raise UserError(f"{path} cannot be read as a table ({type(error).__name__}: {one_line(error)})") from None
        check(path, {"test": rows})
        return rows.select_columns("text").cast_column("text", Value("string"))

    def make(staging):
        if (source / "dataset_dict.json").exists() or (source / "dataset_info.json").exists():
            saved = load_from_disk(str(source))
            return saved if isinstance(saved, DatasetDict) else DatasetDict(test=saved), origin
        splits = {}
        for path in [source] if source.is_file() else sorted(source.rglob("*")):
            if path.is_file() and path.suffix.lower() in (*ENDINGS, *TABLES) or path == source:
                split = next((split for word, split in SPLITS.items() if word in path.stem.lower()), "test")
                splits.setdefault(split, []).append(rows_of(path, staging))
        if not any(len(rows) for each in splits.values() for rows in each):
            raise UserError(f"--from {source} holds no text ({', '.join((*ENDINGS, *TABLES))})")
        return DatasetDict({split: concatenate_datasets(each) for split, each in splits.items()}), origin

    install(name, make)


def show():
    """Print every folder of datasets/: size, where from, and whether it is whole."""
    for folder in sorted(path for path in DATASETS.iterdir() if path.is_dir()) if DATASETS.is_dir() else []:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        manifest = read_manifest(folder)
        wrong = damaged(folder, manifest["files"]) if manifest else []
        state = (
            "not finished"
            if folder.name.endswith(UNFINISHED)
            else "no record"
            if not manifest
            else f"not whole: {', '.join(file.path for file in wrong)}"
            if wrong
            else "whole"
        )
        rows = ", ".join(f"{count:,} rows of {split}" for split, count in manifest["rows"].items()) if manifest else ""
        origin = f"{manifest['repo']} {manifest['commit'][:12]}".strip() if manifest else ""
        print(visible(f"{folder.name:24} {gigabytes(size):>9}  {state:12} {origin}; {rows}".rstrip(" ;"), ""))


def main(argv=None):
    parser = Parser(
        prog="downloadData.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "names", nargs="*", type=text, metavar="NAME", help="wikitext, pg19 (default: both), or any with --from"
    )
    parser.add_argument("--books", type=whole(1, 100_000), default=10, metavar="N", help="books of PG-19 (10)")
    parser.add_argument(
        "--from", dest="source", type=text, metavar="PATH", help="a file or folder to install under NAME"
    )
    parser.add_argument("--offline", action="store_true", help="only verify what is there")
    parser.add_argument("--list", action="store_true", help="show what is there, and whether it is whole")

    def work():
        args = parser.parse_args(argv)
        wanted = args.names or ["wikitext", "pg19"]
        if args.source and len(args.names) != 1:
            raise UserError("--from needs one name to install the texts under: wikitext --from wiki.test.raw")
        if not args.source and (unknown := [name for name in wanted if name not in ("wikitext", "pg19")]):
            raise UserError(f"{unknown[0]!r} is neither wikitext nor pg19; other texts are installed with --from")
        if args.list:
            with file_errors():
                return show()
        if args.source:
            return install_from(args.names[0], args.source)
        offline = args.offline or constants.HF_HUB_OFFLINE
        if "wikitext" in wanted:
            download_wikitext(offline)
        if "pg19" in wanted:
            download_pg19(args.books, offline)

    return as_command("downloadData.py", work, "What came is kept; run this again to go on.")


if __name__ == "__main__":
    sys.exit(main())
