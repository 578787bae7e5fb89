"""downloadModel.py against a hub on localhost: what is downloaded, repaired, replaced and refused. test_hub.py has the
faults of hubs and networks."""

import json
import os
import shutil

import pytest
from downloads import NAME, WEIGHTS, assert_error, download, matches, model_repository
from huggingface_hub import constants

import downloadModel
from inputs.files import lock_folder


def test_only_what_is_needed_moves_and_a_second_run_moves_nothing(hub, pythia, capsys):
    assert download(NAME) == 0
    assert hub.served == {"config.json": 2, "tokenizer.json": 5000, "model.safetensors": WEIGHTS}
    assert matches(pythia, hub.models[NAME]) and not list(pythia.parent.glob("*.incomplete"))
    assert "3.0 MB to download" in capsys.readouterr().out
    hub.forget()
    assert download(NAME) == 0 and hub.moved == 0
    assert "nothing to download" in capsys.readouterr().out


def test_all_three_pythias_are_the_default(hub, models_folder, capsys):
    for name in downloadModel.PYTHIA:
        hub.models[name] = model_repository()
    assert download() == 0
    assert sorted(f.name for f in models_folder.iterdir() if f.is_dir()) == ["pythia-2.8b", "pythia-410m", "pythia-70m"]
    assert download("--list") == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert all(word in line for line in lines for word in ("3.0 MB", "whole", "at main", "EleutherAI/pythia"))


def test_a_damaged_file_is_found_and_fetched_again(hub, pythia, capsys):
    assert download(NAME) == 0
    file = pythia / "model.safetensors"
    content = file.read_bytes()
    for damaged in content[:99] + bytes([content[99] ^ 1]) + content[100:], content[:-1], content + b"0", None:
        hub.forget()
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        assert download("--list") == 0 and "not whole: model.safetensors" in capsys.readouterr().out
        assert_error(capsys, "model.safetensors", "without --offline", arguments=(NAME, "--offline"))
        assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
        assert hub.served == {"model.safetensors": WEIGHTS}


def test_offline_nothing_is_asked(hub, pythia, capsys, monkeypatch):
    assert_error(capsys, "--offline", "HF_HUB_OFFLINE", arguments=(NAME, "--offline"))
    assert download(NAME) == 0
    hub.forget()
    for revision in ([], ["--revision", "main"], ["--revision", hub.models[NAME].commit]):
        assert download(NAME, "--offline", *revision) == 0
    assert_error(capsys, "--offline", arguments=(NAME, "--offline", "--revision", "step1"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download(NAME) == 0 and hub.requests == []


def test_a_new_revision_replaces_what_changed_and_only_once_it_is_whole(hub, pythia, capsys):
    assert download(NAME) == 0
    old = hub.models[NAME].files["model.safetensors"]
    (pythia / "notes.txt").write_text("mine")
    hub.forget()
    hub.models[NAME].files |= {"config.json": b'{"new": 1}', "model.safetensors": os.urandom(WEIGHTS)}
    hub.cut_after = 1000
    assert download(NAME) == 2 and (pythia / "model.safetensors").read_bytes() == old  # still there, still whole
    assert download(NAME, "--offline") == 0
    hub.cut_after = None
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME]) and (pythia / "notes.txt").read_text() == "mine"
    assert json.loads((pythia / "download.json").read_text())["commit"] == hub.models[NAME].commit
    assert "tokenizer.json" not in hub.served and not list(pythia.parent.glob("*.incomplete"))


def test_sharded_weights_come_with_their_index_and_those_of_an_older_revision_do_not_stay_beside(hub, pythia, capsys):
    assert download(NAME) == 0
    files = hub.models[NAME].files
    shards = {f"model-0000{i}-of-00002.safetensors": os.urandom(2000 + i) for i in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards))}).encode()}
    whole = {"model.safetensors": files.pop("model.safetensors")}
    files |= shards | index
    assert download(NAME) == 0 and {f.name for f in pythia.glob("model*")} == set(shards | index)
    for name in shards | index:
        del files[name]
    files |= whole
    assert download(NAME) == 0 and {f.name for f in pythia.glob("model*")} == set(whole)
    files |= {name: content for name, content in (shards | index).items() if name != "model-00002-of-00002.safetensors"}
    del files["model.safetensors"]
    shutil.rmtree(pythia)
    assert_error(capsys, "has no model-00002-of-00002.safetensors")
    assert not pythia.exists()


NO_NAMES = "../evil|a/..|a/../b|/etc/passwd|name|a/b/c|a/.hidden|a/b c||https://x/y|a/b.incomplete|--nonsense"


@pytest.mark.parametrize("name", NO_NAMES.split("|"))
def test_a_name_that_would_leave_the_folder_is_refused(models_folder, capsys, name):
    assert_error(capsys, name, arguments=(name,))
    assert not models_folder.exists()


def test_a_repository_that_is_no_model_is_refused(hub, pythia, capsys):
    files = hub.models[NAME].files
    del files["config.json"]
    assert_error(capsys, "no config.json")
    del files["model.safetensors"]
    assert_error(capsys, "no safetensors files, only pytorch_model.bin", "never loaded", "--revision")
    assert hub.moved == 0 and not pythia.parent.exists()


def test_a_folder_that_holds_something_else_is_left_alone_and_the_same_files_are_taken(hub, pythia, capsys):
    pythia.mkdir(parents=True)
    (pythia / "config.json").write_text("mine")
    assert_error(capsys, "pythia-70m", "move it away")
    (pythia / "download.json").write_text(json.dumps({"repo": "other/pythia-70m", "commit": "0", "files": []}))
    assert_error(capsys, "holds other/pythia-70m", "move it away")
    assert (pythia / "config.json").read_text() == "mine"
    (pythia / "download.json").unlink()
    for path in ("config.json", "tokenizer.json", "model.safetensors"):  # copied by hand
        (pythia / path).write_bytes(hub.models[NAME].files[path])
    assert download(NAME) == 0 and hub.moved == 0 and (pythia / "download.json").exists()


def test_a_second_download_of_the_same_model_waits_for_nobody(pythia, capsys):
    with lock_folder(pythia):
        assert_error(capsys, "another process")
