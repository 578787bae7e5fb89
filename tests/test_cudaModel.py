"""What `CudaModel` compiles and captures, beside the eager model on a CPU. All methods, and what a capture forbids, are
in test_softwareCuda.py."""

import sys

import helpers
import pytest
import softwareCuda
import torch
from helpers import captured
from test_cpuModel import check_draws
from test_specSampling import FREE, PROMPTS, near
from test_sweep import watched_alpha
from torch._dynamo.exc import FailOnRecompileLimitHit

from decoding.rows import Rows
from decoding.verification import RULES, token_rule
from engine import cudaModel
from engine.cachedModel import CachedModel
from engine.copies import weights_of
from engine.cudaModel import CudaModel, no_captures
from engine.kvCache import SlotLayer
from engine.quantised import QuantisedLinear, say_slow
from engine.sharedWeights import RestrictedModel
from experiments.speed import time_texts
from methods.catalogue import build
from methods.drafters import ModelDrafter
from methods.samplers import Decoding
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling

PENALISED = Sampling(0.9, 40, 0.99, 1.3)


@pytest.fixture(autouse=True)
def gpu():
    with softwareCuda.machine(2) as machine:
        yield machine


def tiny():
    """Of one layer: the software device takes its time for each operator."""
    return helpers.tiny(layers=1)


def captured_pair():
    """A target, and a draft that often agrees with it."""
    return captured(tiny()), captured(near(tiny(), noise=0.1))


def of_both(models, step, *inputs):
    """What a step of each model gives, on the CPU."""
    for model in models:
        results = getattr(model, step)(*(x.to(model.device) if isinstance(x, torch.Tensor) else x for x in inputs))
        yield [result.cpu() for result in (results if isinstance(results, tuple) else (results,))]


def seen_in(prompts, sampling):
    seen = torch.zeros(len(prompts), 61, dtype=torch.bool)
    return seen.scatter(1, prompts, True) if sampling == PENALISED else None


def steps_of(model):
    """The names of the steps that have a graph."""
    return {key[0] for key in model.graphs}


# Steps.


@pytest.mark.parametrize("rule", RULES.values())
@pytest.mark.parametrize("sampling", [FREE, PENALISED])
@torch.inference_mode()
def test_a_judged_block_is_that_of_the_cpu(rule, sampling):
    """Of any width, of rows with fewer guesses than others, and where nothing is guessed."""
    models, accepted = (tiny(), captured(tiny())), set()
    for rows, n, behind in (1, 0, 1), (1, 1, 0), (1, 4, 1), (2, 0, 0), (2, 1, 1), (2, 4, 0):
        generator = torch.Generator().manual_seed(10 * n + behind)
        prompts = torch.tensor([[5, 9, 2, 11, 30], [7, 7, 30, 1, 8]])[:rows]
        q = torch.rand(rows, n, 61, generator=generator).pow(4)
        q = q / q.sum(-1, keepdim=True)
        q[1:, n - 1 :] = 0  # The second row guesses one less.
        positions = torch.arange(4 - behind, 5 + n).expand(rows, -1)
        for model in models:
            model.reserve(rows, 20)
        list(of_both(models, "forward", prompts, torch.arange(5).expand(rows, 5)))
        for turn in range(3):  # The first one makes the capture.
            drafts = torch.randint(61, (rows, n), generator=generator)
            block = torch.cat([prompts[:, 4 - behind :], drafts], 1)
            u = torch.rand(rows, n + 1, generator=generator)
            u[:, :n] *= turn % 3 / 20  # 0: every guess stands that p allows
            given = block, positions, q, u, sampling, rule, seen_in(prompts, sampling)
            wanted, found = of_both(models, "score_block", *given)
            torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=1e-4)
            assert torch.equal(found[1], wanted[1]) and torch.equal(found[2], wanted[2])
            accepted |= set(wanted[1].tolist())
    assert max(accepted) > 2 and steps_of(models[1]) == {"forward", "score_block"} and not models[1].refused


@pytest.mark.parametrize("sampling", [Sampling(0.9, 40, 0.95), PENALISED])
def test_draws_are_those_of_the_cpu(sampling):
    """A graph reads two tokens at most; what a draft missed besides is read before."""
    eager, model = tiny(), captured(tiny())
    for width, count in (1, 4), (3, 1), (9, 4), (1, 2), (9, 4), (3, 4):
        check_draws(eager, model, 2, width, count, sampling)
    assert {key[2] for key in model.graphs if key[0] == "draw"} == {(2, 1), (2, 2)}


