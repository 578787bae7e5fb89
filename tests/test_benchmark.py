"""The benchmark: the steps of decoding, `generate` of transformers, random weights, and acceptance by a coin."""

import os
import sys
from unittest.mock import patch

import helpers
import pytest
import torch
from conftest import ROOT, of_kind, one_line, refused
from downloads import limit_disk
from helpers import rounded_copy
from test_speed import measurement
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPTNeoXForCausalLM

from benchmark import others, steps
from benchmark.others import LibraryMethod
from benchmark.peers import PeerError
from decoding.tree import Tree
from decoding.treeRules import synthetic_tree
from decoding.verification import synthetic, token_rule
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.copies import weights_of
from engine.cpuModel import CpuModel
from engine.sharedWeights import library_twin, sharing_copy
from experiments.flags import read_flags
from experiments.settings import parse
from inputs import files, randomModels, starting
from inputs.models import load_model, load_tokenizer
from methods.catalogue import METHODS, choose
from methods.drafters import ModelDrafter
from methods.programs.registry import Generate
from report import figures
from report.runTables import forwards_table, limits_of, round_table, said_of
from utils import GREEDY, Sampling, pick

FREE = Sampling(1.0, 0, 1.0)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(steps, "TURNS", (2, 2))
    monkeypatch.setattr(steps, "LARGE", 1 << 20)
    monkeypatch.setattr(steps, "CONTEXTS", (64, 128, 2000))
    for name, value in {"GREEDY_TOKENS": 5, "TEXTS": 3, "TEXT_TOKENS": 10}.items():
        monkeypatch.setattr(others, name, value)
    # The library's compiler is torch's own, which takes half a minute: what it is given is only traced.
    monkeypatch.setattr(others, "COMPILING", {"backend": "eager"})


# The command.


def test_the_methods_of_transformers_are_timed_and_checked_beside_this_projects(run, figure_files, tmp_path, capsys):
    lines = run("--compare fixed,generate --steps --maxLen 6 --gamma 3 --dtype float32 --texts", tmp_path)
    timed, shown = of_kind(lines), capsys.readouterr().out
    rows = ["target", "fixed", *(f"generate:{kind}" for kind in Generate.rows)]
    assert {line["method"] for line in timed[: len(rows)]} == {*rows} and all(row in shown for row in rows[2:])
    assert {line["tokens"] for line in timed} == {6}  # the same work for all: no text ends early
    assert all(0 < line[figure] < line["seconds"] for line in timed for figure in ("ttft", "tpot"))
    checked = {line["method"]: line for line in lines if line.get("test") == "engine"}
    assert list(checked) == rows[2:]
    gammas = {name: line["settings"]["gamma"] for name, line in checked.items() if line["settings"]}
    assert gammas == dict.fromkeys(("generate:lookup", "generate:draft", "generate:custom"), 3)
    for line in checked.values():
        assert line["failed"] is None and (line["greedy"]["tokens"], line["drawn"]["tokens"]) == (10, 30)
        assert said_of(line) == "no difference found", line
    (end,) = of_kind(lines, "end")
    assert (tmp_path / end["figures"][0]).stat().st_size > 10_000
    found = {
        what: {(line["role"], line.get("tokens")) for line in lines if line.get("what") == what}
        for what in ("reading", "forward", "prefill", "growth", "round")
    }
    models = ("target", "draft")
    assert found == {
        "reading": {(role, None) for role in (*models, "memory")},
        "forward": {(role, n) for role in models for n in steps.WIDTHS},
        "prefill": {("target", n) for n in (16, 64, 255)},
        "growth": {("target", n) for n in (64, 128, 256)},  # the tiny models' context
        "round": {(part, 3) for part in ("plain step", "draft step", "scoring", "sampling", "round")},
    }
    step_lines = [line for line in lines if line.get("of") == "step"]
    assert all(len(line["seconds"]) == 2 for line in step_lines)
    assert all(0 < row[-1].value <= 100 for row in forwards_table(step_lines).rows)  # shares of the limit


