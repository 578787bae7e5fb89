"""downloadModel.py against a hub on localhost: what is downloaded, resumed, repaired, replaced and refused. What is no
hub id is in test_flags.py and test_security.py."""

import itertools
import json
import os
import resource
import shutil
import signal
import time

import pytest
from conftest import refused
from downloads import NAME, WEIGHTS, assert_error, download, limit_disk, matches, model_repository
from huggingface_hub import close_session, constants, hf_hub_download
from localHub import LocalHub, Repository

import downloadModel
from inputs import progress
from inputs.files import lock_folder
from inputs.hub import hub_errors


@pytest.fixture
def downloaded(hub, pythia):
    """The folder of the model, downloaded."""
    assert download(NAME) == 0
    assert hub.served == {"config.json": 2, "tokenizer.json": 5000, "model.safetensors": WEIGHTS}
    assert matches(pythia, hub.models[NAME]) and not list(pythia.parent.glob("*.incomplete"))
    hub.forget()
    return pythia


def test_all_three_pythias_are_the_default(hub, models_folder, capsys):
    for name in downloadModel.PYTHIA:
        hub.models[name] = model_repository()
    assert download() == 0 and capsys.readouterr().out.count("305.0 KB to download") == 3
    assert sorted(f.name for f in models_folder.iterdir() if f.is_dir()) == ["pythia-2.8b", "pythia-410m", "pythia-70m"]
    assert download("--list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(word in line for line in lines for word in ("305.", "KB", "whole", "at main", "EleutherAI/pythia"))


def test_a_damaged_file_is_found_and_fetched_again_and_a_whole_one_is_not(hub, downloaded, capsys):
    assert download(NAME) == 0 and hub.moved == 0 and "nothing to download" in capsys.readouterr().out
    file = downloaded / "model.safetensors"
    content = file.read_bytes()
    for damaged in content[:99] + bytes([content[99] ^ 1]) + content[100:], content[:-1], content + b"0", None:
        hub.forget()
        file.unlink()
        if damaged is not None:
            file.write_bytes(damaged)
        assert download("--list") == 0 and "not whole: model.safetensors" in capsys.readouterr().out
        assert_error(capsys, "model.safetensors", "without --offline", arguments=(NAME, "--offline"))
        assert download(NAME) == 0 and matches(downloaded, hub.models[NAME])
        assert hub.served == {"model.safetensors": WEIGHTS}


def test_offline_nothing_is_asked(hub, downloaded, capsys, monkeypatch):
    for revision in ([], ["--revision", "main"], ["--revision", hub.models[NAME].commit]):
        assert download(NAME, "--offline", *revision) == 0
    assert_error(capsys, "--offline", arguments=(NAME, "--offline", "--revision", "step1"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert download(NAME) == 0
    shutil.rmtree(downloaded)
    assert_error(capsys, "--offline", "HF_HUB_OFFLINE")
    assert hub.requests == []


def test_a_new_revision_replaces_what_changed_and_only_once_it_is_whole(hub, downloaded):
    old = hub.models[NAME].files["model.safetensors"]
    (downloaded / "notes.txt").write_text("mine")
    hub.models[NAME].files |= {"config.json": b'{"new": 1}', "model.safetensors": os.urandom(WEIGHTS)}
    hub.cut_after = 1000
    assert download(NAME) == 2 and (downloaded / "model.safetensors").read_bytes() == old  # still there, still whole
    assert download(NAME, "--offline") == 0
    hub.cut_after = None
    assert download(NAME) == 0 and matches(downloaded, hub.models[NAME])
    assert (downloaded / "notes.txt").read_text() == "mine" and "tokenizer.json" not in hub.served
    assert json.loads((downloaded / "download.json").read_text())["commit"] == hub.models[NAME].commit
    assert not list(downloaded.parent.glob("*.incomplete"))


def test_sharded_weights_come_with_their_index_and_those_of_an_older_revision_go(hub, downloaded, capsys):
    files = hub.models[NAME].files
    shards = {f"model-0000{i}-of-00002.safetensors": os.urandom(2000 + i) for i in (1, 2)}
    sharded = shards | {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards))}).encode()}
    whole = {"model.safetensors": files.pop("model.safetensors")}
    others = dict(files)
    renamed = {f"model.safetensors-0000{i}-of-00002.safetensors": os.urandom(2000 + i) for i in (1, 2)}
    renamed["model.safetensors.index.json"] = json.dumps({"weight_map": dict(zip("ab", renamed))}).encode()
    for weights in sharded, renamed, whole:
        hub.models[NAME].files = others | weights
        assert download(NAME) == 0 and {f.name for f in downloaded.glob("model*")} == set(weights)
    hub.models[NAME].files = others | sharded
    del hub.models[NAME].files["model-00002-of-00002.safetensors"]
    shutil.rmtree(downloaded)
    assert_error(capsys, "has no model-00002-of-00002.safetensors")
    for index in {"weight_map": []}, {"weight_map": {"a": 1, "b": "c"}}, []:
        hub.models[NAME].files = others | shards | {"model.safetensors.index.json": json.dumps(index).encode()}
        assert_error(capsys, "no usable answer")
    assert not downloaded.exists()


