"""Where the time goes: this project's decoding beside `transformers`' own, and beside the memory limit.

    python -m benchmark                                      the pair that test.py uses by default
    python -m benchmark --shapes pythia-2.8b,pythia-70m      Pythia's true shapes with random weights, made in memory
    python -m benchmark --peers                              other engines too; make bench-peers installs them first

A process tests the text of every row, and measures everything in turn after a warm-up: texts in an order of rows drawn
anew for each prompt and repeat, steps and queues as A B C A B C. Of several
processes (`accelerate launch -m benchmark`) each times the texts of its own prompts, and process 0 measures the rest
while the others wait. Figures are medians with 95 % bootstrap intervals, of few values with their range, and ratios are
paired turn by turn. Results are written to benchmark.json and figures/benchmark.png, of
another target or shape to benchmark-TARGET.json and figures/benchmark-TARGET.png. With --batch the name begins with
throughput, and throughput.py says what is measured.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from rich.console import Console
from torch import Generator
from transformers import PreTrainedTokenizerBase

from benchmark.contenders import SAMPLING, TREE, Contender, DrafterOf, as_timed, contenders, copy_name, library_twin
from benchmark.engines.engineProcess import short_reason
from benchmark.engines.peers import Peer, peer_rows, start_peers, text_checker
from benchmark.engines.textCheck import Figures, TextChecker
from benchmark.figure import draw
from benchmark.options import Options, parse
from benchmark.randomModels import VOCABULARY, random_model, weights_of
from benchmark.records import BenchmarkRecord, TextLine, write_record
from benchmark.stepTimes import LARGE, PROMPT, WIDTHS, step_times, tokens_of_rounds
from benchmark.tables import tables
from benchmark.throughput import MAP_PROMPT, run_batches
from decoding.lengthRules import Fixed
from decoding.rows import check_room
from decoding.trees.shapes import FixedTree
from engine.cachedModel import CachedModel
from engine.compiling import compiled, is_compiled
from engine.copies import rounded_copy
from engine.head import load_head
from engine.quantised import GROUP
from engine.sharedWeights import RestrictedModel, sharing_copy
from experiments.processes import Processes, together
from experiments.runRecord import devices, model_record, origin
from experiments.speed import TimedText, digest, measure
from inputs.commandLine import as_command
from inputs.devices import available_memory, pick_dtype
from inputs.files import gigabytes
from inputs.models import DTYPES, find_model, load_model, model_version, outline
from inputs.progress import Bar, followed
from inputs.texts import load_corpora
from inputs.tokenizers import load_tokenizer
from methods.drafters import ModelDrafter
from methods.otherTokenizer import OtherTokenizerDrafter
from methods.rehearsal import compile_samplers
from methods.selfDraft import copies_of
from methods.translation import Translation
from methods.treeSampling import TreeDrafter, treeSampling
from regrSampling import regrSampling
from report.tables import WIDTH
from specSampling import specSampling
from utils import GREEDY, UserError

T = TypeVar("T")
# {role: model}, the prompts as token ids, and what makes a drafter of a draft model.
Loaded = tuple[dict[str, CachedModel], list[list[int]], DrafterOf]


def load_pair(options: Options, dtype: str, device: str) -> Loaded:
    """The pair, and the prompts that it continues. Raises UserError if they do not fit each other, or the memory."""
    max_len = max(options.max_len, tokens_of_rounds(max(options.gamma, options.gamma_copy)))
    return (load_random if options.shapes else load_trained)(options, dtype, device, max_len)


def load_random(options: Options, dtype: str, device: str, max_len: int) -> Loaded:
    """Models with random weights, and random prompts."""
    weights = sum(map(weights_of, options.names.values()))
    needed = weights * DTYPES[dtype].itemsize * (2 if options.compile else 1) + 3 * LARGE
    if has_copy(options, device):  # Until a code of the copy is packed, it takes a byte.
        needed += int(weights_of(options.target) * (1 + 2 / GROUP))
    free = available_memory(device)
    if needed > free:
        raise UserError(
            f"{options.flags['shapes']} in {dtype} need about {gigabytes(needed)} and {device} has {gigabytes(free)} "
            "free; use smaller shapes or --no-compile"
        )
    models = {
        role: CachedModel(random_model(name, DTYPES[dtype], device, options.seed), name=name)
        for role, name in options.names.items()
    }
    generator = torch.Generator().manual_seed(options.seed)
    length = MAP_PROMPT if options.is_map else PROMPT
    prompts = torch.randint(VOCABULARY, (options.prompts, length), generator=generator).tolist()
    check_room(prompts, max_len, list(models.values()))
    return models, prompts, ModelDrafter


def load_trained(options: Options, dtype: str, device: str, max_len: int) -> Loaded:
    """Trained models, and prompts from the bundled texts: as many as were asked for, or as there are. A draft with
    another tokenizer than the target's guesses the tokens that both have."""
    tokenizers = {role: load_tokenizer(name) for role, name in options.names.items()}
    tokenizer = tokenizers["target"]
    prompts = sample_prompts(tokenizer, options.prompts)
    check_room(prompts, max_len, [outline(find_model(name), tokenizer) for name in options.names.values()])
    models = {role: load_model(name, tokenizers[role], dtype, device) for role, name in options.names.items()}
    if tokenizers["draft"].get_vocab() == tokenizer.get_vocab():
        return models, prompts, ModelDrafter
    translation = Translation(tokenizer, tokenizers["draft"], (options.target, options.draft))
    models["draft"] = RestrictedModel(models["draft"], translation.draft)
    return models, prompts, partial(OtherTokenizerDrafter, translation=translation)


