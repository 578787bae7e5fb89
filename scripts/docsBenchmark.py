"""Blocks of the documentation that show the records of the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmark import tables as printed
from benchmark.records import BenchmarkRecord
from experiments.speed import interval, paired_ratios, summarize
from report.tableFormat import median, notation
from scripts.docsTables import Render, Words, cell, cells_of, source, table
from scripts.keepRecord import BENCHMARKS, Records
from utils import UserError

PAIR, SHAPES = BENCHMARKS
# What the documentation calls the rows of a record; the others keep their names.
NAMES = {
    "transformers": "`transformers`' `generate`",
    "transformers, static cache": "`generate`, static cache",
    "transformers, assistant": "`generate` with `assistant_model`, the same gamma",
    "transformers, assistant as it comes": "`generate` with `assistant_model`, its defaults",
    "speculative, inside generate": "the eager sampler inside `generate`",
    "speculative, no cache": "speculative without a KV cache, as in the course report",
}


def fastest(record: BenchmarkRecord) -> str:
    """The end of the names of this project's fastest rows: ", compiled", or ", eager" with --no-compile."""
    return f", {printed.variants_of(record['forwards'])[-1]}"


def throughputs(record: BenchmarkRecord) -> dict[str, tuple[float, float, float]]:
    """{row: tokens per second, with the interval}."""
    return {row["method"]: row["throughput"] for row in summarize(record["speed"], "transformers")}


def best_assisted(record: BenchmarkRecord) -> str:
    """The library's assisted generation in its faster setting."""
    speeds = throughputs(record)
    return max((name for name in speeds if name.startswith("transformers, assistant")), key=lambda name: speeds[name])


def ratio(record: BenchmarkRecord, method: str, baseline: str) -> str:
    """The throughput of a row over that of another, with its interval. Raises UserError if a row is missing."""
    ratios = paired_ratios(record["speed"], method, baseline)
    if not ratios:
        raise UserError(f"the benchmark's record has no rows {method!r} and {baseline!r}")
    return cell(interval(ratios))


def ratio_figure(method: str, baseline: str, records: Records, words: Words) -> str:
    """One ratio of throughputs, for the running text. baseline: a row, or "assisted"."""
    record = records.benchmark()
    names = {"assisted": best_assisted(record), "plain": f"plain{fastest(record)}"}
    return ratio(record, method + fastest(record), names.get(baseline, baseline))


def best(records: Records, words: Words) -> str:
    """The README's table: this project beside `transformers`, with the bundled pair and at Pythia's true shapes."""

    def say(english: str) -> str:
        return words.get(english, english)

    rows, sources = [], []
    for name in BENCHMARKS:
        record = records.benchmark(name)
        speeds, variant = throughputs(record), fastest(record)
        models, library, project = "bundled pair", {}, {"plain": "plain"}
        if name == SHAPES:
            models = "Pythia-2.8b and 70m, random weights"
            project["synthetic 0.6"] = "speculative, 60 % of guesses accepted (synthetic)"
        else:
            library["transformers"] = "`transformers`' `generate`"
            library[best_assisted(record)] = "`generate` with `assistant_model`"
            project["speculative"] = "speculative"
            project["block verification"] = "speculative, block verification"
        shown = {method: say(row) for method, row in library.items()}
        shown |= {method + variant: say(row) + say(variant) for method, row in project.items()}
        baselines = ("transformers", f"plain{variant}")
        for method, row in shown.items():
            ratios = [ratio(record, method, base) if method != base else "1" for base in baselines]
            rows.append([say(models), row, cell(speeds[method]), *ratios])
        sources.append(source(record, record["dtype"], words))
    return f"{table(say('models | decoding | tokens/s | of `generate` | of plain'), rows)}\n\n{' '.join(sources)}"


def by_machine(records: Records, name: str) -> dict[str, list[BenchmarkRecord]]:
    """{processor and threads: the records of a benchmark}. There are several where engines do not fit into memory
    together."""
    machines: dict[str, list[BenchmarkRecord]] = {}
    for record in records.benchmarks(name).values():
        machines.setdefault(machine_of(record), []).append(record)
    return machines


def machine_of(record: BenchmarkRecord) -> str:
    """The title of a machine's tables."""
    return f"{record['machine']['processor']}, {record['machine']['threads']} threads"


def each_machine(name: str, show: Callable[[BenchmarkRecord], str], records: Records, words: Words) -> str:
    """What `show` gives for a benchmark's first record of each machine."""
    machines = by_machine(records, name).items()
    return "\n\n".join(f"**{machine}**\n\n{show(first)}" for machine, (first, *_) in machines)


def all_rows(name: str, records: Records, words: Words) -> str:
    """Every row of a benchmark: throughput, TTFT and TPOT of the machines side by side, then each record. A machine's
    later records are named by the engines that were timed in them."""
    machines = by_machine(records, name)
    pieces = [side_by_side({machine: first for machine, (first, *_) in machines.items()})]
    for machine, (first, *others) in machines.items():
        pieces.append(f"**{machine}**\n\n{speed(first)}")
        for other in others:
            engines = ", ".join(dict.fromkeys(peer["engine"] for peer in other["peers"])) or "no other engine"
            pieces.append(f"**{machine}, beside {engines}**\n\n{speed(other)}")
    return "\n\n".join(pieces)