def test_what_is_no_model_is_refused(hub, pythia, capsys):
    for name in "a/.hidden", "a/b.incomplete":
        assert_error(capsys, name, arguments=(name,))
    files = hub.models[NAME].files
    files["adapter_config.json"] = b"{}"
    assert_error(capsys, "has an adapter")
    del files["adapter_config.json"], files["config.json"]
    assert_error(capsys, "no config.json")
    del files["model.safetensors"]
    assert_error(capsys, "no safetensors files, only pytorch_model.bin", "never loaded", "--revision")
    assert hub.moved == 0 and not pythia.parent.exists()


def test_a_folder_that_holds_something_else_is_left_alone_and_the_same_files_are_taken(hub, pythia, capsys):
    with lock_folder(pythia):
        assert_error(capsys, "another process")  # Nobody waits.
    pythia.mkdir()
    (pythia / "config.json").write_text("mine")
    assert_error(capsys, "pythia-70m", "move it away")
    (pythia / "download.json").write_text(json.dumps({"repo": "other/pythia-70m", "commit": "0", "files": []}))
    assert_error(capsys, "holds other/pythia-70m", "move it away")
    assert (pythia / "config.json").read_text() == "mine"
    (pythia / "download.json").unlink()
    for path in ("config.json", "tokenizer.json", "model.safetensors"):  # copied by hand
        (pythia / path).write_bytes(hub.models[NAME].files[path])
    hub.forget()
    assert download(NAME) == 0 and hub.moved == 0 and (pythia / "download.json").exists()


# Faults of hubs, networks and disks.


@pytest.mark.parametrize("how", ["broken", "Ctrl-C", "no ranges"])
def test_a_download_cut_at_half_goes_on_where_it_stopped(hub, pythia, capsys, monkeypatch, how):
    """If the hub cannot send a part of a file, it sends it all again."""

    def ctrl_c(seconds):
        if seconds:  # The hub pauses for 0 seconds.
            raise KeyboardInterrupt

    hub.cut_after = WEIGHTS // 2  # Then it asks again and again for the rest, a second apart.
    with monkeypatch.context() as patch:
        if how == "Ctrl-C":
            patch.setattr("huggingface_hub.file_download.time.sleep", ctrl_c)
            assert download(NAME) == 130 and "run the command again to resume" in capsys.readouterr().err
        else:
            assert_error(capsys, hub.url, "HF_ENDPOINT", "--offline", "resumes")
    assert not pythia.exists() and hub.served["model.safetensors"] == WEIGHTS // 2
    assert download("--list") == 0 and "not whole: model.safetensors" in capsys.readouterr().out
    hub.forget()
    hub.cut_after, hub.ranges = None, how != "no ranges"
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
    assert hub.served == {"model.safetensors": WEIGHTS - WEIGHTS // 2 if hub.ranges else WEIGHTS}


def test_what_is_in_the_librarys_cache_is_copied(hub, pythia, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hf_hub_download(NAME, "model.safetensors", endpoint=hub.url, cache_dir=tmp_path / "cache")
    hub.forget()
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME]) and "model.safetensors" not in hub.served


