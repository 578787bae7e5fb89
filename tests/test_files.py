"""A file that is replaced is the old one or the new one, and leaves nothing else behind."""

import os

import pytest
from conftest import refused

from inputs.files import new_folder, replace_file


def test_a_file_gets_new_content_and_usual_permissions(tmp_path):
    file = tmp_path / "text.txt"
    for text in "old", "new, \u6771\u4eac\n":
        replace_file(file, text)
        assert file.read_bytes().decode() == text and os.listdir(tmp_path) == ["text.txt"]
    assert file.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("fault", ["os.fsync", "os.replace"])
def test_after_an_error_the_old_file_is_there_and_no_other(tmp_path, monkeypatch, fault):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "text.txt"
    replace_file(file, "old")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\udcff")
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "text.txt", "new")
    monkeypatch.setattr(fault, full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(file, "new")
    assert file.read_text() == "old" and os.listdir(tmp_path) == ["text.txt"]


def test_a_folder_appears_when_it_is_complete_and_a_lock_leaves_no_file(tmp_path):
    for text in "old", "new":
        with new_folder(tmp_path / "model") as written:
            (written / "text").write_text(text)
            with refused("another process is writing"), new_folder(tmp_path / "model"):
                pass
        assert (tmp_path / "model" / "text").read_text() == text and os.listdir(tmp_path) == ["model"]
    with pytest.raises(ZeroDivisionError), new_folder(tmp_path / "model"):
        raise ZeroDivisionError
    with pytest.raises(OSError), new_folder(tmp_path / "model") as written:
        written.rmdir()  # So it cannot take the name.
    assert (tmp_path / "model" / "text").read_text() == "new" and os.listdir(tmp_path) == ["model"]
