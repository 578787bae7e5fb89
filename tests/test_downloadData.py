"""downloadData.py against a hub on localhost, and with texts that are here already."""

import io
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest
from downloads import assert_error
from huggingface_hub import constants
from localHub import Repository

import downloadData
from datasets import Dataset, DatasetDict, load_from_disk
from inputs import files
from inputs.texts import load_corpora

LINE = " Robert Boulter is an English film , television and theatre actor . " * 10
ROWS = ["", " = Robert Boulter = \n", "", f"{LINE}\n", f" {LINE}\n"]
TABLES = [f"wikitext-2-raw-v1/{split}-00000-of-00001.parquet" for split in ("test", "train", "validation")]
BOOKS = "data/test-00000-of-00001-29a571947c0b5ccc.parquet"


def table(**columns):
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DATASETS", tmp_path / "datasets")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    return tmp_path / "datasets"


@pytest.fixture
def both(hub, folder):
    card = {"README.md": b"---\nlicense: mit\n---\n"}
    wiki = {path: table(text=ROWS) for path in (*TABLES, "wikitext-103-v1/test-00000-of-00001.parquet")}
    hub.datasets["Salesforce/wikitext"] = Repository(card | wiki)
    texts = [f"Book {i}. " + "word " * 200 for i in range(15)]
    books = table(short_book_title=[f"Title {i}" for i in range(15)], text=texts)
    hub.datasets["emozilla/pg19"] = Repository(card | {BOOKS: books, "data/train-00000-of-00023.parquet": books})
    return folder


def run(*arguments):
    """The exit code of downloadData.py."""
    return downloadData.main([*arguments])


assert_data_error = partial(assert_error, script=downloadData, arguments=())


def test_both_come_and_load_back_offline(hub, both, capsys):
    assert run() == 0
    assert hub.served.keys() == {*TABLES, BOOKS}  # and not the large one's
    rows = {split: len(rows) for split, rows in load_from_disk(both / "wikitext").items()}
    assert rows == {"test": 5, "train": 5, "validation": 5}
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
    size = len(hub.datasets["Salesforce/wikitext"].files[TABLES[0]])
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
    """What a hub, a network or a disk refuses is in test_downloadModel.py."""
    assert_data_error(capsys, "--offline", arguments=("--offline",))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert_data_error(capsys, "HF_HUB_OFFLINE")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    files = hub.datasets["emozilla/pg19"].files
    for content, *words in (b"PAR1 and then nothing", "pg19"), (table(body=["a"]), "no column 'text'", "only body"):
        files[BOOKS] = content
        assert_data_error(capsys, *words, arguments=("pg19",))
    del files[BOOKS]
    assert_data_error(capsys, "data/test-*.parquet", "mirror", arguments=("pg19",))
    assert not [path for path in both.glob("*") if not path.name.endswith(".incomplete")]


def test_texts_that_were_installed_are_never_replaced_by_a_download(hub, both, tmp_path, capsys):
    file = tmp_path / "wiki.test.raw"
    file.write_text(" \n = Robert Boulter = \n \n" + f"{LINE}\n {LINE}\n")
    assert run("wikitext", "--from", str(file)) == 0
    (corpus,) = load_corpora("wikitext")
    assert corpus.documents == [file.read_text()] and corpus.passages(500) == [LINE, f" {LINE}"]  # as the hub's
    assert run("--list") == 0 and "wiki.test.raw; 1 row of test" in capsys.readouterr().out
    assert run("pg19", "--from", str(file)) == run("pg19", "--books", "1") == 0
    for again in ("pg19",), ("wikitext", "--from", str(file)):
        assert_data_error(capsys, "already exists", "wiki.test.raw", "move it away", arguments=again)


def test_texts_of_every_form_are_installed_under_any_name(folder, tmp_path):
    source = tmp_path / "mine"
    source.mkdir()
    for name, text in {
        "one.txt": "A first book.\n\nIt has two paragraphs.",
        "two.jsonl": '{"text": "line 0"}\n{"text": "line 1"}\n',
        "three.csv": "text,year\nfrom a table,1999\n",
        "My train-00.txt": "not for a test",
        "wiki.valid.raw": "nor this",
        "validation.txt": "nor this",
        "Constraints.txt": "a word that holds another",
        "The Invalid.txt": "and one more",
    }.items():
        (source / name).write_text(text)
    (source / "four.parquet").write_bytes(table(text=["from parquet"]))
    assert run("my-texts", "--from", str(source)) == 0
    (corpus,) = load_corpora("my-texts")
    first = "A first book.\n\nIt has two paragraphs."
    words = ["a word that holds another", "and one more"]
    assert sorted(corpus.documents) == [first, *words, "from a table", "from parquet", "line 0", "line 1"]
    DatasetDict(test=Dataset.from_dict({"text": ["saved"]})).save_to_disk(tmp_path / "saved")
    assert run("again", "--from", str(tmp_path / "saved")) == 0 and load_corpora("again")[0].documents == ["saved"]


def test_what_cannot_be_installed_is_one_line(folder, tmp_path, text_file, capsys):
    assert_data_error(capsys, "one name", arguments=("x", "y", "--from", str(text_file)))
    for name in "", ".", "..", "a/b", "sample", "a b", "x.incomplete", "-x":  # More are in test_security.py.
        assert_data_error(capsys, arguments=("--from", str(text_file), "--", name))
    assert not folder.exists()
    for name in tmp_path / "nowhere", "~nobody-of-this-name/x":
        assert_data_error(capsys, str(name), "no such file", arguments=("x", "--from", str(name)))
    (tmp_path / "empty").mkdir()
    Dataset.from_dict({"text": [1, 2]}).save_to_disk(tmp_path / "numbers")
    for name, content, words in (
        ("empty", None, "contains no text"),
        ("blank.txt", b" \n", "contains no text"),
        ("bad.txt", b"\xff\xfe\x00", "bad.txt"),
        ("bad.parquet", b"PAR1", "bad.parquet"),
        ("bad.jsonl", b"{", "bad.jsonl"),
        ("other.csv", b"body\nno text here\n", "body"),
        ("numbers", None, "no column 'text' that holds text"),
        ("lists.jsonl", b'{"text": ["a", "b"]}\n', "no column 'text' that holds text"),
        ("numbers.jsonl", b'{"text": 1}\n', "no column 'text' that holds text"),
        ("train.txt", b"Only to train on.", "no split 'test'"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        assert_data_error(capsys, words, arguments=("x", "--from", str(tmp_path / name)))
    assert not list(folder.iterdir())