def test_a_token_opens_a_private_repository_and_does_not_go_where_large_files_lie(hub, pythia, capsys, monkeypatch):
    hub.models[NAME].token = "hf_secret"
    assert_error(capsys, "private", "HF_TOKEN", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.authorization.clear()
    with LocalHub() as hub.elsewhere:
        hub.elsewhere.models[NAME] = Repository(hub.models[NAME].files)
        hub.elsewhere.cut_after = WEIGHTS // 2
        hub.elsewhere.url = hub.elsewhere.url.replace("127.0.0.1", "localhost")
        assert_error(capsys, "no connection to http://localhost")
        hub.elsewhere.cut_after = None
        hub.elsewhere.forget()
        assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
        assert hub.elsewhere.moved == WEIGHTS - WEIGHTS // 2 and "model.safetensors" not in hub.served
        assert set(hub.authorization) == {"Bearer hf_secret"} and set(hub.elsewhere.authorization) == {None}
    assert "hf_secret" not in (pythia / "download.json").read_text()


def test_what_a_hub_refuses_is_one_line(hub, pythia, capsys):
    assert_error(capsys, "no repository EleutherAI/pythia-71m", arguments=("EleutherAI/pythia-71m",))
    assert_error(capsys, "no revision 'v9'", arguments=(NAME, "--revision", "v9"))
    hub.models[NAME].gated = True
    assert_error(capsys, "gated", "HF_TOKEN", f"{hub.url}/{NAME}")
    for content, word in (
        (b"<html>Sign in to this network</html>", "no usable answer"),
        ({"id": NAME, "sha": "0" * 40, "siblings": []}, "no safetensors"),
        ({"id": NAME, "sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}, "no usable answer"),
    ):
        hub.answer = lambda is_file, content=content: (200, content)
        assert_error(capsys, word)
    hub.models[NAME].gated = False
    for failing, status in itertools.product((False, True), (404, 429, 500, 503)):
        answers = {failing: (status, {"error": "no"})}
        hub.answer = answers.get
        assert_error(capsys, f"answered {status}", NAME, *["try again later"] * (not failing))
    assert not pythia.exists() and hub.moved == 0


def test_a_busy_hub_that_says_for_how_long_is_asked_again(hub, pythia, capsys, caplog):
    """The library says how long it waits."""
    statuses = [503, 500, 429]
    hub.answer = lambda is_file: (statuses.pop(0), {}) if statuses else None
    assert download(NAME) == 0 and caplog.text.count("Waiting 1.0s before retry") == 3
    statuses += [503] * 9
    (pythia / "config.json").unlink()
    assert_error(capsys, "answered 503")
    assert len(statuses) == 5  # three pauses


@pytest.mark.parametrize(
    "proxy, words",
    [
        (("ALL_PROXY", "socks://127.0.0.1:9"), ["check", "the proxy", "socks://127.0.0.1:9"]),
        (("HTTPS_PROXY", "http://me:secret@127.0.0.1:9"), ["no connection", "through the proxy 127.0.0.1:9"]),
        (("HTTPS_PROXY", "http://me:sec/ret@127.0.0.1:9"), ["gives no usable answer", "the proxy"]),
        (None, ["HF_ENDPOINT is empty"]),
    ],
)
def test_a_proxy_or_an_endpoint_that_cannot_be_used_is_named(models_folder, capsys, monkeypatch, proxy, words):
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co" if proxy else "")
    monkeypatch.setenv(*proxy or ("NO_PROXY", ""))
    close_session()  # It keeps the proxies of the environment that it was made in.
    try:
        said = assert_error(capsys, *words)
        assert "'sec'" not in said
    finally:
        monkeypatch.undo()
        close_session()


def test_a_proxy_that_needs_another_package_says_which():
    with refused("proxy", "socksio"), hub_errors(NAME, "main"):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")


def test_a_hub_that_does_not_answer_in_time_is_one_line(hub, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.answer = lambda is_file: time.sleep(0.5)
    assert_error(capsys, "no connection to", "Timeout", "HF_ENDPOINT", "--offline")


def test_content_of_another_hash_is_refused_and_the_files_that_are_right_are_kept(hub, pythia, capsys):
    hub.replace["model.safetensors"] = bytes(WEIGHTS)
    assert_error(capsys, "model.safetensors", "was downloaded twice with a hash that differs")
    assert not pythia.exists()
    hub.replace.clear()
    hub.forget()
    assert download(NAME) == 0 and hub.served == {"model.safetensors": WEIGHTS}


@pytest.mark.parametrize("wrong", [b"0" * (WEIGHTS + 1), b"0" * (WEIGHTS // 2)])
def test_a_part_of_other_content_is_begun_again_and_says_how_far_it_is(hub, pythia, capsys, monkeypatch, wrong):
    monkeypatch.setattr(progress, "PAUSE", 0)
    part = pythia.parent / "pythia-70m.incomplete" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(wrong)
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
    assert "model.safetensors: 100%" in capsys.readouterr().err  # without a terminal


def test_a_disk_that_is_too_small_or_fills_up_is_one_line_and_what_came_is_kept(hub, pythia, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        limit_disk(patch, WEIGHTS)
        assert_error(capsys, "300.0 KB", "free some space")
        assert hub.moved == 0 and not pythia.exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # no file may grow beyond: as a full disk has it
    try:
        assert_error(capsys, "disk is full", "continues")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not pythia.exists()
    hub.forget()
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME]) and hub.served["model.safetensors"] < WEIGHTS