def test_a_rule_that_waits_is_computed_eagerly_after_a_forward_by_a_graph():
    target, drafter = captured(tiny()), ModelDrafter(captured(near(tiny(), noise=0.3)))
    eager = ModelDrafter(near(tiny(), noise=0.3))
    alpha = watched_alpha(PROMPTS[:2], target, drafter, 8)
    assert alpha == pytest.approx(watched_alpha(PROMPTS[:2], tiny(), eager, 8), abs=1e-5)
    assert steps_of(target) == {"forward"} and not target.refused


# Prompts.


@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_a_graph_reads_prompts_of_all_lengths(monkeypatch, rows):
    """Also into a cache that held another text before. What is missing to a multiple of 16 is filled in. Only a long
    one is read eagerly."""
    monkeypatch.setattr(cudaModel, "CHUNK", 16)
    monkeypatch.setattr(cudaModel, "MOST", 32 * rows)
    eager, target = tiny(), captured(tiny())
    for prompt in 40, 16, 17, 1, 7:
        for seed in range(2):
            text = torch.randint(61, (rows, prompt), generator=torch.Generator().manual_seed(seed)).tolist()
            wanted, found = (model.prefill(Rows(text, 50 - prompt, [model])).cpu() for model in (eager, target))
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
            for ours, eagers in zip(target.cache.layers, eager.cache.layers):
                keys = ours.keys[:, :, :prompt].cpu()
                torch.testing.assert_close(keys, eagers.keys[:, :, :prompt], atol=1e-5, rtol=1e-4)
    assert {key[2] for key in target.graphs} == {(rows, 16), (rows, 32)}
    with pytest.raises(AssertionError):  # The mistake that the check is for.
        torch.testing.assert_close(target.prefill(Rows([[5]] * rows, 9, [target])).cpu(), wanted, atol=1e-5, rtol=1e-4)


def test_graphs_live_as_long_as_their_cache(gpu):
    """Its capacity is a multiple of 64, and never shrinks. All graphs go with it, and with them their pool."""
    target, prompts = captured(tiny()), [[5, 9, 2, 11] * 14]
    for length, captures in (4, 2), (8, 0), (9, 2), (4, 0):
        before = gpu.captures
        text = regrSampling(prompts, target, length, GREEDY)[0]
        assert text == regrSampling(prompts, tiny(), length, GREEDY)[0]
        assert gpu.captures - before == captures
    assert target.cache.capacity == 128


# Captures.


def test_all_graphs_of_a_device_have_one_pool_and_one_stream(gpu):
    target, draft = captured_pair()
    far = captured(tiny(), "cuda:1")
    for drafter in draft, far:
        specSampling(PROMPTS[:1], target, ModelDrafter(drafter), 8, 4, GREEDY)
    pools = {graph.pool for model in (target, draft) for graph in model.graphs.values()}
    assert len(pools) == 1 and pools.isdisjoint(graph.pool for graph in far.graphs.values())
    assert len(target.graphs) + len(draft.graphs) > 4 and len(gpu.streams) == 2


def test_a_step_that_cannot_be_captured_stays_eager(capsys):
    """One line says which step, and why. The text is right, and other steps have graphs, in a pool that can be used."""

    def waiting(p, q, drafts, u):
        assert p.sum().item() > 0
        return token_rule(p, q, drafts, u)

    wanted = regrSampling(PROMPTS[:1], tiny(), 12, GREEDY)[0]
    target, draft = captured_pair()
    for _ in range(2):
        assert specSampling(PROMPTS[:1], target, ModelDrafter(draft), 12, 4, GREEDY, verify=waiting)[0] == wanted
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{target.name}: the step score_block stays eager" in line and "stream is capturing" in line
    assert steps_of(target) == {"forward"} and steps_of(draft) == {"forward", "draw"} and not draft.refused


