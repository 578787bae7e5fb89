"""Blocks of the documentation that show the records of the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isnan
from typing import Any, cast

from benchmark.records import BenchmarkRecord
from benchmark.tables import predict, texts_of, variants_of
from benchmark.tables import ratio as paired
from experiments.speed import interval, paired_ratios, summarize
from scripts.docsRecords import BENCHMARKS, Record, Records
from scripts.docsRuns import CHINESE, ENGLISH, cell, source, table
from utils import UserError

Render = Callable[[Records, str], str]
PAIR, SHAPES = BENCHMARKS
ASSISTED = ("transformers, assistant", "transformers, assistant as it comes")
# What the documentation calls the rows of a record; the others keep their names.
NAMES = {
    "transformers": "`transformers`' `generate`",
    "transformers, static cache": "`generate`, static cache",
    "transformers, assistant": "`generate` with `assistant_model`, the same gamma",
    "transformers, assistant as it comes": "`generate` with `assistant_model`, its defaults",
    "speculative, inside generate": "the eager sampler inside `generate`",
    "speculative, no cache": "speculative without a KV cache, as in the course report",
}
COLUMNS = {
    ENGLISH: ["models", "decoding", "tokens/s", "of `generate`", "of plain"],
    CHINESE: ["模型", "解码方式", "tokens/s", "相对 `generate`", "相对普通解码"],
}
WORDS = {
    ENGLISH: {
        "library": "`transformers`' `generate`",
        "assisted": "`generate` with `assistant_model`",
        "plain": "plain",
        "speculative": "speculative",
        "block verification": "speculative, block verification",
        "synthetic": "speculative, {} % of guesses accepted (synthetic)",
        "compiled": ", compiled",
        "eager": ", eager",
        "bundled": "bundled pair",
        "random": "Pythia-2.8b and 70m, random weights",
    },
    CHINESE: {
        "library": "`transformers` 的 `generate`",
        "assisted": "`generate` 加 `assistant_model`",
        "plain": "普通解码",
        "speculative": "投机解码",
        "block verification": "投机解码，块验证",
        "synthetic": "投机解码，接受 {} % 的猜测（合成）",
        "compiled": "，已编译",
        "eager": "，未编译",
        "bundled": "自带模型",
        "random": "Pythia-2.8b 与 70m，随机权重",
    },
}
SYNTHETIC = 60  # per cent of guesses accepted, in the README's row


def variant_of(record: Record) -> str:
    """The faster variant of a record: "compiled", or "eager" if it was measured with --no-compile."""
    return variants_of(record["forwards"])[-1]


def ratio(record: Record, method: str, baseline: str) -> tuple[float, float, float]:
    """The throughput of a row over that of another, with its interval. Raises UserError if a row is missing."""
    ratios = paired_ratios(record["speed"], method, baseline)
    if not ratios:
        raise UserError(f"the benchmark's record has no rows {method!r} and {baseline!r}")
    return interval(ratios)


def benchmark_source(record: Record, language: str = ENGLISH) -> str:
    """`source` of a benchmark."""
    models = [model["name"] for model in record["models"].values()]
    command = f"python -m benchmark {record['command']}".rstrip()
    return source(command, record, models, record["dtype"], language)


def conditions(record: Record) -> str:
    """What was timed, in one sentence."""
    flags = record["flags"]
    took = [seconds for seconds in record.get("compile_seconds") or () if seconds is not None]
    compiled = f" Compiling took {sum(took):.0f} s." if took else ""
    return (
        f"{flags['prompts']} prompts, {flags['repeats']} times each, {flags['maxLen']} new tokens, gamma "
        f"{flags['gamma']}; medians [95 % bootstrap interval].{compiled} {benchmark_source(record)}"
    )


def best_assisted(record: Record) -> str:
    """The library's assisted generation in its faster setting."""
    rows = {row["method"]: row["throughput"][0] for row in summarize(record["speed"], "transformers")}
    return max((name for name in ASSISTED if name in rows), key=lambda name: rows[name])


def best(records: Records, language: str) -> str:
    """The README's table: this project beside `transformers`, with the bundled pair and at Pythia's true shapes."""
    words = WORDS[language]
    rows: list[list[str]] = []
    sources: list[str] = []
    for name in BENCHMARKS:
        record = records.benchmark(name)
        variant, shapes = variant_of(record), bool(record["flags"]["shapes"])
        plain = f"plain, {variant}"
        chosen = {plain: words["plain"] + words[variant]}
        if shapes:
            chosen[f"synthetic {SYNTHETIC / 100}, {variant}"] = words["synthetic"].format(SYNTHETIC) + words[variant]
        else:
            library = {"transformers": words["library"], best_assisted(record): words["assisted"]}
            ours = {f"{row}, {variant}": words[row] + words[variant] for row in ("speculative", "block verification")}
            chosen = library | chosen | ours
        speeds = {row["method"]: row["throughput"] for row in summarize(record["speed"], "transformers")}
        for method, shown in chosen.items():
            ratios = [cell(ratio(record, method, base)) if method != base else "1" for base in ("transformers", plain)]
            rows.append([words["random" if shapes else "bundled"], shown, cell(speeds[method]), *ratios])
        sources.append(benchmark_source(record, language))
    lines = table(COLUMNS[language], rows)
    return f"{lines}\n\n{' '.join(sources)}"


