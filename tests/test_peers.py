"""The benchmark's other engines, with engines that only pretend: which row is timed, and what is said of its text."""

import json
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import helpers
import psutil
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmark import __main__ as benchmark
from benchmark import contenders, randomModels, stepTimes, tables
from benchmark.engines import engineProcess, install, peers, textCheck
from benchmark.engines.engineProcess import EngineProcess, PeerError, Weights
from engine.cachedModel import CachedModel
from inputs.auditTexts import read_texts
from inputs.models import Outline, load_model
from inputs.tokenizers import load_tokenizer
from regrSampling import regrSampling
from utils import GREEDY, Sampling


@pytest.fixture(autouse=True)
def short(monkeypatch, tmp_path):
    monkeypatch.setattr(stepTimes, "TURNS", (2, 2))
    monkeypatch.setattr(stepTimes, "LARGE", 1 << 20)
    monkeypatch.setattr(stepTimes, "CONTEXTS", (64,))
    for name, value in {"GREEDY_TOKENS": 6, "TEXTS": 4, "TEXT_TOKENS": 25}.items():
        monkeypatch.setattr(textCheck, name, value)
    monkeypatch.setattr(peers, "MODELS", tmp_path / "peers")


class Pretender:
    """Stands for the process of an engine. Its texts are the target's own but for a planted fault of the row with that
    engine and draft, {(module, role of the model that drafts): fault}:

    greedy: greedy text is the draft's, as after a wrong conversion. sampled: drawn text is the draft's. load: it does
    not load. late: it fails at its last text.
    """

    def __init__(self, models, faults):
        self.models, self.faults, self.closed, self.left = models, faults, False, None

    def ask(self, do, **asked):
        if do == "convert":
            return {}
        if do == "load":
            draft = asked["draft"] and Path(asked["draft"]).parent.name.split("-")[0]
            self.fault = self.faults.get((asked["module"], draft))
            if self.fault == "load":
                raise PeerError("the library is missing")
            return {"version": "1.0", "settings": {"hint": "f32"}}
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


def test_a_row_is_timed_only_if_its_text_is_right(pair_folder, tmp_path, monkeypatch, capsys):
    tokenizer = load_tokenizer(pair_folder / "target")
    models = {role: load_model(pair_folder / role, tokenizer, "float32", "cpu") for role in ("target", "draft")}
    outline = Outline("target", len(tokenizer), 256)
    faults = {
        ("openvinoGenai", "draft"): "sampled",
        ("llamaCpp", "draft"): "late",
        ("cTranslate", None): "greedy",
        ("openvinoGenai", None): "load",
    }
    made = []

    def pretend():
        made.append(Pretender(models, faults))
        return made[-1]

    monkeypatch.setattr(benchmark, "start_peers", partial(peers.start_peers, start_process=pretend))
    names = [word for role in models for word in (f"--{role}", str(pair_folder / role))]
    monkeypatch.setattr(contenders, "COMPILING", {"backend": "nobody's"})  # The library's compiler takes too long here.
    flags = "--maxLen 7 --prompts 2 --repeats 1 --dtype float32 --device cpu --no-compile --text-check none"
    flags += " --peers --out"
    (tmp_path / "texts").mkdir()
    assert benchmark.main([*names, *flags.split(), str(tmp_path), "--texts", str(tmp_path / "texts")]) == 0
    record = json.loads((tmp_path / "benchmark-target.json").read_text())
    said = {row: words for row, words in tables.texts_of(record).items() if "transformers" not in row}
    expected = {  # how what is said of a row begins
        "OpenVINO, float32": "left out: the library is missing",
        "OpenVINO, float32, speculative": "not lossless: ",
        "OpenVINO, int8 (quantised)": "left out: the library is missing",
        "llama.cpp, float16": "lossless",
        "llama.cpp, float16, speculative": "left out: out of memory",
        "llama.cpp, float16, its 4-bit copy drafts": "lossless",
        "llama.cpp, int8 (quantised)": "lossless",
        "CTranslate2, float32": "left out: not timed: ",
        "CTranslate2, int8 (quantised)": "left out: not timed: ",
    }
    assert list(said) == list(expected)
    assert all(said[name].startswith(words) for name, words in expected.items()), said
    assert "impossible tokens" in said["OpenVINO, float32, speculative"]
    timed = {line["method"] for line in record["speed"]}
    assert timed & set(said) == {name for name, words in expected.items() if not words.startswith("left out")}
    assert all(0 < line["ttft"] < line["seconds"] for line in record["speed"])
    audited = {file.stem: len(read_texts(file, tokenizer, outline)) for file in (tmp_path / "texts").iterdir()}
    names = ["openvino-float32-speculative", "llama.cpp-float16", "llama.cpp-float16-speculative"]
    names += ["llama.cpp-float16-its-4-bit-copy-drafts", "llama.cpp-int8-quantised"]
    assert audited == dict.fromkeys(names, 4)
    peer = next(line for line in record["peers"] if line["method"] == "OpenVINO, float32, speculative")
    assert peer["speculative"] and peer["draft"] == "draft"
    assert peer["settings"] == {"hint": "f32"} and peer["lossless"]["places"] and peer["lossless"]["top_p"] == 0.9
    shown = capsys.readouterr().out
    assert "OpenVINO, float32: left out: the library is missing" in shown
    assert all(child.closed for child in made)


