"""Blocks of the documentation that show the records of the benchmark."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from benchmark import tables as printed
from benchmark.contenders import COPY_ALPHAS
from benchmark.engines.textCheck import verdict
from benchmark.figure import PARTS, round_shares
from benchmark.records import BenchmarkRecord
from benchmark.throughput import map_tables, throughput_table
from experiments.batchSweep import FEWEST
from experiments.speed import Interval, interval, paired_ratios, summarize
from report.tableFormat import median, notation, title_of
from scripts.docsTables import Render, Words, cell, cells_of, source, table
from scripts.keepRecord import BENCHMARKS, MAP, QUEUES, Records
from utils import UserError

PAIR, SHAPES, REAL = BENCHMARKS
# What the documentation calls the rows of a record; the others keep their names.
NAMES = {
    "transformers": "`transformers`' `generate`",
    "transformers, static cache": "`generate`, static cache",
    "transformers, assistant": "`generate` with `assistant_model`, the same gamma",
    "transformers, assistant as it comes": "`generate` with `assistant_model`, its defaults",
    "speculative, inside generate": "the eager sampler inside `generate`",
    "transformers, static cache, compiled": "`generate`, static cache, compiled",
    "plain, no cache": "plain without a KV cache",
    "speculative, no cache": "speculative without a KV cache",
    "synthetic 0.6, no cache": "synthetic 0.6 without a KV cache",
}


# What the rows of this project are called beside other engines.
OWN = {"speculative": "speculative", "block verification": "speculative, block verification"}
OWN["synthetic 0.6"] = "speculative, 60 % of guesses accepted (synthetic)"
OWN["prompt lookup"] = "prompt lookup"
SEEN_TITLE = "difference from the target's text"
SEEN = {"lossless": "none found", "not lossless": "found", "": "not tested"}  # what the tests say of a row's text
SIDE_BY_SIDE = "side-by-side"  # a block "side-by-side+A+B" joins the records A and B


def fastest(record: BenchmarkRecord) -> str:
    """The end of the names of this project's fastest rows: ", compiled", or ", eager" with --no-compile."""
    return f", {printed.variants_of(record['forwards'])[-1]}"


def throughputs(record: BenchmarkRecord) -> dict[str, Interval]:
    """{row: tokens per second}."""
    return {row["method"]: row["throughput"] for row in summarize(record["speed"], "transformers")}


def best_of(record: BenchmarkRecord, methods: Iterable[str]) -> str:
    """The fastest of some rows. Raises UserError if there is none."""
    speeds = throughputs(record)
    measured = [method for method in methods if method in speeds]
    if not measured:
        raise UserError("the benchmark's record has no such rows")
    return max(measured, key=lambda method: speeds[method])


def best_assisted(record: BenchmarkRecord) -> str:
    """The library's assisted generation in its fastest setting."""
    return best_of(record, (name for name in throughputs(record) if name.startswith("transformers, assistant")))


def ratio(record: BenchmarkRecord, method: str, baseline: str) -> str:
    """The throughput of a row over that of another, with its interval. Raises UserError if a row is missing."""
    ratios = paired_ratios(record["speed"], method, baseline)
    if not ratios:
        raise UserError(f"the benchmark's record has no rows {method!r} and {baseline!r}")
    return "1" if method == baseline else cell(interval(ratios))


def ratio_figure(method: str, baseline: str, records: Records, words: Words) -> str:
    """One ratio of throughputs, for the running text. baseline: a row, or "assisted"."""
    record = records.benchmark()
    names = {"assisted": best_assisted(record), "plain": f"plain{fastest(record)}"}
    return ratio(record, method + fastest(record), names.get(baseline, baseline))


def best_rows(record: BenchmarkRecord) -> dict[str, str]:
    """{row: what it is called} of the fastest row of each kind: this project's plain, with guesses, with those of the
    target's own copy and of a trained head, each other engine's without guesses and with them, with weights in 16 bits
    and quantised, `generate` and what it offers."""
    variant, speeds = fastest(record), throughputs(record)
    own = [f"{method}{variant}" for method in OWN] + [name for name in speeds if re.match(f"tree of.*{variant}", name)]
    chosen = best_of(record, own)
    called = OWN.get(chosen.removesuffix(variant), chosen.removesuffix(variant))
    rows = {f"plain{variant}": f"plain{variant}", chosen: f"{called}{variant}"}
    copies = [name for name in speeds if re.search(r"own copy in \d bits.*" + variant, name)]
    if record["flags"]["shapes"]:  # One acceptance for all: the fastest would be that with the most.
        copies = [name for name in copies if f"synthetic {COPY_ALPHAS[1]}" in name]
    if copies:
        chosen = best_of(record, copies)
        rows[chosen] = copy_called(chosen.removesuffix(variant)) + variant
    heads = [name for name in speeds if name.startswith("trained head") and name.endswith(variant)]
    if heads:
        rows[best_of(record, heads)] = best_of(record, heads)
    if f"prompt lookup{variant}" in speeds:
        rows[f"prompt lookup{variant}"] = f"prompt lookup{variant}"
    engines: dict[tuple[str, bool, bool], list[str]] = {}
    for peer in record["peers"]:
        if peer["method"] in speeds:
            kind = peer["engine"], peer["speculative"], peer["quantised"]
            engines.setdefault(kind, []).append(peer["method"])
    rows |= {best: best for best in (best_of(record, methods) for methods in engines.values())}
    library = ["transformers", *(name for name in speeds if name.startswith("transformers, static cache, compiled"))]
    if any(name.startswith("transformers, assistant") for name in speeds):
        library.append(best_assisted(record))
    rows |= {method: NAMES.get(method, method) for method in library}
    return dict(sorted(rows.items(), key=lambda row: -speeds[row[0]].middle))