def sample_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """So many prompts of PROMPT tokens from the bundled texts, or as many as there are."""
    pairs = zip(*(corpus.passages(500) for corpus in load_corpora("sample")))
    passages = [passage for pair in pairs for passage in pair]
    return [tokenizer(text, verbose=False)["input_ids"][:PROMPT] for text in passages[:count]]


def has_copy(options: Options, device: str) -> bool:
    """Whether the target's own copy guesses too. On a GPU there are no kernels for its weights; in a map the draft
    guesses."""
    return options.compile and options.draft_bits is not None and device == "cpu" and not options.is_map


def own_copy(target: CachedModel, bits: int, shapes: bool, processes: Processes) -> CachedModel | UserError:
    """The target's own copy, or why its layers cannot be rounded. shapes: its weights are random, and so rounded
    without a text."""

    def made() -> CachedModel | UserError:
        try:
            return rounded_copy(target, bits) if shapes else copies_of(target, [bits], followed).of(bits, target)
        except UserError as error:
            return error

    return made() if shapes else processes.in_turn(made)


def compiled_pair(
    options: Options, models: dict[str, CachedModel], prompt: list[int], drafter_of: DrafterOf
) -> tuple[dict[str, CachedModel], list[float | None]]:
    """The same models once more, compiled, with the trained head if there is one; and the seconds it took, None where
    it failed."""
    start, gamma = time.perf_counter(), options.gamma
    twins = {role: CachedModel(sharing_copy(m.model), m.vocabulary, m.name) for role, m in models.items()}
    if options.head:  # It gives the target its tap, before that is compiled.
        head = load_head(find_model(options.head), twins["target"], model_version(options.target))
    pair = {role: compiled(twin) for role, twin in twins.items()}
    if options.head:
        pair["head"] = compiled(head, pair["target"])
    target, drafter = pair["target"], drafter_of(pair["draft"])
    rows: list[Any] = [
        partial(regrSampling, target=target),
        *(partial(specSampling, target=target, drafter=drafter, gamma=Fixed(width - 1)) for width in WIDTHS[1:]),
        partial(specSampling, target=target, drafter=drafter, gamma=Fixed(gamma)),
    ]
    if drafter_of is ModelDrafter:  # A draft with another tokenizer cannot read the target's tokens.
        rows.append(partial(regrSampling, target=pair["draft"]))
        rows.append(partial(treeSampling, target=target, drafter=TreeDrafter(pair["draft"]), tree=FixedTree(TREE)))

    if options.head:
        rows.append(partial(specSampling, target=target, drafter=ModelDrafter(pair["head"]), gamma=Fixed(gamma)))
        rows.append(partial(treeSampling, target=target, drafter=TreeDrafter(pair["head"]), tree=FixedTree(TREE)))

    def follow(graphs: Sequence[T]) -> Iterable[T]:
        return followed(graphs, "compiling", len(graphs))

    made = compile_samplers(rows, pair.values(), prompt, follow=follow)
    return pair, [None if made is None else time.perf_counter() - start]