def test_what_does_not_fit_says_so(tmp_path):
    huge = peers.Source(lambda: tmp_path, tmp_path, 1 << 50, 61)
    row = peers.engine_rows("float32")[0]
    checker = textCheck.TextChecker(None, None, 1e-3, 0, False)
    (peer,) = peers.prepare_peers([row], {"target": huge}, checker, [[1]], 5, 3, lambda: pytest.fail("started"))
    assert peer.failed.startswith("converting needs about ") and "of memory" in peer.failed


def test_rows_share_the_memory_that_there_was_before_the_first(tmp_path, monkeypatch):
    """Although it is available still, as where an engine maps its weights from a file."""
    monkeypatch.setattr(peers, "available_memory", lambda device: 1_000_000)
    monkeypatch.setattr(peers, "convert", lambda *_: tmp_path)
    unloadable, *rows = [row for row in peers.engine_rows("float32") if row.stored == 2 and not row.draft] * 2
    source = peers.Source(lambda: tmp_path, tmp_path, 180_000, 61)  # 450,000 bytes with room
    right = SimpleNamespace(greedy=lambda *_: {}, sampled=lambda *_: {})
    children = iter([Pretender({}, {(unloadable.module, None): "load"}), *(Pretender({}, {}) for _ in rows)])
    given = right, [[1]], 5, 3, lambda: next(children)
    first, *others, last = peers.prepare_peers([unloadable, *rows], {"target": source}, *given)
    assert first.failed == "the library is missing"  # It takes nothing.
    assert [peer.failed for peer in others] == [None, None]
    assert last.failed == "loading needs about 450.0 KB of memory, and 100.0 KB are free"
    right.greedy = Mock(side_effect=[PeerError("its text is wrong"), {}, {}])
    children = iter([Pretender({}, {}) for _ in range(3)])
    first, *others = peers.prepare_peers([unloadable, *rows[:2]], {"target": source}, *given)
    assert first.failed == "its text is wrong"  # It has given back what it took.
    assert [peer.failed for peer in others] == [None, None]


def test_a_4_bit_copy_drafts_where_no_model_can(tmp_path):
    """Not where the draft model has another tokenizer, nor where there is none."""
    rows = {
        alpha: peers.peer_rows(Mock(peers=("llama.cpp",), shapes=bool(alpha)), "float32", one_tokenizer=False)
        for alpha in (None, contenders.ALPHAS[1])
    }
    for alpha, words in (None, ""), (contenders.ALPHAS[1], f", synthetic {contenders.ALPHAS[1]}"):
        assert [(row.name, row.draft, row.alpha) for row in rows[alpha] if row.draft] == [
            (f"llama.cpp, float16, its 4-bit copy drafts{words}", "target", alpha)
        ]
    (row,) = (row for row in rows[None] if row.draft)
    child = Mock()
    child.ask.return_value = {"version": "1.0"}
    source = peers.Source(lambda: tmp_path / "model", tmp_path / "converted", 1000, 61)
    (peer,) = peers.prepare_peers([row], {"target": source}, Mock(drawn=[]), [[1]], 5, 3, lambda: child)
    *converted, loaded = (call.kwargs for call in child.ask.call_args_list)
    assert [(asked["source"], asked["bits"]) for asked in converted] == [
        (str(tmp_path / "model"), bits) for bits in (16, 4)
    ]
    assert [loaded[role] for role in ("target", "draft")] == [asked["folder"] for asked in converted]
    assert loaded["target"] != loaded["draft"] and loaded["gamma"] == 3
    assert peer.failed is None and peer.memory == 1.25 * 1000 * (2 + 0.5625)
    assert peer.line()["draft"] == "target" and not peer.line()["quantised"]


def test_a_text_of_another_length_is_refused():
    child = Pretender({}, {})
    child.ask = lambda do, **asked: {"tokens": [1, 2], "times": [[0.1, 1], [0.2, 1]]}
    peer = peers.Peer(peers.engine_rows("float32")[0], 3)
    peer.process = child
    with pytest.raises(PeerError, match="wrote 2 tokens, and 3 were asked for"):
        peer.write([1], 3, 0.0, 0)


ENGINE = """
import os, sys
from types import SimpleNamespace
from benchmark.engines import engineProcess
class Engine:
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
engineProcess.importlib.import_module = lambda name: SimpleNamespace(Engine=Engine)
engineProcess.main()
"""
LOAD = {"target": "t", "draft": None, "precision": "int8", "threads": 1, "gamma": 3, "context": 9, "alpha": None}