def test_lookup_has_no_round_and_what_was_measured_before_a_stop_is_kept(run, tmp_path, capsys, monkeypatch):
    kinds = {line["what"] for line in run("--steps --draft lookup --dtype float32") if line.get("of") == "step"}
    assert kinds == {"reading", "forward", "prefill", "growth"}
    assert "A round of" not in (tmp_path / "results.txt").read_text()

    def stop(*_):
        raise KeyboardInterrupt
        yield

    run("--steps --gamma 100 --dtype float32", out=tmp_path / "long", code=2)
    assert one_line(capsys, "3 rounds of 100 guesses", "lower --gamma")
    monkeypatch.setattr(steps, "token_lines", stop)
    lines = run("--steps --dtype float32", out=tmp_path / "stopped", code=130)
    assert {line["what"] for line in lines[1:]} == {"reading", "forward"}


@pytest.mark.parametrize(
    "given", [["--maxLen", "9"], ["--prompt=a", "--maxLen", "9"], ["--maxLen", "9", "--prompts", "sample"]]
)
def test_the_benchmark_is_test_py_with_flags_that_later_ones_replace(monkeypatch, given):
    """And without those that prompts of the user's own leave no use for."""
    ran = []
    monkeypatch.setattr(starting, "run", lambda script, flags: ran.extend([script, *sys.argv[1:]]))
    monkeypatch.setattr(sys, "argv", ["-m", *given])
    with pytest.raises(SystemExit):
        exec(compile((ROOT / "benchmark/__main__.py").read_text(), "benchmark", "exec"), {"__name__": "__main__"})
    assert ran[:3] == [str(ROOT / "test.py"), "--compare", "all,generate"]
    asked = read_flags(ran[1:])
    assert asked.maxLen == 9 and asked.steps and asked.compile
    assert parse(ran[1:]).texts.sentences == (5 if len(given) == 2 else 10)