def by_machine(found: Iterable[Record]) -> dict[str, list[Record]]:
    """Records by processor and threads. There are several where engines do not fit into memory together."""
    machines: dict[str, list[Record]] = {}
    for record in found:
        machine = record["machine"]
        machines.setdefault(f"{machine['processor']}, {machine['threads']} threads", []).append(record)
    return machines


def titled(shown: list[tuple[str, str]]) -> str:
    """Pieces of a block, each below its title if there are several."""
    if len(shown) == 1:
        return shown[0][1]
    return "\n\n".join(f"**{title}**\n\n{piece}" for title, piece in shown)


def each_machine(name: str, show: Callable[[Record], str]) -> Render:
    """A block with what `show` gives for the benchmark's first record of each machine. Two or more are named."""

    def render(records: Records, language: str) -> str:
        machines = by_machine(records.benchmarks(name).values())
        return titled([(machine, show(first)) for machine, (first, *_) in machines.items()])

    return render


def all_rows(name: str) -> Render:
    """Every row of a benchmark. With two machines or more, first side by side: throughput, TTFT and TPOT. A machine's
    later records follow its first, named by the engines that were timed in them."""

    def render(records: Records, language: str) -> str:
        machines, tables = by_machine(records.benchmarks(name).values()), []
        for machine, (first, *others) in machines.items():
            tables.append((machine, speed(first)))
            for other in others:
                engines = dict.fromkeys(peer["engine"] for peer in other.get("peers", ()))
                tables.append((f"{machine}, beside {', '.join(engines) or 'no other engine'}", speed(other)))
        firsts = {machine: first for machine, (first, *_) in machines.items()}
        return titled(tables) if len(machines) == 1 else f"{side_by_side(firsts)}\n\n{titled(tables)}"

    return render


def side_by_side(found: dict[str, Record]) -> str:
    """One row for each method, three columns for each of the records, which have titles."""
    methods = dict.fromkeys(line["method"] for record in found.values() for line in record["speed"])
    cells: dict[str, list[str]] = {method: [] for method in methods}
    for record in found.values():
        rows = {row["method"]: row for row in summarize(record["speed"], "plain, eager")}
        for method, own in cells.items():
            own += figures_of(rows[method]) if method in rows else [""] * 3
    whats = ("tokens/s", "TTFT, ms", "TPOT, ms")
    columns = ["", *(f"{title}: {what}" for title in found for what in whats)]
    return table(columns, [[NAMES.get(method, method), *own] for method, own in cells.items()])


def figures_of(row: dict[str, Any]) -> list[str]:
    """Throughput, TTFT and TPOT of a row. An old record may not have all."""
    return [cell(row["throughput"])] + [
        "" if isnan(times[0]) else cell(times[:1] * 3, 1e3) for times in (row["ttft"], row["tpot"])
    ]


def speed(record: Record) -> str:
    """Every row of a benchmark."""
    theirs = {row["method"]: row["speedup"] for row in summarize(record["speed"], "transformers")}
    texts, rows = texts_of(cast(BenchmarkRecord, record)), []
    for row in summarize(record["speed"], "plain, eager"):
        guesses = bool(row["acceptance_by_position"])
        throughput, *times = figures_of(row)
        cells = [NAMES.get(row["method"], row["method"]), throughput]
        cells += [*(cell(figures) for figures in (theirs[row["method"]], row["speedup"])), *times]
        cells += [f"{row['alpha']:.3f}" if guesses else "", cell(row["tokens_per_round"][:1] * 3) if guesses else ""]
        rows.append(cells + [texts.get(row["method"], "")] * bool(texts))
    columns = ["", "tokens/s", "of `generate`", "of plain, eager", "TTFT, ms", "TPOT, ms", "alpha", "tokens per round"]
    for peer in record.get("peers", ()):
        if peer["failed"]:
            rows.append([peer["method"], *[""] * (len(columns) - 1), texts[peer["method"]]])
    return f"{table(columns + ['text'] * bool(texts), rows)}\n\n{conditions(record)}"


