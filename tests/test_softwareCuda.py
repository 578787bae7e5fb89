"""The GPU's code on a software CUDA device (softwareCuda.py): every method, eager and recorded by CUDA graphs. The same
methods on the GPU of an Apple computer, made of software too.

The whole matrix takes minutes: `make test-cuda`, or FULL=1 in the environment. The suite runs a part of it.
"""

import contextlib
import functools
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock
from unittest.mock import Mock

import helpers
import pytest
import softwareCuda
import torch
from conftest import of_kind, prompted, refused
from helpers import FULL, compiled_roles, roles
from transformers import GPTNeoXConfig

import inputs.models as loaders
import PPL
import specSampling as loop
import utils
from benchmark import steps as step_times
from decoding.rows import Rows
from decoding.verification import RULES as VERIFICATIONS
from engine import compiling, cudaModel
from engine.cachedModel import CachedModel
from engine.compiling import compiled
from engine.cudaModel import CudaModel, no_captures
from inputs import randomModels
from lossless.mistakes import always_accept
from methods.catalogue import METHODS, build
from methods.contrastive import Contrast
from methods.samplers import Decoding
from regrSampling import regrSampling
from report import selfCheck
from utils import GREEDY, Sampling

DRAWS = 20_000 if FULL else 5_000
FREE = Sampling(1.0, 0, 1.0)
PENALISED = Sampling(0.0, 0, 1.0, 1.3)
DECODING = Decoding(gamma=3, gamma1=2, gamma2=3, contrastive_temperature=0.0)
ENGINES = ("eager", "recorded")
FEW, MANY = 5, 41  # tokens in a vocabulary: of drawn texts, so that all can be counted, and of greedy ones
# Ragged prompts; a second text in the same cache; a longer cache; the first again, in the longer cache.
FIRST, SECOND = [[1, 30, 3, 24, 2], [3, 11]], [[40, 4, 0, 1, 22], [22, 10, 1, 4]]
TEXTS = ((FIRST, 10), (SECOND, 10), (SECOND, 16), (FIRST, 10))


@pytest.fixture
def gpu():
    """Software; with GPU=1 the real one, for texts alone. Compiling anew for each test would take minutes."""
    real = mock.patch.object(torch, "compile", lambda forward, **options: forward)
    with real if os.environ.get("GPU") else softwareCuda.machine(2) as machine:
        yield machine


@pytest.fixture
def apple():
    """The GPU of an Apple computer."""
    with softwareCuda.machine(kind="mps") as machine:
        yield machine


WITHOUT_CACHE = {"noCache", "speculativeNoCache"}  # They compute no step that could be captured.
# Other programs run as they do. The trained head has its test in test_head.py.
ON_GPU = [name for name, method in METHODS.items() if not method.engine and name != "head"]


@functools.cache
def on_cpu(vocabulary=MANY):
    return roles("cpu", vocabulary)


def on_gpu(engine, vocabulary=MANY, **others):
    """The models on the software device, others as given; recorded, as `--compile` does, or not."""
    models = roles("cuda", vocabulary) | others
    return models if engine == "eager" else compiled_roles(models)


def is_recorded(made):
    """Whether steps were captured, and none stays eager because it cannot be."""
    graphs = [model for model in made.values() if isinstance(model, CudaModel)]
    return any(model.graphs for model in graphs) and not any(model.refused for model in graphs)


def sampler(name, made, decoding=DECODING):
    return build([name], made, decoding)[name]


def every(*full, suite=()):
    """Cells of the matrix: all of them with FULL, else those of `suite`."""
    cells = [(name, engine) for name in ON_GPU for engine in ENGINES] if FULL else suite
    return pytest.mark.parametrize("name, engine", cells)