def copy_called(method: str) -> str:
    """What a row of the target's own copy is called beside other engines."""
    return re.sub(
        r"synthetic ([\d.]+)$", lambda m: f"{100 * float(m[1]):.0f} % of guesses accepted (synthetic)", method
    )


def best(name: str, records: Records, words: Words) -> str:
    """The table of the README: this project's best rows beside the best of other engines and of `transformers`, from
    the fastest to the slowest. All are divided by this project's own plain decoding."""

    def say(english: str) -> str:
        base = english.removesuffix(variant)
        parts = [words.get(part, part) for part in base.split(", ")]
        known = words.get(base, words.get(", ", ", ").join(parts))
        return known + (words.get(variant, variant) if base != english else "")

    record = records.benchmark(name)
    variant, texts = fastest(record), printed.texts_of(record)
    figures = {row["method"]: row for row in summarize(record["speed"])}
    rows = []
    for method, called in best_rows(record).items():
        text = texts.get(method, "").split(":")[0]
        lossless = SEEN.get(text, text)
        times = (cell(figures[method][time], 1e3, median) for time in ("ttft", "tpot"))
        of_plain = ratio(record, method, f"plain{variant}")
        rows.append([say(called), cell(figures[method]["throughput"]), *times, of_plain, say(lossless)])
    titles = "decoding", "tokens/s", "TTFT, ms", "TPOT, ms", f"of our plain{variant}", SEEN_TITLE
    return f"{table(' | '.join(map(say, titles)), rows)}\n\n{source(record, record['dtype'], words)}"


def kinds(record: BenchmarkRecord) -> str:
    """This project's rows, eager and compiled, each divided by plain decoding of either kind."""
    variants = printed.variants_of(record["forwards"])
    rows = [
        [row["method"], cell(row["throughput"]), *(cell(row[time], 1e3, median) for time in ("ttft", "tpot"))]
        + [ratio(record, row["method"], f"plain, {variant}") for variant in variants]
        for row in summarize(record["speed"])
        if row["method"].endswith(tuple(f", {variant}" for variant in variants))
        and not row["method"].startswith("transformers")
    ]
    titles = ["", "tokens/s", "TTFT, ms", "TPOT, ms", *(f"of plain, {variant}" for variant in variants)]
    return with_source(table(" | ".join(titles), rows), record)


def scoring(record: BenchmarkRecord) -> str:
    """What scoring several tokens at once takes, over scoring one, in the fastest variant."""
    variant = fastest(record).removeprefix(", ")
    seconds = {(m["role"], m["tokens"]): m["seconds"] for m in record["forwards"] if m["variant"] == variant}
    rows = []
    for tokens in sorted({tokens for role, tokens in seconds if role == "target"}):
        row = [str(tokens)]
        for role in ("target", "draft"):
            of_one = printed.ratio(seconds[role, tokens], seconds[role, 1])
            row += [cell(interval(seconds[role, tokens]), 1e3, median), cell(of_one)]
        rows.append(row)
    columns = (f"{role}, {variant}: {what}" for role in ("target", "draft") for what in ("ms", "of one token"))
    return with_source(table(" | ".join(["tokens at once", *columns]), rows), record)


def forwards_of_target(record: BenchmarkRecord) -> str:
    """What a forward of several tokens takes in the fastest variant, and its share of the memory limit: of the target,
    and of its own copy."""
    variant = fastest(record).removeprefix(", ")
    lines = {m["tokens"]: m for m in record["forwards"] if (m["role"], m["variant"]) == ("target", variant)}
    rows = []
    for tokens, line in sorted(lines.items()):
        of_one = printed.ratio(line["seconds"], lines[1]["seconds"])
        share = cell(interval(line["share"]), 100)
        rows.append([str(tokens), cell(interval(line["seconds"]), 1e3, median), cell(of_one), share])
    body = table("tokens at once | ms | of one token | % of the limit", rows)
    return with_source("\n\n".join([body, *([copy_forwards(record)] if printed.copy_lines(record) else [])]), record)


