"""`start`: the other engines that the flags ask for, with the models of this run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmark.engines.engineModule import rows
from benchmark.engines.engineProcess import Child
from benchmark.engines.peers import MODELS, ROOM, Peer, Source, prepare, written
from benchmark.engines.textCheck import Checker, InFloat32
from benchmark.options import Options
from benchmark.samplers import ALPHAS
from engine.cachedModel import CachedModel
from inputs.models import find_model, model_version
from lossless.evidence import limit_of

ALPHA = ALPHAS[1]  # of synthetic acceptance


def source(options: Options, role: str, model: CachedModel, library: PreTrainedModel) -> Source:
    """A model of this run, as the engines convert it."""
    name, size = options.names[role], model.parameters
    if not options.shapes:
        folder = find_model(name)
        kept = MODELS / f"{folder.name}-{model_version(name).replace(':', '-')}"
        return Source(lambda: folder, kept, size, model.vocabulary)
    kept = MODELS / f"{name}-random-{str(model.dtype).removeprefix('torch.')}-{options.seed}"
    save = partial(written, kept / "source", library.save_pretrained, ROOM * size * model.dtype.itemsize)
    return Source(save, kept, size, model.vocabulary)


def reference(options: Options, role: str, model: CachedModel, library: PreTrainedModel) -> InFloat32:
    """A model of this run with the weights that the engines convert: `library` may have rounded them to its dtype."""
    if not options.shapes:
        library = AutoModelForCausalLM.from_pretrained(find_model(options.names[role]), dtype="auto").eval()
    return InFloat32(library, model.vocabulary)


def start(
    options: Options,
    models: Mapping[str, CachedModel],
    library: Mapping[str, PreTrainedModel],
    prompts: Sequence[list[int]],
    dtype: str,
    make_child: Callable[[], Child] = Child,
) -> list[Peer]:
    """The rows of the engines in `options.peers`, ready or failed."""
    if not options.peers:
        return []
    chosen = [row for row in rows(dtype, ALPHA if options.shapes else None) if row.engine in options.peers]
    exact = {role: reference(options, role, models[role], library[role]) for role in models}
    # Models with random weights agree by accident, so nothing is learnt from their speculative text.
    draft = None if options.shapes else exact["draft"]
    checker = Checker(exact["target"], draft, limit_of(len(chosen)), options.seed)
    sources = {role: source(options, role, models[role], library[role]) for role in models}
    return prepare(chosen, sources, checker, prompts, options.max_len, options.gamma, make_child)