@every(suite=[("draftConfidence", "eager"), ("speculativeNoCache", "eager"), ("fixed", "recorded")])
def test_greedy_texts_are_those_of_the_cpu(gpu, name, engine):
    """Ragged batches, a second text in the same cache, and a repetition penalty; FULL=1: a longer cache. The suite has
    other methods, recorded, in `test_a_round_has_one_host_sync`."""
    cpu = on_cpu()
    for sampling in (GREEDY, PENALISED) if FULL or name == "fixed" else (GREEDY,):
        made = on_gpu(engine)
        write, wanted = sampler(name, made), sampler(name, cpu)
        for prompts, length in TEXTS if FULL else TEXTS[: 2 if (name, sampling) == ("fixed", GREEDY) else 1]:
            texts = write(prompts, max_len=length, sampling=sampling)[0]
            assert texts == wanted(prompts, max_len=length, sampling=sampling)[0]
            if METHODS[name].lossless:
                assert texts == regrSampling(prompts, cpu["target"], length, sampling)[0]
        assert (engine == "recorded" and name not in WITHOUT_CACHE) == is_recorded(made)


def p_value(name, made, device, sampling):
    """Of texts of few tokens drawn by a method on a device."""
    decoding, prompt = Decoding(gamma=2, gamma1=1, gamma2=2, contrastive_temperature=1.0), [1, 2, 3]
    generator, cpu = torch.Generator(device).manual_seed(0), on_cpu(FEW)
    write = sampler(name, made, decoding)
    texts, _ = write([prompt] * DRAWS, max_len=3, sampling=sampling, generator=generator)
    source = cpu["target"] if METHODS[name].lossless else cpu.get(name, Contrast(cpu["target"], cpu["draft"]))
    shape = FREE if METHODS[name].contrasts else sampling  # Contrastive decoding ignores the filters.
    return helpers.chi_square(texts, helpers.joint_distribution(source, prompt, 3, shape), FEW)


@every(suite=[("fixed", "recorded"), ("block", "recorded")])
def test_drawn_texts_have_the_right_distribution(gpu, name, engine):
    assert p_value(name, on_gpu(engine, FEW), "cuda", FREE) > 1e-4


@every(suite=[("fixed", "recorded")])
def test_a_queue_is_that_of_the_cpu(gpu, name, engine):
    """Rows that end make room, and at its end few graphs serve the batch: of four rows, two, and one."""
    cpu, made, prompts = on_cpu(), on_gpu(engine), [*FIRST, *SECOND, [7]]
    wanted = sampler(name, cpu)(prompts, max_len=10, sampling=GREEDY)[0]
    assert sampler(name, made)(prompts, max_len=10, sampling=GREEDY, batch=4)[0] == wanted
    if engine == "recorded" and METHODS[name].lossless:
        rows = {key[2][0] for key in made["target"].graphs if key[0] in ("score_block", "forward")}
        assert rows <= {1, 2, 4}


ASKING = "draftConfidence", "costAware", "lookupFirst", "cascade", "tree"


@every(suite=[(name, "recorded") for name in ASKING])
def test_a_round_has_one_host_sync(gpu, name, engine, monkeypatch):
    """As many as rounds, and one for the prefill; where each is, and no copy to the device that waits. draftConfidence
    has one more for every two tokens that the draft draws. The texts are the CPU's."""
    if name in WITHOUT_CACHE:
        pytest.skip("it reads the whole text in every round, whose length it asks for")
    made, rounds, drawn = on_gpu(engine), [], []
    advance, draw = loop.advance, made["draft"].draw
    monkeypatch.setattr(loop, "advance", lambda *given: rounds.append(1) or advance(*given))
    monkeypatch.setattr(made["draft"], "draw", lambda *given: drawn.append(len(given[2])) or draw(*given))
    write = sampler(name, made, replace(DECODING, gamma=7) if name == "draftConfidence" else DECODING)
    for prompts in FIRST, SECOND, SECOND:  # The first two make the captures, which synchronise.
        rounds.clear()
        drawn.clear()
        gpu.forget()
        with no_captures() if gpu.captures else contextlib.nullcontext():
            texts, records = write(prompts, max_len=12, sampling=GREEDY)
        assert texts == regrSampling(prompts, on_cpu()["target"], 12, GREEDY)[0] or not METHODS[name].lossless
    assert (engine == "recorded") == is_recorded(made)
    count = len(rounds) or max(len(record.times) for record in records) - 1
    places = Counter(place.split(":")[0] for _, place in gpu.syncs)
    assert places.pop("decoding/rows.py") == count + 1
    asked = places.pop("methods/drafters.py", 0)
    assert asked <= sum(drawn) / 2 and (asked > 0) == (name == "draftConfidence") and not places
    assert {what for what, _ in gpu.syncs} <= {"copy to the host", "_local_scalar_dense"}
    ended = 2  # Rows end, and their state is copied; ragged guesses are, too.
    assert len(gpu.copies) <= 2 * count + ended + 6


