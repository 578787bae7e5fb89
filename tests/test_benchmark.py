"""The benchmark from its flags to its files, and the samplers that exist only to be compared with."""

import json

import helpers
import pytest
import torch
from conftest import ROOT
from mistakes import always_accept
from test_head import network_for
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark import __main__ as benchmark
from benchmark import contenders, randomModels, stepTimes, tables, throughput
from benchmark.engines import textCheck
from benchmark.figure import draw_speed, plt, round_shares
from benchmark.options import parse
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.copies import rounded_copy
from engine.cpuModel import CpuModel
from engine.head import save_head
from experiments.intervals import summarize
from experiments.processes import ALONE
from inputs.models import load_model, model_version
from inputs.tokenizers import load_tokenizer
from methods.drafters import ModelDrafter
from utils import GREEDY, UserError, draw

ROWS = [
    "plain, eager",
    "speculative, eager",
    "block verification, eager",
    "prompt lookup, eager",
    "tree of 8, eager",
    "plain, no cache",
    "speculative, no cache",
    "transformers",
    "transformers, static cache",
    "transformers, static cache, compiled",
    "transformers, prompt lookup",
    "transformers, assistant",
    "transformers, assistant as it comes",
    "speculative, inside generate",
]
LEFT_OUT = "transformers, static cache, assistant"


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(stepTimes, "TURNS", (2, 2))
    monkeypatch.setattr(stepTimes, "WARM", 0)
    monkeypatch.setattr(stepTimes, "LARGE", 1 << 20)
    monkeypatch.setattr(stepTimes, "CONTEXTS", (64, 128, 2000))
    for name, value in {"GREEDY_TOKENS": 5, "TEXTS": 3, "TEXT_TOKENS": 20}.items():
        monkeypatch.setattr(textCheck, name, value)
    # The library's compiler is torch's own, which takes half a minute: what it is given is only traced.
    monkeypatch.setattr(contenders, "COMPILING", {"backend": "eager"})


def test_a_run_writes_every_row_and_the_figure(pair_folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "WIDTH", 200)  # So that no name of a row is folded.
    flags = [
        "--target",
        pair_folder / "target",
        "--draft",
        pair_folder / "draft",
        "--maxLen",
        6,
        "--prompts",
        2,
        "--repeats",
        1,
        "--gamma",
        3,
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--no-compile",
        "--out",
        tmp_path,
    ]
    assert benchmark.main([str(flag) for flag in flags]) == 0
    shown = capsys.readouterr().out
    record = json.loads((tmp_path / "benchmark-target.json").read_text())
    methods = [line["method"] for line in record["speed"]]
    assert methods[: len(ROWS)] == ROWS and sorted(methods[len(ROWS) :]) == sorted(ROWS)
    assert all(row in shown for row in ROWS)
    assert {line["tokens"] for line in record["speed"]} == {6}  # the same work for all
    assert list(record["texts"]) == [*ROWS, LEFT_OUT] and LEFT_OUT in shown
    for row, text in record["texts"].items():
        if row != LEFT_OUT:
            assert text["greedy"]["tokens"] == 10 and text["lossless"]["tokens"] == 60, row
    assert "Static" in record["texts"][LEFT_OUT]["failed"]
    assert record["library_compile_seconds"].keys() == {"transformers, static cache, compiled"}
    assert "speculative decoding is" in shown and "generate compiles nothing" in " ".join(shown.split())
    assert all(0 < share <= 1 for line in record["forwards"] for share in line["share"])
    assert {(m["role"], m["tokens"]) for m in record["forwards"]} == {
        (role, n) for role in ("target", "draft") for n in benchmark.WIDTHS
    }
    assert [m["context"] for m in record["growth"]] == [64, 128, 256]  # the tiny models' context
    assert {m["part"] for m in record["parts"]} == {"plain step", "draft step", "scoring", "sampling", "round"}
    assert all(len(m["seconds"]) == 2 for part in ("forwards", "growth", "parts") for m in record[part])
    assert (tmp_path / "figures" / "benchmark-target.png").stat().st_size > 10_000
    shown = tables.speed_table(record)
    columns = {head: [str(row[i]) for row in shown.rows] for i, head in enumerate(shown.heads)}
    for figure in "ttft", "tpot":
        assert all(0 < line[figure] < line["seconds"] for line in record["speed"])
        assert all(columns[f"{figure.upper()}\nms"][: len(ROWS)])
    assert [(m["variant"], m["tokens"]) for m in record["prefill"]] == [("eager", n) for n in (16, 64, 255)]


