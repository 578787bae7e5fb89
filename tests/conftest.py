"""What several test files share: a pair of tiny models on disk, a short text, and the command line as a module."""

import gc
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # Several workers share the processor: a thread for each, also in its children.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")  # Its kernels run on a CPU. Read when it is imported.

import downloads
import helpers
import pytest
import torch
from huggingface_hub import constants
from localHub import LocalHub
from matplotlib.figure import Figure
from tokenizerKinds import KINDS, byte_level

from engine import copies, gate
from engine.kernels import loader
from inputs import files, progress
from lossless.mistakes import MISTAKES
from methods import selfDraft
from utils import UserError

ROOT = Path(__file__).resolve().parent.parent
END_OF_TEXT = "<|endoftext|>"
VOCABULARY, PADDED, CONTEXT = 300, 320, 256  # entries of the tokenizer, and of the models: as Pythia's are padded
progress.PAUSE = math.inf  # Tests read what is printed, however long a busy machine takes.


def with_ctrl_c():
    """For a process to be interrupted: what a shell starts in the background, tests too, ignores Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


WRITING = "--promptLen", "--maxLen", "--repeats"  # flags that --ppl alone has no use for


def prompted(flags, *names):
    """The flags without those that choose prompts of the data set (or without `names`), for a run that has its prompts
    from elsewhere, or none."""
    unused = names or ("--dataset", "--sentences", "--sentenceLimit", "--promptLen")
    return [word for pair in zip(flags[::2], flags[1::2]) if pair[0] not in unused for word in pair]


def few_mistakes(monkeypatch, *names):
    """Plant these alone of the mistakes of --lossless, the first by default: all are in test_losslessness.py."""
    some = {name: MISTAKES[name] for name in names or ("replace from p",)}
    monkeypatch.setattr("lossless.trial.MISTAKES", some)


def refused(*words):
    """`pytest.raises` for a UserError of one line in which all `words` appear."""
    return pytest.raises(UserError, check=lambda e: "\n" not in str(e) and all(word in str(e) for word in words))


def one_line(capsys, *words, script="test.py"):
    """What a script printed. Of an error it is the one line of a user's error, in which all `words` appear."""
    captured = capsys.readouterr()
    assert captured.err.startswith(f"{script}: error: ") and captured.err.count("\n") == 1, captured.err
    assert captured.err[-1] == "\n" and all(word in captured.err for word in words), captured.err
    return captured


@pytest.fixture(scope="module", autouse=True)
def frozen_heap():
    """What the process has imported and collected so far is of no interest to garbage collections: a full one visits
    all objects of torch and transformers, half a second, and `experiments.speed.in_turns` asks for one before it times
    anything. For the same reason nothing is unfrozen between tests."""
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def short_measurements(tmp_path_factory):
    """No step is warmed up until its time is right nor timed again where a busy machine stalled, a sweep measures each
    step twice, and the target's own copy is measured on short texts and kept in a folder of this test run. Nothing
    waits for the disk."""
    folder = tmp_path_factory.mktemp("copies")
    base = tmp_path_factory.getbasetemp()
    verdicts = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one folder for all workers
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"speed.WARM_SECONDS": 0, "speed.WARM": 1, "speed.STALLED": 1e9}.items():
            patch.setattr(f"experiments.{name}", value)
        patch.setattr("experiments.sweep.REPEATS", 2)
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(copies, "cache_folder", lambda: folder)
        patch.setattr(gate, "cache_folder", lambda: verdicts)
        patch.setattr(selfDraft, "TEXTS", (2, 12))
        patch.setattr(selfDraft, "TIMINGS", 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def stand_in_for_figures():
    """Figures are drawn, but laid out and written as files only in tests that use `figure_files`. Returns savefig."""
    whole = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path, **options: Path(path).write_bytes(b"\x89PNG"))
        yield whole


@pytest.fixture
def figure_files(monkeypatch, stand_in_for_figures):
    """Figures are written as in a run."""
    monkeypatch.setattr(Figure, "savefig", stand_in_for_figures)