def copy_forwards(record: BenchmarkRecord) -> str:
    """What a forward of the target's own copy takes, and its share of the memory limit."""
    rows = cells_of(printed.copy_table(record))
    for row, line in zip(rows, printed.copy_lines(record)):
        row[2] = cell(interval(line["seconds"]), 1e3, median)
    titles = "MB read | ms | of the target's one token | of its own one token | % of the limit"
    return table(f"tokens at once, copy in {record['flags']['draftBits']} bits | {titles}", rows)


def shares(record: BenchmarkRecord) -> str:
    """What the parts of a round take, as shares of it."""
    seconds, rows = printed.part_seconds(record), []
    for variant, (whole, parts) in round_shares(record).items():
        sampling = printed.ratio(seconds[variant, "sampling"], seconds[variant, "round"])
        percent = [f"{100 * share:.1f}" for share in (*parts.values(), sampling.middle)]
        rows.append([variant, f"{1e3 * whole:.3g}", *percent])
    titles = [" | round, ms", *(f"{part}, %" for part in PARTS), "filters, draws and verification in it, %"]
    guesses = f"{printed.gammas(record).removeprefix('gamma ')} guesses"
    words = f"A round of {guesses}, all accepted; each part is measured by itself. "
    return with_source(table(" | ".join(titles), rows), record, words)


def with_source(body: str, record: BenchmarkRecord, words: str = "") -> str:
    """A table and the line under it."""
    legend = f"medians{notation(body)}. " if notation(body) else ""
    return f"{body}\n\n{words}{legend[:1].upper()}{legend[1:]}{source(record, record['dtype'])}"


def of_first(name: str, show: Callable[[BenchmarkRecord], str], records: Records, words: Words) -> str:
    """What `show` gives for a benchmark's first record."""
    return show(records.benchmark(name))


def all_tables(name: str, records: Records, words: Words) -> str:
    """All tables of all records of a benchmark, record by record."""
    sections = [
        ("The first token after a long prompt", prefill),
        ("A token after a long context", context),
        ("The parts of a round", parts),
    ]
    pieces = []
    for kept, record in records.benchmarks(name).items():
        pieces += [f"## `{kept}`", speed(record), "### Forwards beside the memory limit", forwards(record)]
        if record["flags"]["shapes"]:
            pieces += ["### Synthetic acceptance beside theory", theory(record)]
        if printed.copy_lines(record):
            pieces += ["### Forwards of the target's own copy", with_source(copy_forwards(record), record)]
        for title, show in sections:
            pieces += [f"### {title}", show(record)]
    return "\n\n".join(pieces)


def experiment(record: Mapping[str, Any]) -> dict[str, Any]:
    """What two records must have in common to stand in one table."""
    models = {role: f"{model['name']} {model['version']}" for role, model in record["models"].items()}
    gammas = {name: record["flags"][name] for name in ("gamma", "gammaCopy") if name in record["flags"]}
    return {**models, **gammas, "code": record.get("code")}