@pytest.mark.parametrize(
    "name, engine, device",
    [(name, engine, device) for name in ON_GPU for engine in ENGINES for device in ("cuda:1", "cpu")]
    if FULL
    else [("draftConfidence", "recorded", "cuda:1"), ("fixed", "eager", "cuda:1"), ("fixed", "eager", "cpu")],
)
def test_a_draft_on_a_device_of_its_own_writes_the_same(gpu, name, engine, device):
    """Greedy texts, with a repetition penalty too; and one host sync a round if both are GPUs."""
    cpu = on_cpu()
    for sampling in (PENALISED, GREEDY) if FULL else (PENALISED if name == "fixed" else GREEDY,):
        made = on_gpu(engine, draft=roles(device, MANY)["draft"])
        texts = sampler(name, made)(FIRST, max_len=10, sampling=sampling)[0]
        assert texts == sampler(name, cpu)(FIRST, max_len=10, sampling=sampling)[0]
    for _ in range(1 + (engine == "recorded")):  # The first text makes the captures, which synchronise.
        gpu.forget()
        generator = torch.Generator("cuda").manual_seed(0)  # It draws for both devices.
        _, records = sampler(name, made)(FIRST, max_len=10, sampling=FREE, generator=generator)
    if (name, device) == ("fixed", "cuda:1"):
        assert len(gpu.syncs) == max(len(record.times) for record in records)


@pytest.mark.parametrize(
    "machine, devices", [("gpu", ("cuda", "cuda:1")), ("gpu", ("cuda", "cpu")), ("apple", ("mps", "mps"))]
)
def test_perplexity_is_that_of_the_cpu(request, machine, devices):
    """On one device, and with a draft on a device of its own, compiled where it can be."""
    request.getfixturevalue(machine)
    pairs = [[roles(device)[role] for role, device in zip(("target", "draft"), of)] for of in (("cpu",) * 2, devices)]
    wanted, found = (PPL.perplexities(FIRST[0] * 4, *pair) for pair in (pairs[0], map(compiled, pairs[1])))
    assert found == pytest.approx(wanted, rel=1e-6)


# Planted mistakes. Each of them works on a CPU.


def text_of():
    write = sampler("fixed", on_gpu("recorded"))
    return [write(prompts, max_len=10, sampling=GREEDY)[0] for prompts in (FIRST, SECOND)]


@functools.cache
def right():
    return [regrSampling(prompts, on_cpu()["target"], 10, GREEDY)[0] for prompts in (FIRST, SECOND)]


def test_a_tensor_left_on_the_cpu_is_caught(gpu, monkeypatch):
    monkeypatch.setattr(Rows, "offsets", lambda self, first, count: torch.arange(first, first + count))
    with pytest.raises(RuntimeError, match="same device.*rows.py"):
        text_of()


def test_a_value_baked_into_a_recording_is_caught(gpu, monkeypatch):
    """Where the first text's tokens went is where all go: a replay must read the positions again."""
    forward, kept = CachedModel.forward, {}

    def baked(self, tokens, positions, *rest, **options):
        if self.device.type == "cpu" or not CudaModel.eager:
            return forward(self, tokens, positions, *rest, **options)
        with contextlib.nullcontext() if softwareCuda.MACHINE.recording else torch.inference_mode():
            first = kept.setdefault((id(self), positions.shape, id(self.cache)), positions.clone())
        return forward(self, tokens, first, *rest, **options)

    monkeypatch.setattr(CachedModel, "forward", baked)
    assert text_of() != right() and kept