@pytest.fixture(scope="session")
def pair_folder(tmp_path_factory):
    """A folder that holds `target` and `draft`: random GPT-NeoX models that share a byte-level BPE tokenizer."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = byte_level(VOCABULARY, end=END_OF_TEXT)
    tokenizer.unk_token, tokenizer.model_max_length = END_OF_TEXT, CONTEXT
    for seed, (name, layers) in enumerate({"target": 2, "draft": 1}.items()):
        helpers.tiny(seed=seed, vocabulary=PADDED, layers=layers, context=CONTEXT).model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def pair():
    """Two unlike models, the second with one layer."""
    return helpers.tiny(seed=0), helpers.tiny(seed=1, layers=1)


@pytest.fixture(scope="session")
def kinds():
    """{name: a small tokenizer of that kind}."""
    return {name: make() for name, make in KINDS.items()}


@pytest.fixture
def model_folder(pair_folder, tmp_path):
    """A copy of the target's folder, to be damaged."""
    return Path(shutil.copytree(pair_folder / "target", tmp_path / "model"))


@pytest.fixture
def copy(tmp_path):
    """A copy of the documentation and its records, which the test may change."""
    folder = tmp_path / "copy"
    for name in ("docs", "figures"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("README.md", "README.zh-CN.md"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """Four paragraphs of some 90 characters."""
    file = tmp_path_factory.mktemp("texts") / "short.txt"
    rest = "the lamp was lit and the tide was out, and nobody in the harbour had heard the bell."
    file.write_text("\n\n".join(f"{word} {rest}" for word in ("Before", "After", "While", "Though")))
    return file


@pytest.fixture(scope="session")
def cli():
    """test.py, loaded by its path: `import test` may find the standard library's package."""
    spec = importlib.util.spec_from_file_location("command_line", ROOT / "test.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def flags(pair_folder, text_file):
    """Flags of a small run on the tiny pair, all but --out."""
    paths = {"--target": pair_folder / "target", "--draft": pair_folder / "draft", "--dataset": text_file}
    sizes = "--sentenceLimit 60 --sentences 2 --promptLen 12 --maxLen 8 --repeats 1"
    return [*(str(word) for flag in paths.items() for word in flag), *sizes.split()]


def lines_of(folder):
    """The lines of results.jsonl in a folder; none if there is no file."""
    file = folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def of_kind(lines, kind="speed"):
    return [line for line in lines if line["kind"] == kind]


@pytest.fixture
def run(cli, flags, tmp_path):
    """`run("--speed --seed 3", *more)`: the lines of results in `out` after test.py with these flags. base: the flags
    before them. code: the exit code."""

    def call(words, *more, base=flags, out=tmp_path, code=0):
        out.mkdir(exist_ok=True)
        given, to = set(words.split()), ("--out", out)
        if {"--show", "--chat", "--html"} & given:  # They play one text, and keep nothing.
            unused, to = ("--repeats", "--sentences"), ()
        elif "--steps" in given and "--compare" not in given:
            unused = "--repeats", "--sentences", "--maxLen"
        else:
            unused = ("--repeats",) if "--lossless" in given and "--compare" not in given else ("none",)
        flags = prompted(base, *unused)
        assert cli.main([*flags, *words.split(), *map(str, [*more, *to])]) == code
        return lines_of(out)

    return call


@pytest.fixture(scope="session")
def kernels():
    """The C++ kernels, loaded; without a compiler the test is skipped."""
    try:
        loader.load()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C++ compiler")


@pytest.fixture
def three_threads():
    """Torch and the kernels compute with three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub on localhost, which the client libraries take for the hub."""
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with LocalHub() as local:
        places = {"HF_HUB_CACHE": str(tmp_path / "hub-cache"), "HF_TOKEN_PATH": str(tmp_path / "no-token")}
        places["HUGGINGFACE_CO_URL_TEMPLATE"] = local.url + "/{repo_id}/resolve/{revision}/{filename}"
        for name, value in (places | {"ENDPOINT": local.url}).items():
            monkeypatch.setattr(constants, name, value)
        yield local


@pytest.fixture
def models_folder(tmp_path, monkeypatch):
    """An empty folder that is taken for models/. Downloads into it are written in small pieces, without pauses."""
    monkeypatch.setattr(files, "MODELS", tmp_path / "models")
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", downloads.CHUNK)
    return tmp_path / "models"


@pytest.fixture
def pythia(hub, models_folder):
    """Where the model `downloads.NAME`, which the hub has, is downloaded to."""
    hub.models[downloads.NAME] = downloads.model_repository()
    return models_folder / "pythia-70m"