def refuse_mixed(records: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise UserError if records {name: record} are not one experiment: if their models (of the roles that both have),
    gamma or code differ, or the code of one was not recorded."""
    (first, one), *others = ((name, experiment(record)) for name, record in records.items())
    for name, other in others:
        differ = [
            f"{what} ({one[what] or 'not recorded'} and {other[what] or 'not recorded'})"
            for what in one
            if what in other and (one[what] != other[what] or what == "code" and one[what] is None)
        ]
        if differ:
            raise UserError(f"{first} and {name} are not one experiment: they differ in {', '.join(differ)}")


def side_by_side(names: Sequence[str], records: Records) -> str:
    """One row for each method, three columns for each of the records. Raises UserError if they are not one
    experiment."""
    chosen = {name: records.benchmark(name) for name in names}
    refuse_mixed(chosen)
    columns = [{row[0]: [row[1], *row[4:6]] for row in speed_rows(record) if row[1]} for record in chosen.values()]
    methods = dict.fromkeys(method for column in columns for method in column)
    rows = [[method, *(cell for column in columns for cell in column.get(method, ["", "", ""]))] for method in methods]
    titles = [f"{name}: {what}" for name in names for what in ("tokens/s", "TTFT, ms", "TPOT, ms")]
    body = table(" | ".join(["", *titles]), rows)
    return "\n\n".join([body, *(f"{name}: {source(record, record['dtype'])}" for name, record in chosen.items())])


def speed_rows(record: BenchmarkRecord) -> list[list[str]]:
    """Every row of a benchmark, with the verdict on the text of another engine in the last column."""
    divisor = printed.best_plain(record)
    columns = f" | tokens/s | of generate | of {divisor} | TTFT ms | TPOT ms | alpha | tokens/round"
    rows, texts = cells_of(printed.speed_table(record), columns), printed.texts_of(record)
    for row, measured in zip(rows, summarize(record["speed"], divisor)):
        row[4:6] = (cell(measured[time], 1e3, median) for time in ("ttft", "tpot"))
    return [[NAMES.get(method, method), *cells, texts.get(method, "")] for method, *cells in rows]


def speed(record: BenchmarkRecord) -> str:
    """Every row of a benchmark, and what was timed."""
    divisor = printed.best_plain(record)
    titles = f" | tokens/s | of `generate` | of {divisor} | TTFT, ms | TPOT, ms | alpha | tokens per round"
    rows, flags = speed_rows(record), record["flags"]
    body = table(f"{titles} | text", rows) if printed.texts_of(record) else table(titles, [row[:-1] for row in rows])
    seconds = [value for value in record.get("compile_seconds") or () if value is not None]
    compiled = f" Compiling took {sum(seconds):.2g} s." if seconds else ""
    return (
        f"{body}\n\n{flags['prompts']} prompts, {flags['repeats']} times each, {flags['maxLen']} new tokens, "
        f"{printed.gammas(record)}; medians{notation(body)}.{compiled} {source(record, record['dtype'])}"
    )


def by_variant(record: BenchmarkRecord, titles: str, whats: str, rows: list[list[str]], words: str = "") -> str:
    """A table with the columns `whats`, "a | b | c", for each variant, and the words below it."""
    variants = printed.variants_of(record["forwards"])
    columns = [f"{variant}: {what}" for variant in variants for what in whats.split(" | ")]
    return with_source(table(" | ".join([titles, *columns]), rows), record, words)


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
    return with_source(table(titles, rows), record)


def theory(record: BenchmarkRecord) -> str:
    """Synthetic acceptance beside theory."""
    body = table(" | alpha | measured | theory | c | scoring", cells_of(printed.synthetic_table(record)))
    return with_source(body, record)


def throughput(records: Records, words: Words) -> str:
    """Queues of texts beside those of another engine, and what the tests say of its texts."""
    record = records.file(QUEUES)
    queues = throughput_table(record["queues"], record["flags"]["maxLen"])
    texts = {peer["method"]: peer["failed"] or verdict(peer["lossless"]) for peer in record["peers"]}
    rows = [[method, *cells, texts.get(method, "")] for method, *cells in cells_of(queues)]
    body = table(" | ".join([*(title_of(column.header) for column in queues.columns), "text"]), rows)
    return f"{body}\n\n{queues.title}. {source(cast(BenchmarkRecord, record), record['dtype'])}"


def throughput_map(records: Records, words: Words) -> str:
    """Speed by batch and gamma at each synthetic acceptance."""
    record, rows, titles = records.file(MAP), [], []
    for acceptance, printed_map in map_tables(record["queues"]).items():
        titles = ["guesses accepted", *(title_of(column.header) for column in printed_map.columns)]
        rows += [[acceptance, *cells] for cells in cells_of(printed_map)]
    first = record["queues"][0]
    queues = (
        f"Queues of as many texts as the batch, {FEWEST} at least: prompts of {first['promptLen']} tokens, texts of "
        f"{first['maxLen']}, temperature {first['temperature']}, top_p {first['top_p']}. "
    )
    return with_source(table(" | ".join(titles), rows), cast(BenchmarkRecord, record), queues)


BLOCKS: dict[str, Render] = {
    "kinds": partial(of_first, PAIR, kinds),
    "scoring": partial(of_first, PAIR, scoring),
    "prefill": partial(of_first, PAIR, prefill),
    "round": partial(of_first, PAIR, shares),
    "over-assisted": partial(ratio_figure, "speculative", "assisted"),
    "over-no-cache": partial(ratio_figure, "speculative", "speculative, no cache"),
    "over-plain": partial(ratio_figure, "speculative", "plain"),
    "over-plain-block": partial(ratio_figure, "block verification", "plain"),
    "pythia-best": partial(best, SHAPES),
    "real-best": partial(best, REAL),
    "real-kinds": partial(of_first, REAL, kinds),
    "real-scoring": partial(of_first, REAL, forwards_of_target),
    "real-prefill": partial(of_first, REAL, prefill),
    "pythia-theory": partial(of_first, SHAPES, theory),
    "throughput": throughput,
    "throughput-map": throughput_map,
    **{f"{name}-tables": partial(all_tables, name) for name in BENCHMARKS},
}