@pytest.mark.parametrize(
    "place, name, mistake",
    [
        (softwareCuda.Graph, "replay", lambda graph: None),
        (cudaModel, "tree_map_only", lambda kind, clone, results: results),  # Not cloned: the pool's graphs share it.
    ],
)
def test_a_result_that_is_not_computed_again_or_is_overwritten_is_caught(gpu, monkeypatch, place, name, mistake):
    """What a capture leaves, and another graph's replay, are nan and -1."""
    monkeypatch.setattr(place, name, mistake)
    with pytest.raises(Exception, match="not finite|index|range"):
        assert text_of() == right(), "a text that is not finite"


def test_a_wait_in_every_round_is_counted(gpu, monkeypatch):
    commit = Rows.commit

    def slow(self, drafts, accepted, *rest):
        assert accepted.max() >= 0
        return commit(self, drafts, accepted, *rest)

    monkeypatch.setattr(Rows, "commit", slow)
    _, records = sampler("fixed", on_gpu("eager"))(FIRST, max_len=10, sampling=GREEDY)
    assert len(gpu.syncs) > max(len(record.times) for record in records)


# The device itself.


DOUBLE = torch.tensor(1.0, dtype=torch.float64)
REFUSED = [
    ("cuda", "same device", lambda there: there + torch.arange(3, device="cuda:1")),
    ("cuda", "same device", lambda there: torch.cat([there, torch.arange(3)])),
    ("cuda", "numpy", lambda there: there.numpy()),
    ("cuda", "generator", lambda there: torch.rand(2, device="cuda", generator=torch.Generator())),
    ("cuda", "generator", lambda there: torch.rand(2, generator=torch.Generator("cuda"))),
    ("cuda", "ordinal", lambda there: torch.zeros(1, device="cuda:2")),
    ("mps", "MPS", lambda there: torch.zeros(1, dtype=torch.float64, device="mps")),
    ("mps", "MPS", lambda there: DOUBLE.to("mps")),
    ("mps", "MPS", lambda there: there.double()),
    ("mps", "MPS", lambda there: torch.mul(there.float(), DOUBLE)),
    ("mps", "MPS", lambda there: there.bfloat16()),
    ("mps", "MPS", lambda there: there.sort()),
    ("mps", "MPS", lambda there: there.topk(2)),
    ("mps", "dimensions", lambda there: torch.zeros(1, 1, 1, 1, 2, device="mps").cumsum(0)),
]


@pytest.mark.parametrize("kind, words, work", REFUSED)
def test_what_a_device_refuses_is_refused(kind, words, work):
    with softwareCuda.machine(2 if kind == "cuda" else 1, kind=kind):
        there = torch.arange(3, device=kind)
        with pytest.raises((RuntimeError, TypeError), match=words):
            work(there)
        assert (there + torch.tensor(2)).tolist() == [2, 3, 4]  # A 0-dimensional CPU tensor is a number.
        assert there.float().sort(descending=True).values.tolist() == [2.0, 1.0, 0.0] and there.device.type == kind
        assert torch.tensor([1.0], device="meta").is_meta  # Else transformers leaves a model's buffers unwritten.


def test_memory_that_nobody_has_written_is_poisoned(gpu):
    given = torch.ones(2, device="cuda")
    for made in torch.empty(3, device="cuda"), torch.empty_like(given), given.new_empty(2):
        assert made.isnan().all()
    assert torch.empty(2, dtype=torch.int64, device="cuda").tolist() == [-1, -1]


WAITING = [
    lambda there: there.sum().item(),
    lambda there: there.tolist(),
    lambda there: there.cpu(),
    lambda there: there[there > 3],
    lambda there: there.nonzero(),
    lambda there: there.unique(),
    lambda there: bool((there > 3).any()),
    lambda there: torch.tensor([1, 2], device="cuda"),
    lambda there: there[torch.tensor([1, 2])],
    lambda there: torch.cuda.synchronize(),
]
FORBIDDEN = [
    *WAITING,
    lambda there: torch.rand(2, device="cuda"),
    lambda there: torch.tensor([1.0]).pin_memory(),
    lambda there: torch.cuda.empty_cache(),
]


