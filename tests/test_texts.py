"""Corpora and their passages, from every kind of place a text may be in."""

import pytest
from conftest import refused

from datasets import Dataset, DatasetDict
from inputs import files
from inputs.texts import Corpus, load_corpora

WIKI = [" = Tarn = \n", "", " A tarn is a small lake . \n", " = = Origin = = \n", " It was cut by ice . \n"]


def test_the_sample_is_two_corpora_of_two_styles():
    articles, narrative = load_corpora("sample")  # and not the note beside them
    assert (articles.name, narrative.name) == ("articles.raw", "narrative.txt")
    assert len(articles.documents) == len(narrative.documents) == 1
    assert " = Tarrel Estuary = \n" in articles.documents[0] and "CHAPTER I\n" in narrative.documents[0]
    assert min(len(corpus.passages(500)) for corpus in (articles, narrative)) >= 20


def test_passages_of_both_styles_by_hand():
    wiki = "".join(WIKI)
    plain = "CHAPTER I\n\nA line\nand its second.\n \n\nShort.\n\nThe last paragraph."
    for texts, limits, passages in (
        ([wiki], [5], [" A tarn is a small lake . ", " It was cut by ice . "]),
        ([wiki], [22], [" A tarn is a small lake . "]),
        ([plain], [10], ["A line\nand its second.", "The last paragraph."]),
        ([plain, plain], [20], ["A line\nand its second."] * 2),
        ([plain], [10, 30], [plain[11:41], "The last paragraph."]),  # It can run on into the text behind it.
        ([wiki], [22, 10_000], [wiki[wiki.index(" A tarn") :]]),
    ):
        assert Corpus("name", texts).passages(*limits) == passages


def test_a_folder_of_books_is_one_corpus_of_many_documents(tmp_path, monkeypatch):
    (tmp_path / "part").mkdir()
    (tmp_path / "odd.txt").mkdir()  # a folder, though its name ends like a file's
    for name, text in {"b.txt": "\ufeffSecond.", "a.TXT": "First.", "part/c.raw": "Third.", "d.txt": ""}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (corpus,) = load_corpora(str(tmp_path))
    assert corpus == Corpus(tmp_path.name, ["First.", "Second.", "Third."])  # no byte order mark, nothing blank
    assert load_corpora(str(tmp_path), books=2)[0].documents == ["First.", "Second."]
    monkeypatch.chdir(tmp_path)
    assert load_corpora(".") == [corpus] and load_corpora("b.txt") == [Corpus("b.txt", ["Second."])]


@pytest.mark.parametrize("rows", [WIKI, [row.rstrip("\n") for row in WIKI]], ids=["with line ends", "without"])
def test_the_rows_of_a_saved_data_set_are_texts_and_those_of_wikitext_are_joined(tmp_path, monkeypatch, rows):
    monkeypatch.setattr(files, "DATASETS", tmp_path)
    Dataset.from_dict({"text": ["One book.", "", None, "Another."]}).save_to_disk(tmp_path / "books")
    assert load_corpora(str(tmp_path / "books")) == [Corpus("books", ["One book.", "Another."])]
    splits = {"train": Dataset.from_dict({"text": ["not this"]}), "test": Dataset.from_dict({"text": rows})}
    DatasetDict(splits).save_to_disk(tmp_path / "wikitext")
    (corpus,) = load_corpora("wikitext")
    assert corpus.name == "wikitext" and len(corpus.documents) == 1
    assert corpus.documents[0].split("\n")[0] == " = Tarn = "
    assert corpus.passages(5) == [" A tarn is a small lake . ", " It was cut by ice . "]


def test_what_has_no_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "DATASETS", tmp_path)
    for name, rows in {"columns": {"words": ["x"]}, "numbers": {"text": [1, 2]}}.items():
        Dataset.from_dict(rows).save_to_disk(tmp_path / name)
    DatasetDict({"train": Dataset.from_dict({"text": ["x"]})}).save_to_disk(tmp_path / "splits")
    for name in "garbled", "pdf", "blank", *"abc":
        (tmp_path / name).mkdir()
    (tmp_path / "garbled" / "dataset_info.json").write_text("{")
    (tmp_path / "pdf" / "notes.pdf").write_text("not a text file's ending")
    (tmp_path / "blank" / "blank.txt").write_text(" \n\n")
    for name, content in zip("abc", (b"\x80\x81 not UTF-8", b"zeros\0\0\0", "UTF-16".encode("utf-16"))):
        (tmp_path / name / "data.txt").write_bytes(content)
    for place, words in {
        "nowhere": ["nowhere", "sample, wikitext, pg19"],
        "~nobody-of-this-name/x": ["~nobody-of-this-name"],
        "x" * 5000: ["no such path"],
        "wikitext": ["datasets/wikitext", "downloadData.py", "--dataset sample"],
        tmp_path / "pdf": [str(tmp_path), ".txt"],
        **dict.fromkeys((tmp_path / "blank", tmp_path / "blank" / "blank.txt"), ["no text", ".txt"]),
        **{tmp_path / part: ["data.txt"] for name in "abc" for part in (name, f"{name}/data.txt")},
        **{tmp_path / name: [name, "'text'", "'test'"] for name in ("columns", "numbers", "splits", "garbled")},
    }.items():
        with refused(*words):
            load_corpora(str(place))