def test_shapes_are_timed_with_synthetic_acceptance(monkeypatch, tmp_path, capsys):
    for name, shape in {"large": (32, 2, 4), "small": (16, 1, 2)}.items():
        monkeypatch.setitem(randomModels.SHAPES, name, shape)
    for module in benchmark, stepTimes, tables:
        monkeypatch.setattr(module, "PROMPT", 8)
    for module in benchmark, randomModels:
        monkeypatch.setattr(module, "VOCABULARY", 3000)  # What draws cost: a true one makes them longer than forwards.
    assert (
        benchmark.main(
            [
                "--shapes",
                "large,small",
                "--maxLen",
                "6",
                "--prompts",
                "1",
                "--repeats",
                "1",
                "--device",
                "cpu",
                "--no-compile",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    record = json.loads((tmp_path / "benchmark-large.json").read_text())
    assert [line["method"] for line in record["speed"]] == [
        "plain, eager",
        *(f"synthetic {alpha}, eager" for alpha in contenders.ALPHAS),
        "tree, synthetic 0.6, eager",
        "plain, no cache",
        "synthetic 0.6, no cache",
        "transformers",
    ]
    assert record["texts"] == {}  # Such text is nobody's.
    assert "Synthetic acceptance" in capsys.readouterr().out
    assert (tmp_path / "figures" / "benchmark-large.png").exists()


def test_shapes_and_their_copy_are_timed_compiled(kernels, monkeypatch, tmp_path, capsys):
    """With each row of a copy: its acceptance, its gamma and theory."""
    for name, shape in {"large": (32, 2, 4), "small": (32, 1, 4)}.items():
        monkeypatch.setitem(randomModels.SHAPES, name, shape)
    for module in benchmark, stepTimes, tables:
        monkeypatch.setattr(module, "PROMPT", 8)
    for module in benchmark, randomModels:
        monkeypatch.setattr(module, "VOCABULARY", 3000)
    flags = "--shapes large,small --maxLen 12 --prompts 1 --repeats 1 --device cpu --draftBits 5 --gammaCopy 3 --out"
    assert benchmark.main([*flags.split(), str(tmp_path)]) == 0
    record = json.loads((tmp_path / "benchmark-large.json").read_text())
    found = {line["method"]: line for line in record["speed"]}
    copied = [f"own copy in 5 bits, synthetic {alpha}, compiled" for alpha in contenders.COPY_ALPHAS]
    assert [name for name in found if "copy" in name] == [
        *copied,
        "draft, own copy in 5 bits, synthetic 0.6 and 0.93, compiled",
    ]
    assert all(len(line["acceptance_by_position"]) == 3 for name, line in found.items() if "copy" in name)
    assert {m["part"] for m in record["parts"] if m["variant"] == "compiled, own copy"} == {
        "plain step",
        "draft step",
        "scoring",
        "sampling",
        "round",
    }
    predicted = [line for line in tables.predict(record) if line["variant"] == "compiled, own copy"]
    assert [line["alpha"] for line in predicted] == list(contenders.COPY_ALPHAS)
    assert all(line["measured"][0] > 0 for line in predicted)
    own, target = (
        {line["tokens"]: line for line in record["forwards"] if (line["role"], line["variant"]) == (role, "compiled")}
        for role in ("copy", "target")
    )
    assert sorted(own) == list(stepTimes.COPY_WIDTHS) and own[1]["bytes"] < target[1]["bytes"] / 2
    shown = capsys.readouterr().out
    assert "own copy in 5 bits" in shown and "gamma 4 (own copy: 3)" in shown


def test_a_target_that_cannot_be_rounded_has_no_copy():
    """The benchmark leaves the row out, and says why."""
    why = benchmark.own_copy(helpers.tiny(hidden_size=40), 4, False, ALONE)
    assert isinstance(why, UserError) and "no multiple of 32" in str(why)


def test_a_random_model_computes_what_one_made_the_usual_way_does(monkeypatch):
    monkeypatch.setitem(randomModels.SHAPES, "tiny", (32, 2, 4))
    model = randomModels.random_model("tiny", torch.float32, "cpu", 0)
    usual = type(model)(model.config).eval()
    usual.load_state_dict(model.state_dict())
    tokens = torch.randint(0, 50304, (1, 20))
    torch.testing.assert_close(model(tokens).logits, usual(tokens).logits)


def test_a_twin_shares_weights_and_keeps_the_librarys_attention():
    ours = helpers.tiny()
    other = contenders.library_twin(ours.model)
    assert other.config._attn_implementation == "sdpa" != ours.model.config._attn_implementation
    assert all(a is b for a, b in zip(ours.model.parameters(), other.parameters()))


@pytest.mark.parametrize("gamma", [None, 3])
def test_the_librarys_tokens_are_timed_as_they_come(gamma):
    """Not all at the end: a text's record has a time for each forward of the target."""
    target = helpers.tiny()
    assistant = None if gamma is None else helpers.tiny(seed=1).model
    sampler = contenders.library_sampler(target.model, assistant, gamma)
    (tokens,), (record,) = sampler([5, 9, 2], torch.Generator().manual_seed(0), 20)
    assert len(tokens) == record.tokens == 20
    assert len(record.times) > 1 and record.times == sorted(set(record.times))
    assert gamma or len(record.times) == 20
    assert max(record.committed) <= (gamma or 0) + 1


def test_a_prompt_is_read_as_decoding_reads_it(monkeypatch):
    """By the model's own prefill, once for each call, with a KV cache of one size."""
    target, read = helpers.tiny(), []
    prefill = target.prefill
    monkeypatch.setattr(
        target, "prefill", lambda rows: read.append((rows.lengths.tolist(), rows.capacity)) or prefill(rows)
    )
    monkeypatch.setattr(stepTimes, "PROMPTS", (4, 9, 500))
    lines = stepTimes.prefill_times({"eager": {"target": target}}, "cpu", 0)
    assert [line["tokens"] for line in lines] == [4, 9, 127] and all(len(line["seconds"]) == 2 for line in lines)
    assert {tuple(lengths) for lengths, _ in read} == {(4,), (9,), (127,)} and {size for _, size in read} == {128}


def test_a_row_that_writes_another_text_is_named(pair_folder, tmp_path, monkeypatch):
    """Rows whose guesses are all accepted, and one that decodes with the draft alone."""

    def refuses(model, **options):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(contenders, "compiled_by_library", lambda *_, **__: refuses)
    monkeypatch.setattr(contenders, "token_rule", always_accept)
    monkeypatch.setattr(textCheck, "TEXTS", 8)
    honest = contenders.library_sampler
    monkeypatch.setattr(
        contenders,
        "library_sampler",
        lambda model, assistant=None, gamma=None, **options: honest(assistant or model, None, gamma, **options),
    )
    names = [word for role in ("target", "draft") for word in (f"--{role}", str(pair_folder / role))]
    flags = "--maxLen 6 --prompts 2 --repeats 1 --dtype float32 --device cpu --no-compile --out"
    assert benchmark.main([*names, *flags.split(), str(tmp_path)]) == 0
    record = json.loads((tmp_path / "benchmark-target.json").read_text())
    said = tables.texts_of(record)
    assert said["plain, eager"] == said["tree of 8, eager"] == said["plain, no cache"] == "none found"
    assert said["speculative, no cache"].startswith("wrong: ") and said["speculative, eager"].startswith("wrong: ")
    assert said["transformers, assistant"].startswith("wrong: ")
    assert said["transformers, static cache, compiled"].startswith("left out: ")
    assert {line["method"] for line in record["speed"]} >= {"speculative, eager", "transformers, assistant"}


@pytest.mark.parametrize("divisor, flags", [("plain, compiled", []), ("plain, eager", ["eager"])])
def test_a_column_is_named_by_what_it_divides_by(divisor, flags):
    record = json.loads((ROOT / "docs" / "records" / "benchmark.json").read_text())
    if flags:
        record["forwards"] = [line for line in record["forwards"] if line["variant"] == "eager"]
    shown = tables.speed_table(record)
    columns = {head: [str(row[i]) for row in shown.rows] for i, head in enumerate(shown.heads)}
    titles = [title for title in columns if title.startswith("of")]
    assert titles == ["of " + divisor.replace(" ", "\n"), "of\ngenerate"]
    for title, method in zip(titles, (divisor, "transformers")):
        assert columns[title][columns[""].index(method)].split()[0] in ("1", "1.00")


def test_the_limit_is_the_fastest_reading_of_as_many_bytes_or_more(monkeypatch):
    monkeypatch.setattr(stepTimes, "LARGE", 1000)
    sizes = {"target": 5000, "draft": 100}
    speeds = {"target": [10.0, 12.0], "draft": [90.0, 80.0], "memory": [11.0, 13.0]}
    line = {"role": "target", "bytes": 5000, "seconds": [500.0, 400.0]}  # 12.5 bytes per second at best
    assert stepTimes.limit_of("target", sizes, speeds, [line]) == 13  # not the draft's: the cache may hold it
    assert stepTimes.limit_of("draft", sizes, speeds, [line]) == 90
    assert stepTimes.limit_of("target", sizes, speeds, [line | {"seconds": [300.0]}]) == 5000 / 300


@pytest.mark.parametrize("alpha", [0.0, 0.4, 0.8, 1.0])
def test_the_synthetic_rule_accepts_at_its_rate(alpha):
    count, generator = 20_000, torch.Generator().manual_seed(0)
    p, q = (torch.rand(count, n, 7, generator=generator).pow(3) for n in (3, 2))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    drafts = draw(q, generator)
    accepted, token = contenders.synthetic(alpha)(p, q, drafts, torch.rand(count, 3, generator=generator))
    shares = torch.bincount(accepted, minlength=3) / count
    wanted = torch.tensor([1 - alpha, alpha * (1 - alpha), alpha**2])
    torch.testing.assert_close(shares, wanted, atol=0.015, rtol=0)
    assert ((token >= 0) & (token < 7)).all()


@pytest.mark.parametrize(
    "wrong",
    [
        "--target nowhere",
        "--shapes pythia-1m,pythia-70m",
        "--shapes pythia-70m,pythia-70m --target bundled-target",
        "--maxLen 10000",
        "--peers nobody",
        "--draftBits 3",
        "--gammaCopy 0",
        "--head nowhere",
        "--head bundled-head --no-compile",
        "--head bundled-head --shapes pythia-70m,pythia-70m",
    ],
)
def test_a_wrong_flag_is_one_line(wrong, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert benchmark.main(["--out", str(tmp_path), *wrong.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("benchmark: error: ") and captured.err.count("\n") == 1 and not captured.out
    assert not list(tmp_path.iterdir())
    if "1m" in wrong:
        assert all(name in captured.err for name in randomModels.SHAPES)


class KernelCalls(TorchDispatchMode):
    """Counts the calls of this project's kernels: operators, and the methods of decoders, which are none."""

    count = 0

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        for name in "forward", "draw":
            self.patch.setattr(CpuModel, name, self.counting(getattr(CpuModel, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.undo()
        return super().__exit__(*error)

    def counting(self, method):
        def counted(model, *given, **options):
            self.count += 1
            return method(model, *given, **options)

        return counted

    def __torch_dispatch__(self, operator, types, arguments=(), options=None):
        self.count += operator.namespace == "native"
        return operator(*arguments, **(options or {}))


@pytest.fixture(scope="module")
def variants():
    """A tiny pair, eager and with the kernels of a compiled one."""
    models = {"target": helpers.tiny(), "draft": helpers.tiny(seed=1)}
    ready = {
        role: compiled(CachedModel(contenders.sharing_copy(model.model), model.vocabulary))
        for role, model in models.items()
    }
    ready["copy"] = compiled(rounded_copy(models["target"], 4), ready["target"])
    if any(type(model) is CachedModel for model in ready.values()):
        pytest.skip("no C++ compiler")
    return {"eager": models, "compiled": ready}


@pytest.mark.parametrize("flags", [[], ["--shapes", "pythia-70m,pythia-70m"]])
def test_only_compiled_rows_call_kernels(variants, flags):
    """Although the kernels are loaded in this process."""
    options = parse(["--maxLen", "9", *flags])
    library = {role: contenders.library_twin(model.model) for role, model in variants["eager"].items()}
    called = {}
    for name, sampler in contenders.contenders(options, variants, library, [5, 9, 2]).rows.items():
        with KernelCalls() as calls:
            sampler([5, 9, 2], torch.Generator().manual_seed(0), 9)
        called[name] = calls.count > 0
    assert len(called) == (17 if flags else 22)
    assert called == {name: name.endswith("compiled") and "transformers" not in name for name in called}


def test_a_trained_head_guesses_in_compiled_rows(kernels, pair_folder, tmp_path, monkeypatch):
    names, tokenizer = [str(pair_folder / role) for role in ("target", "draft")], load_tokenizer(pair_folder / "target")
    models = {role: load_model(name, tokenizer, "float32", "cpu") for role, name in zip(("target", "draft"), names)}
    save_head(network_for(models["target"]), tmp_path, model_version(names[0]), {})
    options = parse(["--target", names[0], "--draft", names[1], "--maxLen", "9", "--head", str(tmp_path)])
    ready, _ = benchmark.compiled_pair(options, models, [5, 9, 2], ModelDrafter)
    library = {role: contenders.library_twin(model.model) for role, model in models.items()}
    found = contenders.contenders(options, {"eager": models, "compiled": ready}, library, [5, 9, 2]).rows
    assert [name for name in found if "head" in name] == [
        "trained head, compiled",
        "trained head, block verification, compiled",
        f"trained head, tree of {contenders.TREE.size}, compiled",
    ]
    texts = {name: found[name]([5, 9, 2], torch.Generator(), 9, GREEDY)[0] for name in found if "compiled" in name[-9:]}
    assert all(texts[name] == texts["plain, compiled"] for name in texts if "head" in name)
    assert "trained head, as many guesses as pay, compiled" in throughput.own_samplers(ready, options)


def test_only_compiled_parts_call_kernels(variants):
    called = {}
    for variant, models in variants.items():
        generator = torch.Generator().manual_seed(0)
        steps = stepTimes.round_steps(models["target"], models["draft"], [5, 9, 2], 3, generator)
        stepTimes.fill(models["target"], 3, 20)
        steps["forward"] = stepTimes.forward(models["target"], 5, 3)
        steps["prompt"] = stepTimes.first_step(models["target"], 9, 9, generator)
        if "copy" in models:
            by_copy = stepTimes.round_steps(models["target"], models["copy"], [5, 9, 2], 3, generator)
            steps |= {f"{part} with the copy": step for part, step in by_copy.items()}
        for part, step in steps.items():
            with KernelCalls() as calls, torch.inference_mode():
                step()
            called[variant, part] = calls.count > 0
    assert called == {(variant, part): variant == "compiled" for variant, part in called} and len(called) == 19


def test_the_copys_forwards_are_timed_with_their_own_bytes(variants):
    lines, bandwidth = stepTimes.forward_times(variants, "cpu")
    copied = [line for line in lines if line["role"] == "copy"]
    assert [(line["variant"], line["tokens"]) for line in copied] == [("compiled", n) for n in stepTimes.COPY_WIDTHS]
    assert list(bandwidth) == ["target", "draft", "copy", "memory"]
    hidden, inner, vocabulary = 32, 64, 64  # the output layer's last block is filled up
    weights = 2 * (4 * hidden**2 + 2 * hidden * inner) + vocabulary * hidden
    others = 4 * 2 * (4 * hidden + 4 * hidden + inner + hidden)  # float32 norms and biases
    assert stepTimes.weight_bytes(variants["compiled"]["copy"]) == weights * (4 / 8 + 2 / 32) + others


@pytest.fixture
def record():
    """The record that the project keeps."""
    return json.loads((ROOT / "docs" / "records" / "benchmark.json").read_text(encoding="utf-8"))


def test_the_bars_are_sorted_and_those_of_text_that_is_not_lossless_are_hatched(record):
    rows = summarize(record["speed"], "plain, eager")
    axes = plt.subplots()[1]
    draw_speed(axes, rows, {rows[0]["method"]: "found: surprise", rows[1]["method"]: "none found"})
    labels = [label.get_text() for label in axes.get_yticklabels()]
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == sorted(widths) and len(widths) == len(rows)
    assert [label for label, bar in zip(labels, axes.patches) if bar.get_hatch()] == [rows[0]["method"]]
    assert [text.get_text() for text in axes.texts] == [
        f"{width:.{2 - (width >= 10) - (width >= 100)}f}" for width in widths
    ]
    plt.close("all")


def test_the_parts_of_a_round_are_shares_of_it(record):
    record |= {"flags": record["flags"] | {"gamma": 3}}
    seconds = {"draft step": [1.0, 2.0], "scoring": [6.0, 12.0], "round": [10.0, 20.0]}
    record["parts"] = [{"variant": "eager", "part": part, "seconds": taken} for part, taken in seconds.items()]
    ((variant, (whole, shares)),) = round_shares(record).items()
    assert (variant, whole) == ("eager", 15) and list(shares.values()) == pytest.approx([0.3, 0.6, 0.1])
