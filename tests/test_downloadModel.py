"""downloadModel.py against a hub on localhost: what moves, what is resumed and repaired, and what is refused."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple

import pytest
from conftest import ROOT, with_ctrl_c
from huggingface_hub import constants
from localHub import LocalHub, Repository

import downloadModel
from inputs import hub as hub_module

NAME = "EleutherAI/pythia-70m"
WEIGHTS = 3_000_000
CHUNK = 100_000  # the library writes in pieces of 10 MB: what is in such a piece is lost when a connection breaks
SUBPROCESS = (
    "import sys; from pathlib import Path; import downloadModel as d; from huggingface_hub import constants; "
    f"constants.DOWNLOAD_CHUNK_SIZE = {CHUNK}; d.MODELS = Path(sys.argv[1]); sys.exit(d.main(sys.argv[2:]))"
)


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.setattr(downloadModel, "MODELS", tmp_path / "models")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK)
    return tmp_path / "models"


def repository(**more):
    """A model's repository, with all that hubs have and nobody needs."""
    return Repository(
        {
            "config.json": b"{}",
            "tokenizer.json": os.urandom(5000),
            "README.md": b"#" * 3000,
            "model.safetensors": os.urandom(WEIGHTS),
            "pytorch_model.bin": b"\x80" * 9000,
            "onnx/model.safetensors": b"0" * 4000,
            ".gitattributes": b"*",
        }
        | more.pop("files", {}),
        **more,
    )


@pytest.fixture
def one(hub, models):
    hub.models[NAME] = repository()
    return models / "pythia-70m"


def run(*arguments):
    return downloadModel.main([*arguments])