def test_syncs_are_counted_with_their_lines_and_forbidden_in_a_capture(gpu):
    there = torch.arange(6, device="cuda")
    for i, work in enumerate(WAITING, 1):
        work(there)
        assert len(gpu.syncs) == i
    assert all(place.startswith("tests/test_softwareCuda.py:") for _, place in gpu.syncs)
    gpu.forget()
    torch.tensor([1, 2]).pin_memory().to("cuda", non_blocking=True)
    there[1:4].add_(1).clamp_(max=3)[None, :].gather(1, there[:1][None])
    assert gpu.syncs == [] and len(gpu.copies) == 1
    for work in FORBIDDEN:
        with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            work(there)


def test_memory_that_was_freed_after_a_capture_is_caught(gpu):
    graph = torch.cuda.CUDAGraph()
    given, kept = torch.ones(2, device="cuda"), torch.ones(2, device="cuda")
    with torch.cuda.graph(graph):
        total = given + kept
    graph.replay()
    assert total.tolist() == [2.0, 2.0]
    del given
    graph.replay()
    assert total.isnan().all()


# The command lines on it.


ON_CUDA = "--device cuda --dtype float32 "


def test_a_recorded_run_and_its_repetition(gpu, run):
    lines = run(ON_CUDA + "--compare fixed --maxLen 4 --sentences 1 --compile")
    assert {line["method"] for line in of_kind(lines)} == {"target", "fixed"}
    run("--rerun 1", base=[])


ANALYSES = "--ppl", "--speed", "--compare", "--lossless", "--sweep", "--diversity"
MODES = {
    "cuda": [
        "--speed --compile",
        "--compare block,lookup,tree --compile --batch 2 --sentences 3 --maxLen 6",
        "--speed --compile --draftVocab 100 --repeats 1",
        "--speed --ppl --draftDevice cuda:1",
        "--compare all --compile --maxLen 6",
        "--lossless fixed,draftConfidence,lookup --tokens 500 --dtype bfloat16 --compile",
        "--sweep --compile --sentences 1 --maxLen 6",
        "--diversity --prompt lamp --maxLen 6 --repeats 2",
        "--show --compile",
        "--compare fixed,generate:plain --steps --compile --maxLen 6",
    ],
    "mps": [
        "--speed --ppl --compile --top_k 5 --dtype float32 --sentences 1 --maxLen 4",  # What is compiled stays eager.
        "--speed --sentences 1",
        "--compare all --maxLen 6 --dtype float32 --repetition_penalty 1.2",
        "--speed --draftDevice cpu --dtype float32",
        "--speed --draftVocab 100 --dtype float32",
        "--lossless fixed,draftConfidence,lookup --tokens 500",
        "--sweep --sentences 1 --maxLen 6 --dtype float32",
        "--diversity --prompt lamp --maxLen 6 --repeats 2",
        "--show",
    ],
}
RUNS = [(device, words) for device in MODES for words in MODES[device]] if FULL else [("mps", MODES["mps"][0])]


@pytest.fixture
def few_steps(monkeypatch):
    """Steps are timed once, on short texts."""
    for name, value in {"TURNS": (1, 1), "LARGE": 1 << 20, "CONTEXTS": (64, 128)}.items():
        monkeypatch.setattr(step_times, name, value)


