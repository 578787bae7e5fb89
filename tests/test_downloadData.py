"""downloadData.py against a hub on localhost, and with texts that are here already."""

import io
import random

import pyarrow
import pyarrow.parquet
import pytest
from downloads import assert_error, limit_disk
from huggingface_hub import constants
from localHub import Repository

import datasets
import downloadData
from datasets import Dataset, DatasetDict, load_from_disk
from inputs import files
from inputs.texts import load_corpora

LINE = " Robert Boulter is an English film , television and theatre actor . " * 10
ROWS = ["", " = Robert Boulter = \n", "", f"{LINE}\n", f" {LINE}\n"]
TABLES = [f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for split in ("test", "train", "validation")]


def table(**columns):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DATASETS", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    return tmp_path / "datasets"


@pytest.fixture
def both(hub, folder, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.url)
    card = {"README.md": b"---\nlicense: mit\n---\n"}
    wiki = {path: table(text=ROWS) for path in (*TABLES, "wikitext-103-v1/test-00000-of-00001.parquet")}
    hub.datasets["Salesforce/wikitext"] = Repository(card | wiki)
    texts = [f"Book {i}. " + "word " * 200 for i in range(15)]
    books = table(short_book_title=[f"Title {i}" for i in range(15)], text=texts)
    hub.datasets["emozilla/pg19"] = Repository(card | {"data/test-00000-of-00001.parquet": books})
    return folder


def run(*arguments):
    """The exit code of downloadData.py."""
    return downloadData.main([*arguments])


def assert_data_error(capsys, *words, arguments=()):
    assert_error(capsys, *words, arguments=arguments, script=downloadData)


def test_both_come_and_load_back_offline(hub, both, capsys):
    assert run() == 0
    assert {path for path in hub.served if "wikitext" in path} == set(TABLES)  # and not the large one's
    rows = {split: len(rows) for split, rows in load_from_disk(both / "wikitext").items()}
    assert rows == {"test": 5, "train": 5, "validation": 5}
    hub.down = True
    (wiki,), (books,) = load_corpora("wikitext"), load_corpora("pg19")
    assert wiki.documents == ["".join(ROWS)] and wiki.passages(500) == [LINE, f" {LINE}"]
    assert len(books.documents) == 10 and books.documents[9].startswith("Book 9.")
    assert not list(both.glob("*.incomplete"))


def test_a_second_run_moves_nothing_and_fewer_books_need_nothing(hub, both, capsys):
    assert run("--books", "3") == 0 and len(load_corpora("pg19")[0].documents) == 3
    hub.forget()
    assert run("--books", "3") == run("--books", "2") == run("--books", "1", "--offline") == 0 and hub.requests == []
    assert_data_error(capsys, "incomplete", "--offline", arguments=("pg19", "--books", "4", "--offline"))
    assert run("pg19", "--books", "40") == 0 and "only 15 books" in capsys.readouterr().out
    assert len(load_corpora("pg19")[0].documents) == 15


def test_a_cut_download_goes_on_and_a_damaged_one_is_made_again(hub, both, capsys, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 100)
    hub.cut_after = 1200
    size = hub.datasets["Salesforce/wikitext"].size(TABLES[0])
    assert_data_error(capsys, hub.url, "resumes", arguments=("wikitext",))
    assert not (both / "wikitext").exists()
    assert run("--list") == 0 and "not finished" in capsys.readouterr().out
    hub.cut_after = None
    hub.forget()
    assert run("wikitext") == 0 and hub.served[TABLES[0]] == size - 1200
    file = next((both / "wikitext" / "test").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-1])
    assert run("--list") == 0 and f"not whole: test/{file.name}" in capsys.readouterr().out
    assert_data_error(capsys, "damaged", "without --offline", arguments=("wikitext", "--offline"))
    assert run("wikitext") == 0 and run("wikitext", "--offline") == 0


