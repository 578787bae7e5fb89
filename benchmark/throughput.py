"""Tokens per second of many texts at once, beside other engines: `python -m benchmark --batch 1,8,32`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rich.table import Table

from benchmark.contenders import SAMPLING, copy_name
from benchmark.engines.engineProcess import PeerError
from benchmark.engines.peers import Peer
from benchmark.options import Options
from decoding.lengthRules import CostAware
from decoding.record import Record
from engine.cachedModel import CachedModel
from experiments.batchSweep import FEWEST, TEXTS, Queued, queued, queues
from experiments.lines import QueueFigures
from experiments.speed import interval
from inputs.progress import Bar
from methods.drafters import ModelDrafter
from methods.lookup import LookupDrafter
from regrSampling import regrSampling
from report.tableFormat import grid, span
from specSampling import specSampling

PLAIN = "plain, compiled"


def own_rows(variants: Mapping[str, dict[str, CachedModel]], options: Options, device: str) -> dict[str, Queued]:
    """Plain decoding, and speculative decoding with as many guesses as pay; compiled."""
    models = variants["compiled"]
    target, vocabulary = models["target"], models["target"].vocabulary
    drafters: dict[str, Any] = {"lookup": LookupDrafter(vocabulary)}
    if "copy" in models:
        drafters[copy_name(options.draft_bits)] = ModelDrafter(models["copy"])
    samplers: dict[str, Any] = {PLAIN: partial(regrSampling, target=target)}
    for name, drafter in drafters.items():
        sampler = partial(specSampling, target=target, drafter=drafter, gamma=CostAware(options.gamma_copy))
        samplers[f"{name}, as many guesses as pay, compiled"] = sampler
    return {name: queued(sampler, SAMPLING, device) for name, sampler in samplers.items()}


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
    """All rows at all batches, interleaved."""
    rows = own_rows(variants, options, device) | {peer.row.name: peer_row(peer) for peer in peers if not peer.failed}
    lines = []
    with Bar("batches", len(rows) * len(options.batches) * options.repeats) as bar:
        for line in queues(rows, prompts, options.batches, options.repeats, options.max_len, options.seed):
            bar.update()
            if line["seconds"] == line["seconds"]:
                lines.append(line)
    return lines


def throughput_table(lines: Sequence[QueueFigures], max_len: int) -> Table:
    """Tokens per second by batch, and their ratio to plain decoding of the same batch."""
    batches = sorted({line["batch"] for line in lines})
    titles = ["", *(title for batch in batches for title in (f"batch {batch}\ntokens/s", "over\nplain"))]
    table = grid(
        f"Queues of {TEXTS} texts for each row of the batch, {FEWEST} at least, {max_len} new tokens each; prefill "
        "included, medians (ranges) over turns",
        titles,
    )
    for method in dict.fromkeys(line["method"] for line in lines):
        cells = []
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
                f"{interval(list(speeds.values()))[0]:.0f}" if speeds else "",
                span(interval(ratios)) if speeds else "",
            ]
        table.add_row(method, *cells)
    return table
