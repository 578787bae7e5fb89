"""A file that is replaced is the old one or the new one, and leaves nothing else behind."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import refused

from inputs.files import new_folder, replace_file


@pytest.mark.parametrize("fault, error", [("os.fsync", OSError(28, "full")), ("os.replace", KeyboardInterrupt())])
def test_a_file_gets_new_content_and_usual_permissions_or_stays_as_it_is(tmp_path, monkeypatch, fault, error):
    file = tmp_path / "text.txt"
    for text in "old", "new, \u6771\u4eac\n":
        replace_file(file, text)
        assert file.read_bytes().decode() == text and os.listdir(tmp_path) == ["text.txt"]
    assert file.stat().st_mode & 0o777 == 0o644
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "\udcff")
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "nowhere" / "text.txt", "new")
    monkeypatch.setattr(fault, Mock(side_effect=error))
    with pytest.raises(type(error)):
        replace_file(file, "newer")
    assert file.read_bytes().decode() == text and os.listdir(tmp_path) == ["text.txt"]


def test_a_folder_appears_when_it_is_complete_and_a_lock_leaves_no_file(tmp_path, monkeypatch):
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
    rename = Path.rename

    def interrupted(path, target):
        rename(path, target)
        if path.name == "model":
            raise KeyboardInterrupt

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "model"):
        pass
    assert (tmp_path / "model" / "text").read_text() == "new" and os.listdir(tmp_path) == ["model"]