def test_nothing_is_captured_in_a_timed_stretch(gpu):
    """Steps without a graph are computed eagerly, and named; afterwards they are captured."""
    wanted = regrSampling(PROMPTS[:1], tiny(), 12, GREEDY)[0]
    target, draft = captured_pair()

    def write(gamma):
        return specSampling(PROMPTS[:1], target, ModelDrafter(draft), 12, gamma, GREEDY)[0]

    with no_captures() as missed:
        assert write(4) == wanted
    assert {"forward", "draw", "score_block"} <= set(missed) and gpu.captures == 0
    assert write(4) == wanted and gpu.captures > 0
    with no_captures() as missed:
        assert write(4) == wanted and missed == []
        assert write(5) == wanted and {"draw", "score_block"} <= set(missed)


GUESSING = "draftConfidence", "lookup", "costAware"


def test_texts_are_timed_without_captures(gpu):
    """Prompts and KV caches that grow, of methods whose rounds are of many lengths. What a text needs that was not
    captured yet is captured, and the text timed again."""
    target, draft = captured_pair()
    models = {"target": target, "draft": draft}
    samplers, timings = build(GUESSING, models, Decoding(gamma=5)), []

    def timed(name):
        def method(prompts, generators, batch, first=None):
            before, ends = gpu.captures, None if first is None else (lambda row, token: True)
            result = samplers[name](prompts, max_len=16, sampling=FREE, generator=generators, end_of_text=ends)
            if CudaModel.missed is not None:
                assert gpu.captures == before
                timings.append(((name, len(prompts[0])), len(CudaModel.missed)))
            return result

        return method

    prompts = [[5, 9, 2, 11, 30, 1][: 2 + i] * (3 * i + 1) for i in (1, 3)]
    lines = list(time_texts({name: timed(name) for name in GUESSING}, prompts, 1, 0, "cuda", warm_up=0))
    assert len(lines) == 6 < len(timings) and target.cache.capacity == 128  # Some were timed again.
    missed = {count for (name, _), count in dict(timings).items() if name != "costAware"}  # It follows the clock.
    assert missed == {0}
    assert not target.refused and not draft.refused


# torch.compile, and the kernels that CUDA has.


@pytest.mark.parametrize("tokens", [None, torch.arange(0, 61, 2)])
def test_a_step_is_captured_with_its_compiled_forward(gpu, monkeypatch, capsys, tokens):
    """Short blocks are; a prompt is not. The text is the CPU's, and what was written twice counts once. tokens: of a
    draft that guesses these alone, and gives -inf for the others."""
    widths = []

    def compile(forward, fullgraph):
        assert fullgraph

        def fused(layer, states, *args, **options):
            widths.append(states.shape[1])
            return forward(layer, states, *args, **options)

        return fused

    monkeypatch.setattr(torch, "compile", compile)
    target, draft = captured_pair()
    draft = draft if tokens is None else captured(RestrictedModel(near(tiny(), noise=0.1), tokens))
    text = specSampling(PROMPTS[:1], target, ModelDrafter(draft), 12, 4, GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], tiny(), 12, GREEDY)[0] and not capsys.readouterr().err
    assert {1, 2, 5} <= set(widths) <= {1, 2, 3, 4, 5} and gpu.captures == len(target.graphs) + len(draft.graphs)
    before = len(widths)
    specSampling(PROMPTS[:1], target, ModelDrafter(draft), 12, 4, GREEDY)
    assert len(widths) == before  # Replays compute no Python.


def fails_with(error):
    def compiled(forward, fullgraph):
        def fails(*args, **options):
            raise error("no such\noperator")

        return fails

    return compiled


def computes_something_else(forward, fullgraph):
    """The planted mistake of a compiler."""
    return lambda layer, states, *args, **options: forward(layer, states * 1.1, *args, **options)