def test_what_cannot_be_had_is_one_line(hub, both, capsys, monkeypatch):
    assert_data_error(capsys, "--offline", arguments=("--offline",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_data_error(capsys, "HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for books in "0", "x":
        assert_data_error(capsys, "--books", arguments=("pg19", "--books", books))
    assert_data_error(capsys, "nonsense", "--from", arguments=("nonsense",))
    books, wiki = hub.datasets["emozilla/pg19"], hub.datasets["Salesforce/wikitext"]
    books.files["data/test-00000-of-00001.parquet"] = b"PAR1 and then nothing"
    assert_data_error(capsys, "pg19", arguments=("pg19",))
    books.files["data/test-00000-of-00001.parquet"] = table(body=["a book"])
    assert_data_error(capsys, "no column 'text'", "only body", arguments=("pg19",))
    books.token = "secret"
    assert_data_error(capsys, "HF_TOKEN", "emozilla/pg19", arguments=("pg19",))
    hub.replace[TABLES[0]] = b"1" * wiki.size(TABLES[0])
    assert_data_error(capsys, "hash", arguments=("wikitext",))
    hub.forget()
    with monkeypatch.context() as patch:
        limit_disk(patch, 5000)
        assert_data_error(capsys, "free some space", arguments=("wikitext",))
        assert hub.moved == 0
    for path in TABLES:
        del wiki.files[path]
    assert_data_error(capsys, "wikitext-2-raw-v1", "mirror", arguments=("wikitext",))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert_data_error(capsys, "http://127.0.0.1:9", "HF_ENDPOINT", "--offline")
    assert not [path for path in both.glob("*") if not path.name.endswith(".incomplete")]


def test_a_wikitext_file_becomes_what_the_hub_has(folder, tmp_path, capsys):
    file = tmp_path / "wiki.test.raw"
    file.write_text(" \n = Robert Boulter = \n \n" + f"{LINE}\n {LINE}\n")
    assert run("wikitext", "--from", str(file)) == 0
    (corpus,) = load_corpora("wikitext")
    assert corpus.documents == [file.read_text()] and corpus.passages(500) == [LINE, f" {LINE}"]
    assert run("--list") == 0 and "wiki.test.raw; 5 rows of test" in capsys.readouterr().out
    assert_data_error(capsys, "already exists", "move it away", arguments=("wikitext", "--from", str(file)))


def test_texts_that_were_installed_are_never_replaced_by_a_download(hub, both, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("My book.")
    assert run("pg19", "--from", str(tmp_path / "mine.txt")) == 0
    assert_data_error(capsys, "mine.txt", "move it away", arguments=("pg19",))
    assert load_corpora("pg19")[0].documents == ["My book."] and run("pg19", "--books", "1") == 0


def test_of_a_split_in_groups_of_rows_only_what_is_read_moves(hub, both):
    buffer = io.BytesIO()
    books = pyarrow.table({"text": [f"Book {i} " + random.Random(i).randbytes(200_000).hex() for i in range(60)]})
    pyarrow.parquet.write_table(books, buffer, row_group_size=5, compression="none")
    hub.datasets["emozilla/pg19"].files["data/test-00000-of-00001.parquet"] = buffer.getvalue()
    assert run("pg19", "--books", "3") == 0 and 5 * 400_000 <= hub.moved < 0.75 * len(buffer.getvalue())


def test_texts_of_every_form_are_installed_under_any_name(folder, tmp_path):
    source = tmp_path / "mine"
    source.mkdir()
    for name, text in {
        "one.txt": "A first book.\n\nIt has two paragraphs.",
        "two.jsonl": '{"text": "line 0"}\n{"text": "line 1"}\n',
        "three.csv": "text,year\nfrom a table,1999\n",
        "train.txt": "not for a test",
    }.items():
        (source / name).write_text(text)
    (source / "four.parquet").write_bytes(table(text=["from parquet"]))
    assert run("my-texts", "--from", str(source)) == 0
    (corpus,) = load_corpora("my-texts")
    first = "A first book.\n\nIt has two paragraphs."
    assert sorted(corpus.documents) == [first, "from a table", "from parquet", "line 0", "line 1"]
    DatasetDict(test=Dataset.from_dict({"text": ["saved"]})).save_to_disk(tmp_path / "saved")
    assert run("again", "--from", str(tmp_path / "saved")) == 0 and load_corpora("again")[0].documents == ["saved"]


@pytest.mark.parametrize("name", ["../evil", "/etc/x", "", ".", "..", "a/b", "sample", "a b", "x.incomplete", "-x"])
def test_a_name_that_would_leave_the_folder_is_refused(folder, text_file, capsys, name):
    assert_data_error(capsys, arguments=("--from", str(text_file), "--", name))
    assert not folder.exists()


def test_what_cannot_be_installed_is_one_line(folder, tmp_path, text_file, capsys):
    assert_data_error(capsys, "one name", arguments=("--from", str(text_file)))
    assert_data_error(capsys, "one name", arguments=("x", "y", "--from", str(text_file)))
    for name in tmp_path / "nowhere", "~nobody-of-this-name/x":
        assert_data_error(capsys, str(name), "no such file", arguments=("x", "--from", str(name)))
    (tmp_path / "empty").mkdir()
    for name, content, words in (
        ("empty", None, "contains no text"),
        ("bad.txt", b"\xff\xfe\x00", "bad.txt"),
        ("bad.parquet", b"PAR1", "bad.parquet"),
        ("bad.jsonl", b"{", "bad.jsonl"),
        ("other.csv", b"body\nno text here\n", "body"),
        ("lists.jsonl", b'{"text": ["a", "b"]}\n', "no column 'text' that holds text"),
        ("numbers.jsonl", b'{"text": 1}\n', "no column 'text' that holds text"),
        ("train.txt", b"Only to train on.", "no split 'test'"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        assert_data_error(capsys, words, arguments=("x", "--from", str(tmp_path / name)))
    Dataset.from_dict({"text": [1, 2]}).save_to_disk(tmp_path / "numbers")
    assert_data_error(capsys, "no column 'text' that holds text", arguments=("x", "--from", str(tmp_path / "numbers")))
    assert not list(folder.iterdir())