def refused(capsys, *words, arguments=(NAME,)):
    assert run(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("downloadModel.py: error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error


def same(folder, repo):
    return all((folder / path).read_bytes() == repo.files[path] for path in ("config.json", "model.safetensors"))


def test_only_what_is_needed_moves_and_a_second_run_moves_nothing(hub, one, capsys):
    assert run(NAME) == 0
    assert hub.served == {"config.json": 2, "tokenizer.json": 5000, "model.safetensors": WEIGHTS}
    assert same(one, hub.models[NAME]) and not list(one.parent.glob("*.incomplete"))
    assert "3.0 MB to download" in capsys.readouterr().out
    hub.forget()
    assert run(NAME) == 0 and hub.moved == 0
    assert "nothing to download" in capsys.readouterr().out


def test_all_three_pythias_are_the_default(hub, models, capsys):
    for name in downloadModel.PYTHIA:
        hub.models[name] = repository()
    assert run() == 0
    assert sorted(f.name for f in models.iterdir() if f.is_dir()) == ["pythia-2.8b", "pythia-410m", "pythia-70m"]
    assert run("--list") == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert all(word in line for line in lines for word in ("3.0 MB", "whole", "at main", "EleutherAI/pythia"))


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


@pytest.mark.parametrize("damage", ["flipped", "short", "gone", "long"])
def test_a_damaged_file_is_found_and_fetched_again(hub, one, capsys, damage):
    assert run(NAME) == 0
    hub.forget()
    file = one / "model.safetensors"
    content = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(
        {
            "flipped": content[:99] + bytes([content[99] ^ 1]) + content[100:],
            "short": content[:-1],
            "long": content + b"0",
        }[damage]
    )
    assert run("--list") == 0 and "not whole: model.safetensors" in capsys.readouterr().out
    refused(capsys, "model.safetensors", "without --offline", arguments=(NAME, "--offline"))
    assert run(NAME) == 0 and same(one, hub.models[NAME])
    assert hub.served == {"model.safetensors": WEIGHTS}


def test_offline_nothing_is_asked(hub, one, capsys, monkeypatch):
    refused(capsys, "--offline", "HF_HUB_OFFLINE", arguments=(NAME, "--offline"))
    assert run(NAME) == 0
    hub.forget()
    for revision in ([], ["--revision", "main"], ["--revision", hub.models[NAME].commit]):
        assert run(NAME, "--offline", *revision) == 0
    refused(capsys, "--offline", arguments=(NAME, "--offline", "--revision", "step1"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(NAME) == 0 and hub.requests == []


def test_a_new_revision_replaces_what_changed_and_only_once_it_is_whole(hub, one, capsys):
    assert run(NAME) == 0
    old = hub.models[NAME].files["model.safetensors"]
    (one / "notes.txt").write_text("mine")
    hub.forget()
    hub.models[NAME].files |= {"config.json": b'{"new": 1}', "model.safetensors": os.urandom(WEIGHTS)}
    hub.cut_after = 1000
    assert run(NAME) == 2 and (one / "model.safetensors").read_bytes() == old  # still there, still whole
    assert run(NAME, "--offline") == 0
    hub.cut_after = None
    assert run(NAME) == 0 and same(one, hub.models[NAME]) and (one / "notes.txt").read_text() == "mine"
    assert json.loads((one / "download.json").read_text())["commit"] == hub.models[NAME].commit
    assert "tokenizer.json" not in hub.served and not list(one.parent.glob("*.incomplete"))


def test_weights_of_an_older_revision_do_not_stay_beside_the_new_ones(hub, one):
    assert run(NAME) == 0
    files = hub.models[NAME].files
    shards = {f"model-0000{i}-of-00002.safetensors": os.urandom(2000 + i) for i in (1, 2)}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": dict(zip("ab", shards))}).encode()}
    whole = {"model.safetensors": files.pop("model.safetensors")}
    files |= shards | index
    assert run(NAME) == 0 and {f.name for f in one.glob("model*")} == set(shards | index)
    for name in shards | index:
        del files[name]
    files |= whole
    assert run(NAME) == 0 and {f.name for f in one.glob("model*")} == set(whole)


def test_sharded_weights_come_with_their_index(hub, one, capsys):
    shards = {f"model-0000{i}-of-00002.safetensors": os.urandom(2000 + i) for i in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", shards))}).encode()
    hub.models[NAME] = repository(files=shards | {"model.safetensors.index.json": index})
    del hub.models[NAME].files["model.safetensors"]
    assert run(NAME) == 0 and set(shards) < set(hub.served)
    del hub.models[NAME].files["model-00002-of-00002.safetensors"]
    shutil.rmtree(one)
    refused(capsys, "lacks model-00002-of-00002.safetensors")
    assert not one.exists()


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


def test_a_wrong_flag_is_one_line(models, capsys):
    refused(capsys, "--nonsense", arguments=("--nonsense",))


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
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda _: usage)
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


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "a/..",
        "a/../b",
        "/etc/passwd",
        "name",
        "a/b/c",
        "a/.hidden",
        "a/b c",
        "",
        "https://x/y",
        "a/b.incomplete",
    ],
)
def test_a_name_that_would_leave_the_folder_is_refused(models, capsys, name):
    refused(capsys, name, arguments=(name,))
    assert not models.exists()


def test_a_repository_that_would_write_elsewhere_is_refused(hub, one, capsys):
    hub.models[NAME].files["../../tokenizer.json"] = b"{}"
    refused(capsys, "../../tokenizer.json", "elsewhere")
    assert not one.parent.exists()


def test_a_repository_that_is_no_model_is_refused(hub, one, capsys):
    files = hub.models[NAME].files
    del files["config.json"]
    refused(capsys, "no config.json")
    del files["model.safetensors"]
    refused(capsys, "no safetensors, only pytorch_model.bin", "never loaded", "--revision")
    assert hub.moved == 0 and not one.parent.exists()


def test_a_folder_that_holds_something_else_is_left_alone(hub, one, capsys):
    one.mkdir(parents=True)
    (one / "config.json").write_text("mine")
    refused(capsys, "pythia-70m", "move it away")
    (one / "download.json").write_text(json.dumps({"repo": "other/pythia-70m", "commit": "0", "files": []}))
    refused(capsys, "holds other/pythia-70m", "move it away")
    assert (one / "config.json").read_text() == "mine"


def test_the_same_files_copied_by_hand_are_taken_for_what_they_are(hub, one):
    one.mkdir(parents=True)
    for path in ("config.json", "tokenizer.json", "model.safetensors"):
        (one / path).write_bytes(hub.models[NAME].files[path])
    assert run(NAME) == 0 and hub.moved == 0 and (one / "download.json").exists()


def test_a_second_download_of_the_same_model_waits_for_nobody(hub, one, capsys):
    one.parent.mkdir()
    with downloadModel.lock(one):
        other = subprocess.run(
            [sys.executable, "-c", SUBPROCESS, str(one.parent), NAME],
            cwd=ROOT,
            text=True,
            env=os.environ | {"HF_ENDPOINT": hub.url},
            capture_output=True,
        )
    assert other.returncode == 2 and "another process" in other.stderr