@pytest.mark.parametrize(
    "asked, words",
    [
        ("--compare fixed --target random:pythia-1m", "there is no shape 'pythia-1m'; known are: random:pythia-70m"),
        (f"--compare generate --target nobody --texts {ROOT}/docs", "docs is a folder that you may not write to"),
        ("--compare generate --texts . --temperature 0", "--texts keeps drawn texts"),
        ("--lossless fixed --acceptance 0.5", "--acceptance is for measuring speed"),
        ("--compare llama.cpp:plain --device meta", "llama.cpp runs only on the CPU"),
    ],
)
def test_a_wrong_flag_is_one_line(run, asked, words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("experiments.processes.Processes.own_device", lambda processes, name: name or "cpu")
    monkeypatch.setattr(os, "access", lambda path, mode: path != ROOT / "docs")
    run(asked, base=[], code=2)
    assert one_line(capsys, words) and not list(tmp_path.iterdir())


def test_the_name_of_a_program_is_all_of_its_methods_that_the_models_allow():
    kinds = "plain", "copy", "lookup", "bfloat16", "int8", "int4", "q4_0"
    alone = ["target", *(f"llama.cpp:{kind}" for kind in kinds)]
    assert choose("llama.cpp", ["draft model"]) == alone
    assert "llama.cpp:draft" in choose("llama.cpp", [role for m in METHODS.values() for role in m.needs])
    assert choose("all,vllm:plain", [])[-1] == "vllm:plain" and not any(":" in name for name in choose("all", []))


# generate of transformers.


def library():
    return {"target": library_twin(helpers.tiny().model), "draft": library_twin(helpers.tiny(seed=1).model)}


def test_a_twin_shares_weights_and_keeps_the_librarys_attention():
    ours = helpers.tiny()
    other = library_twin(ours.model)
    assert other.config._attn_implementation == "sdpa" != ours.model.config._attn_implementation
    assert all(a is b for a, b in zip(ours.model.parameters(), other.parameters()))


@pytest.mark.parametrize("kind", Generate.rows)
def test_the_librarys_greedy_text_is_the_targets_and_its_tokens_are_timed_as_they_come(kind):
    """Not all at the end: a text's record has a time for each forward of the target."""
    method = LibraryMethod(f"generate:{kind}", library(), 61, 3)
    (tokens,), (record,) = method.write([[5, 9, 2]], 20, GREEDY, [0])
    (plain,), _ = LibraryMethod("generate:plain", library(), 61, 3).write([[5, 9, 2]], 20, GREEDY, [0])
    assert tokens == plain and len(tokens) == record.tokens == 20
    most = 25 if kind in ("assisted", "universal") else 4
    assert record.times == sorted(set(record.times)) and max(record.committed) <= most
    assert len(record.times) == 20 or kind in ("lookup", "draft", "assisted", "universal", "custom")
    if kind in ("draft", "custom"):  # A round is one moment: else a token of it would seem to take no time.
        agreeing = LibraryMethod(f"generate:{kind}", dict.fromkeys(library(), library()["target"]), 61, 3)
        assert agreeing.write([[5, 9, 2]], 20, GREEDY, [0])[1][0].committed.count(4) >= 4
    with pytest.raises(PeerError, match="one text at a time"):
        LibraryMethod(f"generate:{kind}", library(), 61, 3, 2).load({}, 3, 9, 0)


def test_a_method_of_the_library_that_fails_is_left_out(run, monkeypatch):
    """And sampled text is not judged where all is greedy: equal text would say nothing of sampling."""
    honest = LibraryMethod.text

    def text(method, *options):
        if method.kind == "static":
            raise RuntimeError("no such cache")
        return honest(method, *options)

    monkeypatch.setattr(LibraryMethod, "text", text)
    lines = run("--compare generate:static,generate:plain --temperature 0 --maxLen 6 --dtype float32")
    static, plain = (line for line in lines if line.get("test") == "engine")
    assert said_of(static) == "left out: RuntimeError: no such cache" and said_of(plain) == "not tested"
    assert plain["greedy"]["beyond"] == 0 and plain["drawn"] is None
    assert {line["method"] for line in of_kind(lines)} == {"target", "generate:plain"}


# The steps of decoding.


def test_a_step_ends_when_the_device_of_its_own_model_has_done_it(monkeypatch):
    """A draft may be on another device than the target."""
    awaited, models = [], {"target": helpers.tiny(), "draft": helpers.tiny(seed=1)}
    monkeypatch.setattr(steps, "synchronize", awaited.append)

    def time_all(steps):
        return {key: [step() or 1.0] for key, step in steps.items() if key[0] == "draft"}

    list(steps.forward_lines(models, time_all, widths=(1, 2)))
    assert awaited == [models["draft"].device] * 5  # three ways of reading, two forwards


class KernelCalls(TorchDispatchMode):
    """Counts the calls of this project's operators."""

    count = 0

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += operator.namespace == "native"
        return operator(*arguments, **(options or {}))


@pytest.mark.parametrize("variant", ["eager", "compiled"])
def test_only_compiled_steps_call_kernels(variant):
    """The kernels of a compiled pair: its draft is its own copy."""
    called, target, draft = {}, helpers.tiny(), helpers.tiny(seed=1)
    if variant == "compiled":
        copy = rounded_copy(target, 4)
        target = compiled(CachedModel(sharing_copy(target.model), 61))
        draft = compiled(copy, target)
        if any(type(model) is CachedModel for model in (target, draft)):
            pytest.skip("no C++ compiler")

    def once(timed):
        for name, step in timed.items():
            forward, draw = (  # methods of decoders, which are no operators
                patch.object(CpuModel, method, autospec=True, side_effect=getattr(CpuModel, method))
                for method in ("forward", "draw")
            )
            with KernelCalls() as calls, forward as forwards, draw as draws:
                step()
            called[name] = calls.count + forwards.call_count + draws.call_count > 0
        return dict.fromkeys(timed, [1.0])

    lines = [
        *steps.forward_lines({"target": target, "draft": draft}, once),
        *steps.token_lines(target, FREE, once),
        *steps.round_lines(target, ModelDrafter(draft), [5, 9, 2], 3, FREE, once),
    ]
    reads = {name: calls for name, calls in called.items() if isinstance(name, tuple) and name[1] == "read"}
    assert reads and not any(reads.values())
    assert {called[name] for name in called.keys() - reads.keys()} == {variant == "compiled"} and len(lines) == 25
    if variant == "compiled":
        hidden, inner, vocabulary = 32, 64, 64  # the output layer's last block is filled up
        weights = 2 * (4 * hidden**2 + 2 * hidden * inner) + vocabulary * hidden
        others = 4 * 2 * (4 * hidden + 4 * hidden + inner + hidden)  # float32 norms and biases
        assert steps.bytes_of_weights(draft) == weights * (4 / 8 + 2 / 32) + others


def test_a_copy_that_is_not_packed_is_read_in_bytes():
    target = helpers.tiny()
    weights = sum(weight.numel() for weight in weights_of(target.model).values())
    saved = weights * (4 - 1 - 2 / 32)  # of float32
    assert steps.bytes_of_weights(rounded_copy(target, 5)) == steps.bytes_of_weights(target) - saved


def test_a_prompt_is_read_as_decoding_reads_it(monkeypatch):
    """By the model's own prefill, once for each call, with a KV cache of one size."""
    target, read = helpers.tiny(), set()
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda rows: read.add((*rows.lengths.tolist(), rows.capacity)) or prefill(rows)
    )
    monkeypatch.setattr(steps, "PROMPTS", (4, 9, 500))
    lines = list(steps.token_lines(target, FREE, lambda timed: steps.times(timed, "cpu")))
    assert [line["tokens"] for line in lines if line["what"] == "prefill"] == [4, 9, 127]
    assert read == {(4, 128), (9, 128), (127, 128)}