@pytest.mark.parametrize("device, words", RUNS)
def test_every_mode_runs(run, flags, capsys, few_steps, device, words):
    more = words.split()
    with softwareCuda.machine(2 if device == "cuda" else 1, kind=device):
        for _ in range(1 + ("cuda:1" in words)):  # The second run finds the memory that the first one leaves.
            base = prompted(flags) if "--prompt" in more else flags
            lines = run({"cuda": ON_CUDA, "mps": "--device mps "}[device] + words, base=base)
    named = {"--compare": "speed", "--sweep": "costs"}
    kinds = {"queue"} if "--batch" in words else {named.get(word, word[2:]) for word in more if word in ANALYSES}
    assert kinds <= {line["kind"] for line in lines}
    if "--steps" in more:
        assert {line["method"] for line in of_kind(lines)} == {"target", "fixed", "generate:plain"}
        assert {line["what"] for line in lines if line.get("of") == "step"} >= {"forward", "prefill", "growth", "round"}
    assert ("not on mps" in capsys.readouterr().err) == (device == "mps" and "--compile" in words)


@pytest.mark.parametrize("device", ["cuda", "cpu"] if FULL else ["cpu"])
def test_the_check_of_a_device_is_one_page(gpu, cli, flags, capsys, monkeypatch, few_steps, device):
    """Models are small here. Planted: all guesses are accepted, and no model can be compiled."""
    monkeypatch.setattr(selfCheck, "LENGTH", 6)
    monkeypatch.setattr(randomModels, "VOCABULARY", 64)
    monkeypatch.setattr(selfCheck, "BUNDLED", " ".join(flags[:4]))
    for shape in "pythia-1.4b", "pythia-160m":
        monkeypatch.setitem(randomModels.SHAPES, shape, (32, 1, 2))
    monkeypatch.setattr(selfCheck, "CHECKED", "fixed,lookup")
    assert cli.main(["--check", "--device", device]) == 0
    page = capsys.readouterr().out
    assert "Every method writes plain decoding's greedy text." in page and "Memory is read at" in page
    assert "Speed of pythia-2.8b with pythia-70m needs" in page
    monkeypatch.setitem(VERIFICATIONS, "token", always_accept)
    for engine in compiling.CudaModel, compiling.CpuModel:
        monkeypatch.setattr(engine, "__init__", Mock(side_effect=OSError("no compiler")))
    assert cli.main(["--check", "--device", device]) == 1
    page = capsys.readouterr().out
    assert "fixed, eager: its greedy text is not that of plain decoding." in page
    assert "target stays eager: it cannot be compiled here." in page and page.count("GB/s") == 2


def test_full_memory_is_one_line(run, capsys, monkeypatch):
    """Too little for the models, then too little in the middle of a run."""
    with softwareCuda.machine(1, 1 << 20):
        run("--device cuda --speed", code=2)
    assert "cuda has" in capsys.readouterr().err
    advance = loop.advance
    monkeypatch.setattr(loop, "advance", lambda *given: setattr(softwareCuda.MACHINE, "memory", 0) or advance(*given))
    with softwareCuda.machine(1):
        run("--device cuda --speed", code=2)
    assert "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_are_picked_from_sums_that_are_reproducible_on_a_gpu(gpu, rows):
    """The sums of a single row are not, and the software device refuses them."""
    probs = torch.tensor([[0.25, 0.0, 0.75, 0.0]]).expand(rows, -1)
    u = torch.linspace(0, 0.99, rows)
    for device in "cpu", "cuda":
        assert utils.pick(probs.to(device), u.to(device)).tolist() == [0, 2, 2][:rows]
        kept = utils.nucleus(probs.to(device), 0.7).cpu()
        assert kept.tolist() == [[0.0, 0.0, 1.0, 0.0]] * rows
    with pytest.raises(RuntimeError, match="single row"):
        probs[:1].to("cuda").cumsum(-1)


PYTHIA = {"pythia-70m": 70_426_624, "pythia-2.8b": 2_775_208_960}  # parameters
GB = 10**9