def forwards(record: Record) -> str:
    """What a forward of several tokens takes, beside reading its bytes."""
    found = {(m["role"], m["variant"], m["tokens"]): m for m in record["forwards"]}
    kinds, rows = variants_of(record["forwards"]), []
    for role in ("target", "draft"):
        for n in sorted({tokens for _, _, tokens in found}):
            cells = [role, str(n), f"{found[role, kinds[0], n]['bytes'] / 1e6:,.0f}"]
            for kind in kinds:
                m, one = found[role, kind, n], found[role, kind, 1]
                cells += [
                    cell(interval(m["seconds"])[:1] * 3, 1e3),
                    f"{paired(m['seconds'], one['seconds'])[0]:.2f}",
                    cell(interval(m["share"]), 100),
                ]
            rows.append(cells)
    whats = ("ms", "of one token", "% of the limit")
    columns = ["", "tokens", "MB read", *(f"{kind}: {what}" for kind in kinds for what in whats)]
    reads = {what: interval(speeds)[0] / 1e9 for what, speeds in record["bandwidth"].items()}
    memory = (
        f"Memory was read at {reads['memory']:.1f} GB/s, as many bytes as the target's forward at "
        f"{reads['target']:.1f} GB/s, as the draft's at {reads['draft']:.1f} GB/s. The process took at most "
        f"{record['peak_memory'] / 1e9:.1f} GB."
    )
    return f"{table(columns, rows)}\n\n{memory} {benchmark_source(record)}"


def lengths(record: Record, what: str, key: str, named: str, second: str) -> str:
    """A table of times that grow with a length. what: the measurements in the record. key: their length, and `named` in
    words. second: what stands beside the milliseconds: "of the first row" or "ms a token"."""
    if what not in record:
        return "This record is older than the table."
    found = {(m["variant"], m[key]): m["seconds"] for m in record[what]}
    steps, kinds, rows = sorted({each for _, each in found}), variants_of(record[what]), []
    for each in steps:
        cells = [str(each)]
        for kind in kinds:
            own = found[kind, each]
            share = paired(own, found[kind, steps[0]])
            cells += [cell(interval(own), 1e3)]
            cells += [cell(share) if second != "ms a token" else cell(interval(own)[:1] * 3, 1e3 / each)]
        rows.append(cells)
    columns = [named, *(f"{kind}: {words}" for kind in kinds for words in ("ms", second))]
    return f"{table(columns, rows)}\n\n{benchmark_source(record)}"


def context(record: Record) -> str:
    """What a token takes after a long context."""
    return lengths(record, "growth", "context", "tokens before it", "of the first row")


def prefill(record: Record) -> str:
    """What the first token takes after a long prompt."""
    return lengths(record, "prefill", "tokens", "tokens of the prompt", "ms a token")


def parts(record: Record) -> str:
    """The parts of a round in which all guesses are accepted."""
    seconds = {(m["variant"], m["part"]): m["seconds"] for m in record["parts"]}
    names = ("plain step", "draft step", "scoring", "round", "sampling")
    rows = []
    for kind in variants_of(record["forwards"]):
        share = paired(seconds[kind, "sampling"], seconds[kind, "round"])
        rows.append([kind, *(cell(interval(seconds[kind, part]), 1e3) for part in names), cell(share, 100)])
    columns = ["", *(f"{part}, ms" for part in names), "sampling, % of the round"]
    return f"{table(columns, rows)}\n\n{benchmark_source(record)}"


def theory(record: Record) -> str:
    """Synthetic acceptance beside theory."""
    rows = [
        [
            row["variant"],
            str(row["alpha"]),
            cell(row["measured"]),
            f"{row['theory']:.2f}",
            f"{row['c']:.3f}",
            f"{row['scoring']:.2f}",
        ]
        for row in predict(cast(BenchmarkRecord, record))
    ]
    body = table(["", "alpha", "measured", "theory", "c", "scoring"], rows)
    return f"{body}\n\n{benchmark_source(record)}"


def over(method: str, baseline: Callable[[Record], str]) -> Render:
    """One ratio of throughputs in the fastest variant, for the running text."""

    def render(records: Records, language: str) -> str:
        record = records.benchmark()
        return cell(ratio(record, f"{method}, {variant_of(record)}", baseline(record)))

    return render


TABLES = {"forwards": forwards, "prefill": prefill, "context": context, "round": parts}
BLOCKS: dict[str, Render] = {
    "best": best,
    "speed": all_rows(PAIR),
    "pythia-speed": all_rows(SHAPES),
    **{
        prefix + block: each_machine(name, show)
        for prefix, name in (("", PAIR), ("pythia-", SHAPES))
        for block, show in TABLES.items()
    },
    "pythia-theory": each_machine(SHAPES, theory),
    "over-assisted": over("speculative", best_assisted),
    "over-no-cache": over("speculative", lambda record: "speculative, no cache"),
    "over-plain": over("speculative", lambda record: f"plain, {variant_of(record)}"),
    "over-plain-block": over("block verification", lambda record: f"plain, {variant_of(record)}"),
}