def step(what, role, seconds, **more):
    return {"kind": "costs", "of": "step", "what": what, "role": role, "seconds": seconds, **more}


def test_the_limit_is_the_fastest_reading_of_as_many_bytes_or_more():
    def limits(*forwards):
        read = step("reading", "target", [500.0, 420.0], bytes=5000), step("reading", "draft", [2.0], bytes=100)
        return limits_of([*read, step("reading", "memory", [500.0], bytes=6500), *forwards])

    assert limits() == {"target": 13, "draft": 50, "memory": 13}  # not the draft's: the cache may hold it
    forward = step("forward", "target", [300.0], bytes=5000, tokens=1)
    assert limits(forward)["target"] == 5000 / 300


def test_what_a_round_allows_is_theorys():
    seconds = {"plain step": [1.0], "draft step": [0.1], "scoring": [1.2], "sampling": [0.1], "round": [1.8]}
    table = round_table([step("round", part, taken, tokens=2) for part, taken in seconds.items()])
    allowed = [f"{(1 + a + a * a) / (0.2 + 1.2):.2f}" for a in (0.4, 0.6, 0.8)]
    assert [str(row[-1]) for row in table.rows][-3:] == allowed
    alone = [step("round", part, taken, tokens=2) for part, taken in seconds.items() if part != "draft step"]
    assert str(round_table(alone).rows[-1][-1]) == f"{2.44 / 1.2:.2f}"  # no draft model: a guess costs nothing
    counts = {"target": (10.0, []), "fixed": (15.0, [(6, 4), (4, 1)])}
    texts = [measurement(n, 0, 0, v, acceptance_by_position=of, promptLen=8) for n, (v, of) in counts.items()]
    texts += [text | {"promptLen": 16, "throughput": 7.0} for text in texts]  # after other prompts than the parts
    (theory, allowed), (what, measured) = (row[::2] for row in round_table(alone, texts).rows[-2:])
    assert (str(theory), str(allowed)) == ("speed-up by theory, alpha 0.5", f"{1.75 / 1.2:.2f}")  # that of the texts
    assert (what, str(measured)) == ("speed-up of fixed, measured", "1.50")


def test_the_bars_are_sorted_and_those_of_text_that_is_not_the_targets_are_hatched():
    speeds = {"target": 10.0, "fixed": 30.0, "llama.cpp:int8": 20.0, "vllm:lookup": 5.0}
    common = {"kind": "speed", "mode": "compare", "promptLen": 8}
    lines = [measurement(m, 0, r, v + r, **common) for m, v in speeds.items() for r in range(3)]
    engine = {"kind": "lossless", "test": "engine", "failed": None, "quantised": False}
    lines.append(engine | {"method": "vllm:lookup", "drawn": {"seen_by": ["surprise"], "impossible": 0}})
    lines.append(engine | {"method": "llama.cpp:int8", "drawn": {"seen_by": [], "impossible": 0}})
    (axes,) = figures.draw_speed(lines).axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == sorted(widths) and len(widths) == 4
    assert [bool(bar.get_hatch()) for bar in axes.patches] == [True, False, False, False]
    assert [text.get_text() for text in axes.texts][-1] == "31.0 (2.82 of plain)"
    (unhatched,) = figures.draw_speed([line for line in lines if line.get("method") != "vllm:lookup"]).axes
    assert ["hatched" in each.get_title("left") for each in (axes, unhatched)] == [True, False]


