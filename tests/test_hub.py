"""Files of a hub on localhost: resumed, verified, and what a hub, a network or a disk refuses is one line."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
from conftest import ROOT, with_ctrl_c
from downloads import NAME, SUBPROCESS, WEIGHTS, refused, repository, run, same, use_folder
from huggingface_hub import constants
from localHub import LocalHub, Repository


@pytest.fixture
def models(tmp_path, monkeypatch):
    return use_folder(tmp_path / "models", monkeypatch)


@pytest.fixture
def one(hub, models):
    hub.models[NAME] = repository()
    return models / "pythia-70m"


def test_a_download_cut_at_half_goes_on_where_it_stopped(hub, one, capsys):
    hub.cut_after = WEIGHTS // 2
    refused(capsys, hub.url, "HF_ENDPOINT", "--offline", "goes on")
    assert not one.exists() and hub.served["model.safetensors"] == WEIGHTS // 2
    assert run("--list") == 0 and "not whole: model.safetensors" in capsys.readouterr().out
    hub.forget()
    hub.cut_after = None
    assert run(NAME) == 0 and same(one, hub.models[NAME])
    assert hub.served == {"model.safetensors": WEIGHTS - WEIGHTS // 2}


def test_a_hub_that_cannot_send_parts_sends_it_all_again(hub, one, capsys):
    hub.cut_after = WEIGHTS // 2
    assert run(NAME) == 2
    hub.cut_after, hub.ranges = None, False
    hub.forget()
    assert run(NAME) == 0 and same(one, hub.models[NAME])
    assert hub.served == {"model.safetensors": WEIGHTS}


def test_a_killed_download_goes_on_where_it_stopped(hub, one, tmp_path):
    hub.cut_after = WEIGHTS // 2  # then it asks again and again for the rest, a second apart: time to kill it
    process = subprocess.Popen(
        [sys.executable, "-c", SUBPROCESS, str(one.parent), NAME],
        cwd=ROOT,
        preexec_fn=with_ctrl_c,
        env=os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")},
    )
    while not hub.cut:
        assert process.poll() is None
        time.sleep(0.02)
    part = one.parent / "pythia-70m.incomplete" / "model.safetensors.part"
    while not part.exists() or not part.stat().st_size:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    kept = part.stat().st_size
    assert 0 < kept <= WEIGHTS // 2 and not one.exists()
    hub.cut_after = None
    hub.forget()
    assert run(NAME) == 0 and same(one, hub.models[NAME])
    assert hub.served["model.safetensors"] == WEIGHTS - kept


def test_what_is_in_the_librarys_cache_is_copied(hub, one, tmp_path, monkeypatch):
    from huggingface_hub import hf_hub_download

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hf_hub_download(NAME, "model.safetensors", endpoint=hub.url, cache_dir=tmp_path / "cache")
    hub.forget()
    assert run(NAME) == 0 and same(one, hub.models[NAME]) and "model.safetensors" not in hub.served


def test_a_token_opens_a_private_repository(hub, one, capsys, monkeypatch):
    hub.models[NAME].token = "hf_secret"
    refused(capsys, "private", "HF_TOKEN", hub.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert run(NAME) == 0
    assert "hf_secret" not in (one / "download.json").read_text()


def test_what_a_hub_refuses_is_one_line(hub, one, capsys):
    refused(capsys, "no repository EleutherAI/pythia-71m", arguments=("EleutherAI/pythia-71m",))
    refused(capsys, "no revision 'v9'", arguments=(NAME, "--revision", "v9"))
    hub.models[NAME].gated = True
    refused(capsys, "gated", "HF_TOKEN", f"{hub.url}/{NAME}")
    hub.models[NAME].gated = False
    for answer, word in (
        ((200, b"<html>Sign in to this network</html>"), "not what a hub answers"),
        ((403, {"error": "no permission"}), "HF_TOKEN"),
        ((200, {"id": NAME}), "no safetensors"),
        ((200, {"id": NAME, "sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}), "sizes"),
    ):
        hub.answer = answer
        refused(capsys, word)
    hub.down = True
    refused(capsys, "answered 503", "HF_ENDPOINT")
    assert not one.exists()


def test_large_files_may_lie_elsewhere_and_the_token_does_not_go_there(hub, one, capsys, monkeypatch):
    hub.models[NAME].token = "hf_secret"
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with LocalHub() as hub.elsewhere:
        hub.elsewhere.models[NAME] = Repository(hub.models[NAME].files)
        hub.elsewhere.cut_after = WEIGHTS // 2
        hub.elsewhere.url = hub.elsewhere.url.replace("127.0.0.1", "localhost")
        refused(capsys, "no connection to localhost")
        hub.elsewhere.cut_after = None
        hub.elsewhere.forget()
        assert run(NAME) == 0 and same(one, hub.models[NAME])
        assert hub.elsewhere.moved == WEIGHTS - WEIGHTS // 2 and "model.safetensors" not in hub.served
        assert set(hub.authorization[1:]) == {"Bearer hf_secret"} and set(hub.elsewhere.authorization) == {None}


def test_a_part_longer_than_the_file_is_begun_again(hub, one):
    part = one.parent / "pythia-70m.incomplete" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"0" * (WEIGHTS + 1))
    assert run(NAME) == 0 and same(one, hub.models[NAME])


def test_no_network_names_the_host_and_the_remedies(models, capsys, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(capsys, "http://127.0.0.1:9", "HF_ENDPOINT", "--offline")


@pytest.mark.parametrize("wrong", [b"1" * WEIGHTS, b"1" * (WEIGHTS - 5)])
def test_content_of_another_hash_or_size_is_never_taken(hub, one, capsys, wrong):
    hub.replace["model.safetensors"] = wrong
    if len(wrong) < WEIGHTS:
        hub.cut_after = WEIGHTS - 1  # the connection ends early
    refused(capsys, *(["hash"] if len(wrong) == WEIGHTS else []))
    assert not one.exists() and not (one.parent / "pythia-70m.incomplete" / "model.safetensors").exists()
    hub.replace.clear()
    hub.cut_after = None
    assert run(NAME) == 0 and same(one, hub.models[NAME])


def test_too_small_a_disk_is_refused_before_anything_moves(hub, one, capsys, monkeypatch):
    usage = namedtuple("usage", "total used free")(1, 1, WEIGHTS)
    monkeypatch.setattr("inputs.hub.shutil.disk_usage", lambda _: usage)
    refused(capsys, "3.0 MB", "room")
    assert hub.moved == 0 and not one.exists()


def test_a_disk_that_fills_up_keeps_what_came(hub, one, capsys):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))  # no file may grow beyond: as a full disk has it
    try:
        refused(capsys, "disk is full", "goes on")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not one.exists()
    hub.forget()
    assert run(NAME) == 0 and same(one, hub.models[NAME]) and hub.served["model.safetensors"] < WEIGHTS


def test_a_repository_that_would_write_elsewhere_is_refused(hub, one, capsys):
    hub.models[NAME].files["../../tokenizer.json"] = b"{}"
    refused(capsys, "../../tokenizer.json", "elsewhere")
    assert not one.parent.exists()