@pytest.mark.parametrize(
    "gpu_free, cpu_free, dtype, spread",
    [
        (12.4, 30, "float32", {0: 10.3, "cpu": 30}),
        (16.0, 30, "float32", {}),
        (8.0, 3, "float32", None),
        (4.0, 30, "bfloat16", None),
    ],
)
def test_where_pythia_goes_on_cards_of_several_sizes(monkeypatch, gpu_free, cpu_free, dtype, spread):
    """In float32, which perplexity is measured in, layers that the card has no room for stay in the CPU's memory."""
    monkeypatch.setattr(loaders, "weight_bytes", lambda folder, dtype: PYTHIA[folder.name] * dtype.itemsize)
    monkeypatch.setattr(loaders, "available_memory", lambda name: int({"cuda": gpu_free, "cpu": cpu_free}[name] * GB))
    config = GPTNeoXConfig(vocab_size=50_304, hidden_size=2560, num_hidden_layers=32, max_position_embeddings=2048)
    draft = PYTHIA["pythia-70m"] * (4 if dtype == "float32" else 2)
    allowed = ["cuda", "cpu"] if dtype == "float32" else []
    place = functools.partial(
        loaders.choose_devices, Path("pythia-2.8b"), config, dtype, "cuda", 1024, allowed, 0, draft
    )
    if spread is None:
        with refused("pythia-2.8b needs about", "cuda has", "--dtype bfloat16"):
            place()
        return
    placed = place()
    assert placed["device_map"] == ("auto" if spread else {"": "cuda"})
    room = {name: size / GB for name, size in placed.get("max_memory", {}).items()}
    assert room == pytest.approx(spread, abs=0.1)


@pytest.mark.parametrize("cpu", [1 << 40, 0])
def test_perplexity_where_float32_does_not_fit_is_measured_or_refused_first(run, flags, capsys, monkeypatch, cpu):
    """Weights in float32 that the GPU has no room for are in the CPU's memory. If that is short, nothing is timed."""
    words = "--speed --ppl --sentences 1 --maxLen 4 --device "
    size = loaders.weight_bytes(Path(flags[flags.index("--target") + 1]), torch.bfloat16)
    working = (2 << 30) - 2 * size + 1  # The draft is smaller: both fit in bfloat16, and the draft alone in float32.
    with monkeypatch.context() as patch, softwareCuda.machine(1, 2 << 30):
        patch.setattr(loaders, "working_bytes", lambda *_: working)
        patch.setattr(loaders, "available_memory", lambda name: cpu if name == "cpu" else 2 << 30)
        lines = run(words + "cuda", code=0 if cpu else 2)
    said = capsys.readouterr().err
    if cpu:
        assert "too large for cuda in float32: its layers are on cpu and cuda:0" in said
        spread, whole = (
            next(line["ppl"] for line in of if line.get("of") == "text")
            for of in (lines, run(words + "cpu")[len(lines) :])
        )
        assert spread == pytest.approx(whole)
    else:
        assert "float32 and cuda has" in said and not lines


# The GPU of an Apple computer.


@pytest.mark.parametrize("name", ON_GPU if FULL else ["block", "costAware", "lookup"])
def test_mps_writes_the_texts_of_the_cpu(apple, name):
    """Greedy texts; with a repetition penalty, too."""
    made = roles("mps", MANY)
    for sampling in GREEDY, PENALISED:
        texts, wanted = (sampler(name, of)(FIRST, max_len=10, sampling=sampling)[0] for of in (made, on_cpu()))
        assert texts == wanted


FILTERED = Sampling(0.9, 4, 0.8)  # It selects and sorts.


@pytest.mark.parametrize("name", ON_GPU if FULL else ["fixed"])
def test_texts_drawn_on_mps_have_the_right_distribution(apple, name):
    assert p_value(name, roles("mps", FEW), "mps", FILTERED) > 1e-4


def test_float64_on_mps_is_caught(apple, monkeypatch):
    """Planted: verification in float64, which works on a CPU and on CUDA."""
    rule = loop.token_rule
    monkeypatch.setitem(VERIFICATIONS, "token", lambda p, q, drafts, u: rule(p.double(), q.double(), drafts, u))
    assert sampler("fixed", on_cpu())(FIRST, max_len=10, sampling=GREEDY)[0] == right()[0]
    with pytest.raises(TypeError, match="float64"):
        sampler("fixed", roles("mps", MANY))(FIRST, max_len=10, sampling=GREEDY)