def add_copy(pair: dict[str, CachedModel], copy: CachedModel) -> float:
    """Compile the target's own copy too, and add it to the compiled pair. Returns the seconds it took."""
    start = time.perf_counter()
    made = compiled(copy, pair["target"])
    if is_compiled(made):  # Otherwise a line has said why.
        pair["copy"] = made
    return time.perf_counter() - start


def run(options: Options, argv: Sequence[str], processes: Processes) -> None:
    """Load, measure, print, write. Processes other than the first write nothing."""
    if (options.peers or options.batches) and processes.count > 1:
        raise UserError("--peers and --batch are for one process: start it without accelerate launch")
    device = processes.own_device(options.device)
    if options.peers and device != "cpu":
        raise UserError("--peers needs --device cpu: the other engines run on the CPU here")
    dtype = options.dtype or pick_dtype(device)
    models, prompts, drafter_of = load_pair(options, dtype, device)
    library = {role: library_twin(model.model) for role, model in models.items()}
    record = conditions(options, argv, processes, device, models, prompts)
    variants, record["compile_seconds"], copy = {"eager": models}, None, None
    if has_copy(options, device):  # Before compiling, which packs layers.
        copy = own_copy(models["target"], cast(int, options.draft_bits), options.shapes, processes)
    if options.compile:
        ready, record["compile_seconds"] = compiled_pair(options, models, prompts[0], drafter_of)
        if None not in record["compile_seconds"]:  # Otherwise a line has said why.
            variants["compiled"] = ready
            if options.head:
                record["models"]["head"] = model_record(ready["head"].name, model_version(options.head), ready["head"])
            if isinstance(copy, CachedModel):
                record["compile_seconds"].append(add_copy(ready, copy))
    if options.batches:
        run_batches(options, record, variants, library, prompts, device, drafter_of)
        return
    found = contenders(options, variants, library, prompts[0], drafter_of)
    if isinstance(copy, UserError):
        found.left_out[f"{copy_name(options.draft_bits)}, compiled"] = short_reason(str(copy))
    record["library_compile_seconds"] = found.compile_seconds
    which = "none" if options.shapes else options.text_check
    library_rows = [name for name in found.rows if name.startswith("transformers")]
    checked = {
        name: row
        for name, row in found.rows.items()
        if which == "all" or (name.endswith(f", {which}") and name not in library_rows)
    }
    engines = peer_rows(options, dtype, one_tokenizer=drafter_of is ModelDrafter)
    checker = None
    if checked or engines:
        checker = text_checker(options, models, library, len(checked) + len(engines), drafter_of is ModelDrafter)
    texts = check_texts(checked, checker, prompts, device, dtype, processes) if checker else {}
    # After compiling, which takes as much memory again as the models: the engines must fit into what is left.
    peers = start_peers(options, models, library, prompts, engines, checker) if checker else []
    try:
        record["speed"] = speed(options, found.rows, prompts, device, processes, peers)
    finally:
        for peer in peers:
            peer.close()
    record["peers"] = [peer.line() for peer in peers]
    record["texts"] = texts | {name: text_line(why) for name, why in found.left_out.items()}
    record["texts"] |= {peer.row.name: text_line(peer.failed, peer.greedy, peer.lossless) for peer in peers}
    for pair in variants.values():  # A head reads no text by itself.
        pair.pop("head", None)
    # One item: process 0 measures it, and the others wait.
    (steps,) = processes.mapped(
        lambda seed: step_times(variants, prompts[0], options.gamma, options.gamma_copy, device, seed, drafter_of),
        [options.seed],
    )
    if processes.first:
        finish(cast(BenchmarkRecord, record | steps), options)


