"""`compile_model` and `compile_round`: make the graphs that a model's steps are worth."""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

import torch

from engine.cachedModel import CachedModel
from engine.graphs import Graphs, Plan
from engine.progress import Bar

LARGE = 200_000_000  # parameters; the forward of a larger model takes tens of milliseconds


def engine_for(model: CachedModel) -> Graphs:
    """The engine for the model's device, without graphs yet. Raises RuntimeError if there is none."""
    if model.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"there are no graphs on {model.device.type}")
    if len(set((getattr(model.model, "hf_device_map", None) or {}).values())) > 1:
        raise RuntimeError("it is spread over several devices")
    if model.device.type == "cuda":
        from engine.cudaGraphs import CudaGraphs

        return CudaGraphs(model.model, model.vocabulary)
    from engine.cpuGraphs import CpuGraphs  # Its imports take seconds, and most runs do not need it.

    return CpuGraphs(model.model, model.vocabulary)


@torch.inference_mode()
def compile_model(
    model: CachedModel, plan: Plan, rows: int = 1, progress: Callable[[], object] | None = None
) -> float | None:
    """Make the graphs of `plan` for batches of `rows` rows. Other shapes stay eager.

    On a CPU, the linear layers are packed for good (engine/kernels/packedLinear.py). On a GPU, graphs are captured at
    their first use (engine/cudaGraphs.py). progress: called after each graph.
    Returns the seconds it took. Returns None if compiling is not possible: then one line says why, and the model stays
    eager.
    """

    def make() -> None:
        graphs = model.graphs or engine_for(model)
        steps = [lambda: graphs.add_prefill(rows)] * plan.prefill
        steps += [functools.partial(graphs.add_forward, rows, width) for width in sorted(plan.widths)]
        steps += [functools.partial(graphs.add_draw, rows, plan.read, count) for count in sorted(plan.draws)]
        steps += [functools.partial(graphs.add_nodes, rows, count) for count in sorted(plan.nodes)]
        steps += [functools.partial(graphs.add_tree, rows, plan.read, tree) for tree in sorted(plan.trees, key=str)]
        for step in steps:
            step()
            if progress:
                progress()
        model.use(graphs)

    return seconds_of(make, model.name)


@torch.inference_mode()
def compile_round(target: CachedModel, draft: CachedModel, count: int, rows: int = 1) -> float | None:
    """Make the graph of a whole round: `count` guesses by `draft`, and the forward of `target` that scores them.

    Both models must be compiled. The graph saves the host's time between the two forwards. A large model's rounds take
    too long to gain from that, so none is made for it. Returns as `compile_model`.
    """
    ours, theirs = target.graphs, draft.graphs
    if target.parameters > LARGE or ours is None or theirs is None:
        return 0.0
    read, _ = theirs.draws[rows]
    return seconds_of(lambda: ours.add_round(theirs, rows, read, count), target.name)


def compile_all(
    models: dict[str, CachedModel], plans: dict[str, Plan], rounds: Iterable[int] = (), rows: int = 1
) -> list[float | None]:
    """Make the graphs of all `models`, {role: model}, with a progress bar. A restricted draft gets the draft's plan.

    rounds: numbers of guesses whose rounds are worth one graph each. Returns the seconds of each step, None where it
    failed.
    """
    rounds = sorted(rounds)
    own = {role: plans.get("draft" if role == "restricted" else role, Plan()) for role in models}
    with Bar("compiling", sum(map(len, own.values())) + len(rounds)) as bar:
        took = [compile_model(model, own[role], rows, bar.update) for role, model in models.items()]
        draft = models.get("restricted") or models.get("draft")
        together = draft is not None and draft.device == models["target"].device and None not in took
        for guesses in rounds if together else ():
            took.append(compile_round(models["target"], draft, guesses, rows))
            bar.update()
    return took


def seconds_of(make: Callable[[], None], name: str) -> float | None:
    """Seconds that `make()` takes; None, and one line that says why, if the model of that name cannot be compiled."""
    start = time.perf_counter()
    try:
        make()
    except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
        compiler = isinstance(error, subprocess.CalledProcessError)
        reason = "the C++ compiler failed" if compiler else " ".join(str(error).split())[:200]
        print(f"{name} stays eager: it cannot be compiled here ({reason})", file=sys.stderr)
        return None
    return time.perf_counter() - start