# Random weights, and acceptance by a coin.


@pytest.fixture
def shapes(monkeypatch, models_folder):
    """Tiny shapes, whose models are written to a folder of the test."""
    models_folder.mkdir(exist_ok=True)
    monkeypatch.setattr(randomModels, "TOKENIZER", str(ROOT / "models" / "bundled-target"))
    for name, shape in {"large": (32, 2, 4), "small": (16, 1, 2)}.items():
        monkeypatch.setitem(randomModels.SHAPES, name, shape)
    monkeypatch.setattr(randomModels, "VOCABULARY", 5000)


def test_shapes_are_timed_with_synthetic_acceptance(shapes, run, tmp_path):
    asked = "--target random:large --draft random:small --acceptance 0.8 --maxLen 12 --dtype float32"
    record, *lines = run(f"{asked} --compare fixed,tree,noCache,generate:draft --tree 2,1")
    assert record["models"]["target"]["name"] == "random-large" and record["flags"]["acceptance"] == 0.8
    assert {line["method"] for line in of_kind(lines)} == {"target", "fixed", "tree", "noCache"}
    assert {line["failed"] for line in lines if line.get("test") == "engine"} == {"it cannot accept guesses by a coin"}
    assert not [line for line in lines if line.get("of") == "overlap"]  # They say nothing of such models.
    assert "acceptance 0.8, " in " ".join((tmp_path / "results.txt").read_text().split())


def test_a_random_model_is_a_model_of_that_shape_and_its_tokenizer_has_as_many_tokens(shapes):
    name = randomModels.write_random("random:large")
    before = [file.stat().st_mtime_ns for file in (files.MODELS / name).iterdir()]
    assert randomModels.write_random("random:large") == name  # It is found again.
    assert before == [file.stat().st_mtime_ns for file in (files.MODELS / name).iterdir()]
    tokenizer = load_tokenizer(files.MODELS / name)
    model = load_model(files.MODELS / name, tokenizer, "float32", "cpu")
    assert model.vocabulary == len(tokenizer) == 5000 and tokenizer("a text")["input_ids"]
    assert isinstance(model.model, GPTNeoXForCausalLM) and model.model.config.num_hidden_layers == 2
    assert randomModels.write_random("bundled-target") == "bundled-target"


def test_a_shape_that_the_disk_does_not_hold_is_refused(shapes, monkeypatch):
    limit_disk(monkeypatch, 1000)
    with refused("are needed in ", "where only 1.0 KB are free"):
        randomModels.write_random("random:large")


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.8, 1.0])
def test_the_synthetic_rules_accept_at_their_rate(alpha):
    count, generator = 20_000, torch.Generator().manual_seed(0)
    p, q = (torch.rand(count, n, 7, generator=generator).pow(3) for n in (3, 2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafts, u = pick(q, torch.rand(q.shape[:-1], generator=generator)), torch.rand(count, 3, generator=generator)
    accepted, token = synthetic(alpha)(p.clone(), q, drafts, u)
    shares = torch.bincount(accepted, minlength=3) / count
    wanted = torch.tensor([1 - alpha, alpha * (1 - alpha), alpha**2])
    torch.testing.assert_close(shares, wanted, atol=0.015, rtol=0)
    assert ((token >= 0) & (token < 7)).all()
    assert synthetic(alpha, token_rule) is synthetic(alpha, token_rule)  # An engine may have recorded it.
    accepted, *_ = synthetic_tree(alpha)(p.clone(), q, drafts, u, Tree.of("2"))  # two siblings
    share = (accepted > 0).float().mean().item()
    assert share == pytest.approx(1 - (1 - alpha) * (1 - alpha / 2), abs=0.015)
    q[:, 1] = 0  # A greedy draft has no second child.
    accepted, *_ = synthetic_tree(alpha)(p, q, drafts, u, Tree.of("2"))
    assert (accepted > 0).float().mean().item() == pytest.approx(alpha, abs=0.015)
