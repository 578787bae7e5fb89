"""Files of a hub on localhost: resumed, verified, and what a hub, a network or a disk refuses is one line."""

import resource
import signal

import pytest
from conftest import refused
from downloads import NAME, WEIGHTS, assert_error, download, limit_disk, matches
from huggingface_hub import close_session, constants
from localHub import LocalHub, Repository

from inputs import progress
from inputs.hub import hub_errors


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_download_cut_at_half_goes_on_where_it_stopped(hub, pythia, capsys, monkeypatch, interrupted):
    def ctrl_c(seconds):
        if seconds:  # The hub pauses for 0 seconds.
            raise KeyboardInterrupt

    hub.cut_after = WEIGHTS // 2  # Then it asks again and again for the rest, a second apart.
    with monkeypatch.context() as patch:
        if interrupted:
            patch.setattr("huggingface_hub.file_download.time.sleep", ctrl_c)
            assert download(NAME) == 130 and "run the command again to resume" in capsys.readouterr().err
        else:
            assert_error(capsys, hub.url, "HF_ENDPOINT", "--offline", "resumes")
    assert not pythia.exists() and hub.served["model.safetensors"] == WEIGHTS // 2
    assert download("--list") == 0 and "not whole: model.safetensors" in capsys.readouterr().out
    hub.forget()
    hub.cut_after = None
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
    assert hub.served == {"model.safetensors": WEIGHTS - WEIGHTS // 2}


def test_a_hub_that_cannot_send_parts_sends_it_all_again(hub, pythia, capsys):
    hub.cut_after = WEIGHTS // 2
    assert download(NAME) == 2
    hub.cut_after, hub.ranges = None, False
    hub.forget()
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
    assert hub.served == {"model.safetensors": WEIGHTS}


def test_what_is_in_the_librarys_cache_is_copied(hub, pythia, tmp_path, monkeypatch):
    from huggingface_hub import hf_hub_download

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
    hub.models[NAME].gated = False
    for answer, word in (
        ((200, b"<html>Sign in to this network</html>"), "no usable answer"),
        ((403, {"error": "no permission"}), "HF_TOKEN"),
        ((200, {"id": NAME, "sha": "0" * 40, "siblings": []}), "no safetensors"),
        ((200, {"id": NAME, "sha": "0" * 40, "siblings": [{"rfilename": "config.json"}]}), "no usable answer"),
    ):
        hub.answer = answer
        assert_error(capsys, word)
    hub.down = True
    assert_error(capsys, "answered 503", "HF_ENDPOINT")
    hub.answer, hub.down = None, False
    hub.models[NAME].files["../../tokenizer.json"] = b"{}"
    assert_error(capsys, "../../tokenizer.json", "outside its folder")
    assert not pythia.exists() and hub.moved == 0


def test_a_busy_hub_that_says_for_how_long_is_asked_again(hub, pythia, capsys, caplog):
    """The library says how long it waits."""
    hub.busy = [503, 500, 429]
    assert download(NAME) == 0 and caplog.text.count("Waiting 1.0s before retry") == 3
    hub.busy = [503] * 9
    (pythia / "config.json").unlink()
    assert_error(capsys, "answered 503")
    assert len(hub.busy) == 5  # three pauses


@pytest.mark.parametrize(
    "name, proxy, words",
    [
        ("ALL_PROXY", "socks://127.0.0.1:9", ["check", "the proxy", "socks://127.0.0.1:9"]),
        ("HTTPS_PROXY", "http://me:secret@127.0.0.1:9", ["no connection", "through the proxy 127.0.0.1:9"]),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(models_folder, capsys, monkeypatch, name, proxy, words):
    monkeypatch.setenv(name, proxy)
    monkeypatch.setattr(constants, "ENDPOINT", "https://huggingface.co")
    close_session()  # It keeps the proxies of the environment that it was made in.
    try:
        assert_error(capsys, *words)
    finally:
        monkeypatch.undo()
        close_session()


def test_a_proxy_that_needs_another_package_says_which():
    with refused("proxy", "socksio"), hub_errors(NAME, "main"):
        raise ImportError("Using SOCKS proxy, but the 'socksio' package is not installed.")


@pytest.mark.parametrize(
    "endpoint, words",
    [("http://127.0.0.1:9", ["http://127.0.0.1:9", "HF_ENDPOINT", "--offline"]), ("", ["HF_ENDPOINT is empty"])],
)
def test_an_endpoint_that_does_not_answer_is_named_with_the_remedies(
    models_folder, capsys, monkeypatch, endpoint, words
):
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert_error(capsys, *words)


def test_a_part_longer_than_the_file_is_begun_again_and_says_how_far_it_is(hub, pythia, capsys, monkeypatch):
    monkeypatch.setattr(progress, "PAUSE", 0)
    part = pythia.parent / "pythia-70m.incomplete" / "model.safetensors.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"0" * (WEIGHTS + 1))
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME])
    assert f"model.safetensors: {WEIGHTS:,} bytes of {WEIGHTS:,}" in capsys.readouterr().err  # without a terminal


@pytest.mark.parametrize("wrong", [b"1" * WEIGHTS, b"1" * (WEIGHTS - 5)])
def test_content_of_another_hash_or_size_is_never_taken(hub, pythia, capsys, wrong):
    hub.replace["model.safetensors"] = wrong
    if len(wrong) < WEIGHTS:
        hub.cut_after = WEIGHTS - 1  # the connection ends early
    assert_error(capsys, *(["hash"] if len(wrong) == WEIGHTS else []))
    assert not pythia.exists() and not (pythia.parent / "pythia-70m.incomplete" / "model.safetensors").exists()
    hub.replace.clear()
    hub.cut_after = None
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME])


def test_a_disk_that_is_too_small_or_fills_up_is_one_line_and_what_came_is_kept(hub, pythia, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        limit_disk(patch, WEIGHTS)
        assert_error(capsys, "3.0 MB", "free some space")
        assert hub.moved == 0 and not pythia.exists()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))  # no file may grow beyond: as a full disk has it
    try:
        assert_error(capsys, "disk is full", "continues")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not pythia.exists()
    hub.forget()
    assert download(NAME) == 0 and matches(pythia, hub.models[NAME]) and hub.served["model.safetensors"] < WEIGHTS