def conditions(
    options: Options,
    argv: Sequence[str],
    processes: Processes,
    device: str,
    models: dict[str, CachedModel],
    prompts: list[list[int]],
) -> dict[str, Any]:
    """Where the measurements come from. Several processes are named on the screen."""
    versions = {
        role: model_record(name, "random weights" if options.shapes else model_version(name), models[role])
        for role, name in options.names.items()
    }
    record: dict[str, Any] = {**origin(argv, options.flags | {"prompts": len(prompts)}, device, versions)}
    record["dtype"] = str(models["target"].dtype).removeprefix("torch.")
    if processes.count > 1:
        record["processes"] = devices(processes, device, record["machine"], versions, digest(prompts))
        record["device"] = device.split(":")[0]  # The processes' own devices have numbers.
        names = [f"{process['host']} {process['device']}" for process in record["processes"]]
        print(f"{len(names)} processes, each with prompts of its own: {', '.join(names)}")
        if len(names) > len(prompts):
            print(f"More processes ({len(names)}) than prompts ({len(prompts)}): {len(names) - len(prompts)} idle.")
    return record


def text_line(failed: str | None, greedy: Figures | None = None, lossless: Figures | None = None) -> TextLine:
    """What the checks of a row showed."""
    return {"failed": failed, "greedy": greedy, "lossless": lossless}


def check_texts(
    rows: Mapping[str, Contender],
    checker: TextChecker,
    prompts: list[list[int]],
    device: str,
    dtype: str,
    processes: Processes,
) -> dict[str, TextLine]:
    """{row: what the checks of its text showed}, of rows of this process. They are the checks of other engines, but a
    row whose greedy text is wrong is timed all the same."""
    unit = torch.finfo(DTYPES[dtype]).eps / 2

    def check(name: str) -> TextLine:
        def write(
            prompts: Sequence[list[int]], count: int, temperature: float, seeds: Sequence[int]
        ) -> list[list[int]]:
            sampling = replace(SAMPLING, temperature=temperature) if temperature else GREEDY
            texts = []
            for prompt, seed in zip(prompts, seeds):
                (tokens,), _ = rows[name](prompt, Generator(device).manual_seed(seed), count, sampling)
                if max(tokens) >= checker.target.vocabulary:
                    raise ValueError("it wrote a token that the tokenizer does not have")
                texts.append(tokens)
            return texts

        line = text_line(None)
        try:
            line["lossless"] = checker.sampled(write, prompts, unit)
            line["greedy"] = checker.greedy(write, prompts, unit)
        except ValueError as error:
            line["failed"] = short_reason(str(error).removeprefix("not timed: "))
        return line

    return dict(zip(rows, followed(processes.mapped(check, list(rows)), "texts", len(rows))))


def speed(
    options: Options,
    rows: Mapping[str, Contender],
    prompts: list[list[int]],
    device: str,
    processes: Processes,
    peers: Sequence[Peer],
) -> list[TimedText]:
    """One line for each row, prompt and repeat, as `speed.measure` gives them. A peer that fails has none."""
    timed = {name: as_timed(row, options.max_len) for name, row in rows.items()}
    timed |= {peer.row.name: peer.sampler for peer in peers if peer.failed is None}
    lines = []
    with Bar("speed", len(timed) * len(prompts) * options.repeats) as bar:
        measured = measure(timed, prompts, options.repeats, options.seed, device, 1, processes.share(prompts))
        for line in processes.merged(measured):
            lines.append(line)
            bar.update()
    failed = {peer.row.name for peer in peers if peer.failed}
    return [line for line in lines if line["method"] not in failed]


def finish(record: BenchmarkRecord, options: Options) -> None:
    """Print the record, and write it and its figure."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    record["peak_memory"] = peak * (1 if sys.platform == "darwin" else 1024)
    console = Console(width=WIDTH + (15 if record["texts"] else 0), markup=False, emoji=False, highlight=False)
    for piece in tables(record):
        console.print(piece)
    write_record(record, options, "benchmark", draw)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    smaller = "use smaller models, a smaller --dtype, or --no-compile"

    def work(processes: Processes) -> int:
        run(parse(words), words, processes)
        return 0

    return together(lambda work: as_command("benchmark", work, "Nothing was written.", smaller), work)


if __name__ == "__main__":
    sys.exit(main())