def side_by_side(machines: dict[str, BenchmarkRecord]) -> str:
    """One row for each method, three columns for each of the records, which have titles."""
    columns = [{row[0]: [row[1], *row[4:6]] for row in speed_rows(record) if row[1]} for record in machines.values()]
    methods = dict.fromkeys(method for column in columns for method in column)
    rows = [[method, *(cell for column in columns for cell in column.get(method, ["", "", ""]))] for method in methods]
    titles = [f"{machine}: {what}" for machine in machines for what in ("tokens/s", "TTFT, ms", "TPOT, ms")]
    return table(" | ".join(["", *titles]), rows)


def speed_rows(record: BenchmarkRecord) -> list[list[str]]:
    """Every row of a benchmark, with the verdict on the text of another engine in the last column."""
    columns = " | tokens/s | of transformers | of plain, eager | TTFT ms | TPOT ms | alpha | tokens/round"
    rows, texts = cells_of(printed.speed_table(record), columns), printed.texts_of(record)
    for row, measured in zip(rows, summarize(record["speed"], "plain, eager")):
        row[4:6] = (cell(measured[time], 1e3, median) for time in ("ttft", "tpot"))
    return [[NAMES.get(method, method), *cells, texts.get(method, "")] for method, *cells in rows]


def speed(record: BenchmarkRecord) -> str:
    """Every row of a benchmark, and what was timed."""
    titles = " | tokens/s | of `generate` | of plain, eager | TTFT, ms | TPOT, ms | alpha | tokens per round"
    rows, flags = speed_rows(record), record["flags"]
    body = table(f"{titles} | text", rows) if record["peers"] else table(titles, [row[:-1] for row in rows])
    seconds = [value for value in record.get("compile_seconds") or () if value is not None]
    compiled = f" Compiling took {sum(seconds):.0f} s." if seconds else ""
    return (
        f"{body}\n\n{flags['prompts']} prompts, {flags['repeats']} times each, {flags['maxLen']} new tokens, gamma "
        f"{flags['gamma']}; medians{notation(body)}.{compiled} {source(record, record['dtype'])}"
    )


def by_variant(record: BenchmarkRecord, titles: str, whats: str, rows: list[list[str]], words: str = "") -> str:
    """A table with the columns `whats`, "a | b | c", for each variant, and the words below it."""
    variants = printed.variants_of(record["forwards"])
    columns = [f"{variant}: {what}" for variant in variants for what in whats.split(" | ")]
    return f"{table(' | '.join([titles, *columns]), rows)}\n\n{words}{source(record, record['dtype'])}"


def forwards(record: BenchmarkRecord) -> str:
    """What a forward of several tokens takes, beside reading its bytes."""
    seconds = {(m["role"], m["variant"], m["tokens"]): m["seconds"] for m in record["forwards"]}
    rows = cells_of(printed.forwards_table(record))
    for row in rows:
        for column, variant in zip(range(3, len(row), 3), printed.variants_of(record["forwards"])):
            row[column] = cell(interval(seconds[row[0], variant, int(row[1])]), 1e3, median)
    reads = {what: interval(speeds)[0] / 1e9 for what, speeds in record["bandwidth"].items()}
    memory = (
        f"Memory was read at {reads['memory']:.1f} GB/s, as many bytes as the target's forward at "
        f"{reads['target']:.1f} GB/s, as the draft's at {reads['draft']:.1f} GB/s. The process took at most "
        f"{record['peak_memory'] / 1e9:.1f} GB. "
    )
    return by_variant(record, " | tokens | MB read", "ms | of one token | % of the limit", rows, memory)


def context(record: BenchmarkRecord) -> str:
    """What a token takes after a long context."""
    return by_variant(record, "tokens before it", "ms | of the first row", cells_of(printed.growth_table(record)))


def prefill(record: BenchmarkRecord) -> str:
    """What the first token takes after a long prompt."""
    return by_variant(record, "tokens of the prompt", "ms | ms a token", cells_of(printed.prefill_table(record)))


def parts(record: BenchmarkRecord) -> str:
    """The parts of a round in which all guesses are accepted, beside a plain step."""
    steps = {m["variant"]: cell(interval(m["seconds"]), 1e3) for m in record["parts"] if m["part"] == "plain step"}
    rows = [[variant, steps[variant], *cells] for variant, *cells in cells_of(printed.round_table(record))]
    titles = " | plain step, ms | draft step, ms | scoring, ms | round, ms | sampling, ms | sampling, % of the round"
    return f"{table(titles, rows)}\n\n{source(record, record['dtype'])}"


def theory(record: BenchmarkRecord) -> str:
    """Synthetic acceptance beside theory."""
    body = table(" | alpha | measured | theory | c | scoring", cells_of(printed.synthetic_table(record)))
    return f"{body}\n\n{source(record, record['dtype'])}"


BLOCKS: dict[str, Render] = {
    "best": best,
    "over-assisted": partial(ratio_figure, "speculative", "assisted"),
    "over-no-cache": partial(ratio_figure, "speculative", "speculative, no cache"),
    "over-plain": partial(ratio_figure, "speculative", "plain"),
    "over-plain-block": partial(ratio_figure, "block verification", "plain"),
    "pythia-theory": partial(each_machine, SHAPES, theory),
}
for prefix, benchmark in (("", PAIR), ("pythia-", SHAPES)):
    BLOCKS[f"{prefix}speed"] = partial(all_rows, benchmark)
    for block, show in (("forwards", forwards), ("prefill", prefill), ("context", context), ("round", parts)):
        BLOCKS[prefix + block] = partial(each_machine, benchmark, show)