def wait_for(condition):
    """Whether a condition comes true in time."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_a_child_answers_between_noise_and_stops_when_idle():
    with closing(EngineProcess([sys.executable, "-c", ENGINE])) as child:
        assert child.ask("load", module="any", **LOAD) == {"version": "1", "settings": {}}
        own = psutil.Process(child.process.pid)
        assert wait_for(lambda: own.status() == psutil.STATUS_STOPPED)
        asked = {"prompt": [5, 6, 7], "count": 2, "temperature": 0.0, "top_p": 1.0}
        assert child.ask("generate", seed=0, **asked) == {"tokens": [5, 6], "times": [[0.5, 2]]}
        with pytest.raises(PeerError, match="^ValueError: two lines$"):
            child.ask("generate", seed=1, **asked)
        with pytest.raises(PeerError, match="exit code 3: the last words"):
            child.ask("generate", seed=2, **asked)
    assert not own.is_running()


def test_a_child_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(engineProcess, "WAIT", 0.2)
    with (
        closing(EngineProcess([sys.executable, "-c", "import time; time.sleep(60)"])) as child,
        pytest.raises(PeerError, match="within"),
    ):
        child.ask("load")
    assert child.process.poll() is not None


def test_in_float32_is_what_a_float32_copy_computes():
    model = helpers.tiny().model.to(torch.bfloat16)
    copy = CachedModel(helpers.tiny().model, 61)
    copy.model.load_state_dict({name: weight.float() for name, weight in model.state_dict().items()})
    weights = [id(weight) for weight in model.parameters()]
    tokens = torch.randint(0, 61, (2, 9))
    torch.testing.assert_close(
        textCheck.Float32Model(model, 61).score(tokens), copy.score(tokens), rtol=1e-4, atol=1e-4
    )
    assert weights == [id(weight) for weight in model.parameters()]
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}


def test_weights_are_read_and_cut(tmp_path, monkeypatch):
    monkeypatch.setitem(randomModels.SHAPES, "tiny", (32, 2, 4))
    model = randomModels.random_model("tiny", torch.bfloat16, "cpu", 0)
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


@pytest.mark.parametrize("name", engineProcess.ENGINES)
@pytest.mark.parametrize(
    "options",
    [
        {"num_key_value_heads": 2, "tie_word_embeddings": True},
        {"num_key_value_heads": 4, "tie_word_embeddings": False, "attention_bias": True},
        {"num_key_value_heads": 1, "tie_word_embeddings": False},
    ],
    ids=["tied", "bias", "one key"],
)
def test_an_engine_decodes_a_llama_model(name, options, tmp_path):
    """Its greedy text is the model's, and is not that of a model that rotates otherwise."""
    needed = [engineProcess.SITE / {"CTranslate2": "ctranslate2", "OpenVINO": "openvino", "llama.cpp": "gguf"}[name]]
    if not all(path.exists() for path in [*needed, *([engineProcess.SERVER] if name == "llama.cpp" else [])]):
        pytest.skip(f"{name} is not installed: python -m benchmark.engines.install")
    model = llama(tmp_path / "model", rope_parameters={"rope_type": "default", "rope_theta": 500.0}, **options)
    other = llama(tmp_path / "other", rope_parameters={"rope_type": "default", "rope_theta": 5.0}, **options)
    size = sum(weight.numel() for weight in model.parameters())
    source = peers.Source(lambda: tmp_path / "model", tmp_path / "converted", size, 61)
    rows = [row for row in peers.engine_rows("float32") if row.engine == name and row.draft != "draft"]
    rows = [row for row in rows if row.stored > 1]
    if name == "llama.cpp":
        rows.append(peers.Row(name, "int8", peers.COPY))  # what drafts, alone
    failed = []
    for reference in model, other:
        checker = textCheck.TextChecker(textCheck.Float32Model(reference, 61), None, 1e-3, 0, False)
        prompts = [[5, 9, 2, 7, 7, 30], [60, 1, 44]]
        made = peers.prepare_peers(rows, {"target": source}, checker, prompts, 6, 3, EngineProcess)
        for peer in made:
            peer.close()
        failed.append([peer.failed for peer in made])
    assert failed[0] == [None] * len(rows), failed
    assert all(words.startswith("not timed: ") for words in failed[1]), failed
    if name == "llama.cpp":
        of_16, of_4 = ((tmp_path / f"converted/llamaCpp-{bits}/model.gguf").stat().st_size for bits in (16, 4))
        assert of_4 < 0.5 * of_16  # In 8 bits it is 0.6.


def test_an_engine_that_does_not_install_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install, "FOLDER", tmp_path)
    commands = []

    def run(command):
        commands.append(command)
        if any("ctranslate2" in word for word in command):
            raise RuntimeError("no matching distribution")

    monkeypatch.setattr(install, "run", run)
    monkeypatch.setattr(install, "build_server", lambda requirement: commands.append([requirement]))
    groups = install.requirements(install.REQUIREMENTS.read_text())
    assert [group[0].split("==")[0] for group in groups] == [
        "openvino-genai",
        "llama-cpp-python",
        "ctranslate2",
        "gguf",
    ]
    assert install.main() == 0
    captured = capsys.readouterr()
    assert captured.err == "ctranslate2 is left out: no matching distribution\n"
    assert len(commands) == 4 and all("--no-deps" in command for command in commands if len(command) > 1)
    assert install.main() == 0 and len(commands) == 5  # Only what failed is tried again.
