"""Tokens per second of many texts at once.

    python -m benchmark --batch 1,8,32                                      trained models, beside other engines
    python -m benchmark --shapes pythia-2.8b,pythia-70m --batch 1,8,32      the map of batch and gamma at these shapes

Results are written to throughput.json, of another target or shape to throughput-TARGET.json. The map is that of
`test.py --sweep batch`, at synthetic acceptance; figures/throughput-TARGET.png is its picture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from transformers import PreTrainedModel

from benchmark.contenders import ALPHAS, SAMPLING, DrafterOf, copy_name, synthetic
from benchmark.engines.engineProcess import PeerError
from benchmark.engines.peers import Peer, peer_rows, start_peers, text_checker
from benchmark.engines.textCheck import verdict
from benchmark.options import Options
from benchmark.records import write_record
from decoding.lengthRules import CostAware
from decoding.record import Record
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from experiments.batchSweep import FEWEST, TEXTS, Queued, predict, queued, queues, samplers
from experiments.intervals import interval
from experiments.lines import QueueFigures, QueueLine
from inputs.progress import Bar, followed
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from methods.rehearsal import compile_samplers
from methods.samplers import Sampler
from regrSampling import regrSampling
from report.figures import draw_batch_maps
from report.runTables import BATCH_NOTES, batch_table
from report.tables import WIDTH, Cell, Measured, Table, span
from specSampling import specSampling
from utils import UserError

PLAIN = "plain, compiled"
# Of the map: acceptance, guesses, tokens of a prompt. A small draft reaches an acceptance of about 0.6 at temperature
# 1, a larger one 0.8 in greedy decoding (arXiv 2211.17192, table 2: T5-small 0.62, T5-base 0.80). Prompts are short,
# because a queue's time includes them.
MAP_ALPHAS, MAP_GAMMAS, MAP_PROMPT = ALPHAS[1:], (1, 2, 4, 8), 8
MAP_NOTES = "synthetic: each guess is accepted with this probability, by a coin. "


def run_batches(
    options: Options,
    record: dict[str, Any],
    variants: Mapping[str, dict[str, CachedModel]],
    library: Mapping[str, PreTrainedModel],
    prompts: list[list[int]],
    device: str,
    drafter_of: DrafterOf,
) -> None:
    """Measure queues of texts, print them, write them."""
    if "compiled" not in variants:
        raise UserError("--batch times compiled models, and these are not; leave out --no-compile")
    one_tokenizer = drafter_of is ModelDrafter
    engines = [row for row in peer_rows(options, record["dtype"], one_tokenizer) if row.batches]
    peers: list[Peer] = []
    if engines:
        models, most = variants["eager"], max(options.batches)
        checker = text_checker(options, models, library, len(engines), one_tokenizer)
        peers = start_peers(options, models, library, prompts, engines, checker, batch=most)
    try:
        lines = measure_throughput(options, variants, peers, prompts, device)
    finally:
        for peer in peers:
            peer.close()
    console = Console(width=WIDTH, markup=False, emoji=False, highlight=False)
    if options.is_map:
        conditions = {"dtype": record["dtype"], "promptLen": len(prompts[0]), "maxLen": options.max_len, "gamma": None}
        conditions |= {"kind": "queue", "temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p}
        cells = [cast(QueueLine, conditions | line) for line in lines]
        for acceptance, table in map_tables(cells).items():
            console.print(f"{acceptance}:", table)
        console.print(MAP_NOTES + BATCH_NOTES)
        write_record(record | {"queues": cells}, options, "throughput", draw_map)
        return
    console.print(throughput_table(lines, options.max_len, [peer.line() for peer in peers]))
    for peer in peers:
        if words := peer.failed or verdict(peer.lossless).partition(": ")[2]:
            print(f"{peer.row.name}: {words}")
    write_record(record | {"queues": lines, "peers": [peer.line() for peer in peers]}, options, "throughput")


def own_samplers(models: Mapping[str, CachedModel], options: Options) -> dict[str, Sampler]:
    """Plain decoding, and speculative decoding with as many guesses as pay; compiled."""
    if options.is_map:
        return map_samplers(models["target"], models["draft"])
    target, vocabulary = models["target"], models["target"].vocabulary
    drafters: dict[str, Any] = {"lookup": LookupDrafter(vocabulary)}
    if "head" in models:
        drafters["trained head"] = ModelDrafter(models["head"])
    if "copy" in models:
        drafters[copy_name(options.draft_bits)] = ModelDrafter(models["copy"])
    rows: dict[str, Sampler] = {PLAIN: partial(regrSampling, target=target)}
    for name, drafter in drafters.items():
        sampler = partial(specSampling, target=target, drafter=drafter, gamma=CostAware(options.gamma_copy))
        rows[f"{name}, as many guesses as pay, compiled"] = sampler
    return rows


def map_samplers(target: CachedModel, draft: CachedModel) -> dict[str, Sampler]:
    """The cells of a map: {"target": plain decoding, "synthetic 0.6, gamma 1" ..., "synthetic 0.6, costAware" ...}."""
    drafter, rule = ModelDrafter(draft), target.rule(token_rule)
    rows: dict[str, Sampler] = {}
    for alpha in MAP_ALPHAS:
        cells = samplers(target, drafter, synthetic(alpha, rule), MAP_GAMMAS)
        rows["target"] = cells.pop("target")
        rows |= {f"synthetic {alpha}, {name}": sampler for name, sampler in cells.items()}
    return rows


def maps(cells: Sequence[QueueLine]) -> dict[str, list[QueueLine]]:
    """{"synthetic 0.6": the cells at this acceptance, and plain decoding}, as `test.py --sweep batch` writes them."""
    found: dict[str, list[QueueLine]] = {}
    plain = [cell for cell in cells if cell["method"] == "target"]
    for cell in cells:
        acceptance, _, method = cell["method"].rpartition(", ")
        if acceptance:
            found.setdefault(acceptance, [*plain]).append(cell | {"method": method})
    return found


def map_tables(cells: Sequence[QueueLine]) -> dict[str, Table]:
    """{acceptance: its map}."""
    return {acceptance: replace(batch_table(lines), notes="") for acceptance, lines in maps(cells).items()}


def draw_map(record: Mapping[str, Any], path: Path) -> Path:
    """Draw the maps of a record beside each other. Returns the path."""
    return draw_batch_maps({acceptance: predict(lines) for acceptance, lines in maps(record["queues"]).items()}, path)


def peer_row(peer: Peer) -> Queued:
    """A row of another engine. Once it fails, its times are nan."""

    def write(texts: Sequence[list[int]], batch: int, length: int, seed: int) -> tuple[float, Sequence[Record]]:
        if peer.failed is None and batch <= peer.batch:
            try:
                run = peer.run(texts, batch, length, seed)
                return run.seconds, run.records
            except PeerError as error:
                peer.fail(error)
        return float("nan"), [Record([float("nan")], [1], [0], [0]) for _ in texts]

    return write


def measure_throughput(
    options: Options,
    variants: Mapping[str, dict[str, CachedModel]],
    peers: Sequence[Peer],
    prompts: list[list[int]],
    device: str,
) -> list[QueueFigures]:
    """All rows at all batches, in turn."""
    models = variants["compiled"]
    own = own_samplers(models, options)
    compile_samplers(
        own.values(),
        models.values(),
        prompts[0],
        rows=options.batches,
        follow=lambda graphs: followed(graphs, "compiling", len(graphs)),
    )
    rows = {name: queued(sampler, SAMPLING, device) for name, sampler in own.items()}
    rows |= {peer.row.name: peer_row(peer) for peer in peers if not peer.failed}
    lines, texts = [], 1 if options.is_map else TEXTS
    with Bar("batches", len(rows) * len(options.batches) * options.repeats) as bar:
        for line in queues(rows, prompts, options.batches, options.repeats, options.max_len, options.seed, texts):
            bar.update()
            if line["seconds"] == line["seconds"]:
                lines.append(line)
    return lines


def throughput_table(lines: Sequence[QueueFigures], max_len: int, peers: Sequence[Mapping[str, Any]] = ()) -> Table:
    """Tokens per second by batch, their ratio to plain decoding of the same batch, and what the tests say of the texts
    of other engines."""
    batches, said = sorted({line["batch"] for line in lines}), {p["method"]: verdict(p["lossless"]) for p in peers}
    titles = ["", *(title for batch in batches for title in (f"batch {batch}\ntokens/s", "over\nplain"))]
    titles += ["difference"] if said else []
    table = Table(
        f"Queues of {TEXTS} texts for each row of the batch, {FEWEST} at least, {max_len} new tokens each; prefill "
        "included, medians (ranges) over turns",
        titles,
    )
    for method in dict.fromkeys(line["method"] for line in lines):
        cells: list[Cell] = []
        for batch in batches:
            speeds = {
                line["repeat"]: line["throughput"]
                for line in lines
                if (line["method"], line["batch"]) == (method, batch)
            }
            plain = {
                line["repeat"]: line["throughput"]
                for line in lines
                if (line["method"], line["batch"]) == (PLAIN, batch)
            }
            ratios = [speed / plain[repeat] for repeat, speed in speeds.items() if repeat in plain]
            cells += [
                Measured(interval(list(speeds.values()))[0], digits=0) if speeds else "",
                span(interval(ratios)) if speeds else "",
            ]
        table.add(method, *cells, *([said.get(method, "").split(":")[0]] if said else []))
    return table