@pytest.mark.parametrize(
    "compiler, reason",
    [
        (fails_with(RuntimeError), "no such operator"),
        (fails_with(FailOnRecompileLimitHit), "no such operator"),
        (computes_something_else, "compiled, it computes something else"),
    ],
)
def test_a_model_that_cannot_be_compiled_is_captured_as_it_is(monkeypatch, capsys, compiler, reason):
    """One line names the model, the step and the reason. That the model excludes tokens hides no mistake."""
    monkeypatch.setattr(torch, "compile", compiler)
    plain, target = tiny(), tiny()
    for model in plain, target:
        model.model.get_output_embeddings().__class__ = helpers.Excluding
    target = captured(target)
    text = regrSampling(PROMPTS[:1], target, 16, GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], plain, 16, GREEDY)[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{target.name}: the step draw") and line.endswith(f"torch.compile ({reason})")
    assert target.graphs and not target.refused


def test_another_order_of_writing_a_slot_twice_is_no_mistake(monkeypatch, capsys):
    """Behind the end of a row, guesses are written to its last slot, one over the other."""
    update, compared, compiled, collided = SlotLayer.update, CudaModel.compared, [], []

    def last_first(forward, fullgraph):
        def fused(*args, **options):
            compiled.append(True)
            try:
                return forward(*args, **options)
            finally:
                compiled.clear()

        return fused

    def update_in_order(self, keys, values, *args):
        slots = self.address.slots
        if compiled:
            self.address.slots, keys, values = slots.flip(1), keys.flip(2), values.flip(2)
        try:
            return update(self, keys, values, *args)
        finally:
            self.address.slots = slots

    def watched(self, *args, **inputs):
        collided.append(bool((self.cache.at.slots.sort().values.diff() == 0).any()))
        return compared(self, *args, **inputs)

    monkeypatch.setattr(torch, "compile", last_first)
    monkeypatch.setattr(CudaModel, "compared", watched)
    monkeypatch.setattr(SlotLayer, "update", update_in_order)
    target, draft = captured_pair()
    prompts = [[first, 9, 2, 11, 30] for first in range(8)]  # Eight rows are computed until four have ended.
    text = specSampling(prompts, target, ModelDrafter(draft), 20, 7, GREEDY)[0]
    assert text == regrSampling(prompts, tiny(), 20, GREEDY)[0]
    assert any(collided) and not capsys.readouterr().err


def test_a_kernel_that_fails_is_replaced_by_the_formulas(monkeypatch, capsys):
    monkeypatch.setattr(CudaModel, "has_kernel", True)
    monkeypatch.setitem(sys.modules, "engine.cudaKernels", None)  # as if Triton could not be imported
    target = captured(tiny())
    text = regrSampling(PROMPTS[:1], target, 16, GREEDY)[0]
    assert text == regrSampling(PROMPTS[:1], tiny(), 16, GREEDY)[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert "without Triton's kernel" in line and not CudaModel.has_kernel and target.graphs


def test_one_mask_serves_all_layers():
    """Numbers in the model's dtype, aligned: CUDA's attention makes none in any layer."""
    target = captured(helpers.tiny(layers=3))
    regrSampling(PROMPTS[:1], target, 16, GREEDY)
    for graph in target.graphs.values():
        calls = [args for op, args, *_ in graph.graph.tape if "scaled_dot_product_attention" in str(op)]
        assert len(calls) == 3 and len({args[3].data_ptr() for args in calls}) == 1
        assert calls[0][3].dtype == torch.float32 and calls[0][3].shape[-1] % 64 == 0


def test_a_copy_in_four_bits_without_torchs_operator_is_right_and_said(capsys):
    """On a card that has none; once for all layers."""
    say_slow.cache_clear()
    target, tokens = tiny(), torch.arange(9)[None]
    target.model.bfloat16()
    wanted = helpers.rounded_copy(target, 4).score(tokens)
    on_device = CachedModel(target.model.to("cuda"), 61, "t")
    made = helpers.rounded_copy(on_device, 4)
    assert sum(isinstance(part, QuantisedLinear) for part in made.model.modules()) == len(weights_of(target.model))
    error = made.score(tokens.to("cuda")).cpu() - wanted
    assert error.norm() < 0.02 * wanted.norm(), error.norm() / wanted.norm()
    (line,) = capsys.readouterr().err.splitlines()
    words = "Weights in few bits are multiplied by several operators, which is slow: torch's own for a GPU failed"
    assert line.startswith(words)


def test_a_graph_of_inference_mode_is_replayed_outside_of_it():
    """As a sweep measures costs after a copy was timed."""
    model, tokens = captured(tiny()), torch.tensor([[5]], device="cuda")
    model.reserve(1, 40)
    with torch.inference_mode():
        wanted = model.forward(tokens, tokens).cpu()
    assert steps_of(model) == {"forward"} and torch.equal(model.forward(tokens, tokens).cpu(), wanted)
