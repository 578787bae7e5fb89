"""The report of a proof of losslessness: a verdict in one sentence, and the tables behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lossless.evidence import BINS, FALSE_ALARM, TESTS, seen_by
from report.lines import Line, of_kind
from report.tableFormat import grid, name_of, plain

SAMPLED_COLUMNS = [
    "",
    "tokens",
    f"{BINS} bins\np",
    "K-S\np",
    "surprise\nz",
    "\np",
    "neigh-\nbours p",
    "perplexity\nof text",
    "\nexpected",
    "at the\nedge",
    "impos-\nsible",
]
SAMPLED_NOTES = (
    f"p: p-values of four tests: chi-square of u in {BINS} bins, Kolmogorov-Smirnov of u, the surprise (of its z), and "
    "the correlation of u with its neighbours. A p-value below {limit:.1e} rejects the method; with exact samplers "
    f"this happens in one of {1 / FALSE_ALARM:,.0f} runs. perplexity: of the text, and expected from the target's own "
    "entropy. at the edge: tokens that only rounding put outside of top-p or top-k. impossible: tokens to which the "
    "target gives no probability."
)
GREEDY_COLUMNS = [
    "",
    "dtype",
    "texts",
    "tokens",
    "of them\ndiffer",
    "near-\nties",
    "beyond\nrounding",
    "largest\ngap",
    "allowed",
]
GREEDY_NOTES = (
    "near-ties: tokens that are not the argmax when the target reads the whole text at once, but whose logit is within "
    "rounding of the largest. gap: how far below the largest, in logits; allowed: what rounding in that dtype explains."
)
POWER_COLUMNS = ["", "what is wrong", "tokens\nneeded", "seen by"]
POWER_NOTES = (
    "Each row is this project's sampler with one mistake. It writes texts, twice as many each time, until a test "
    "rejects it."
)


def verdict(lines: Sequence[Line]) -> tuple[bool, str]:
    """Whether no test rejects a method, and the verdict as a sentence. lines: of a run that has ended."""
    noes = rejections(lines)
    if noes:
        return False, f"Not lossless: {'; '.join(noes)}."
    found = [*of_sampled(of_kind(lines, "lossless")), *of_greedy(lines), *of_power(of_kind(lines, "power"))]
    return True, f"Lossless: {'; '.join(found)}."


def exit_code(lines: Sequence[Line]) -> int:
    """1 if the verdict is no, else 0."""
    return 0 if verdict(lines)[0] else 1


def rejections(lines: Sequence[Line]) -> list[str]:
    """A clause for each method that a test rejects."""
    sampled = [
        f"{name_of(line['method'])} fails by " + " and ".join(TESTS[test] for test in failed)
        for line in of_kind(lines, "lossless")
        if (failed := seen_by(line, line["limit"]))
    ]
    greedy = [
        f"{name_of(m['method'])} writes {m['beyond']:,} greedy tokens in {m['dtype']} that are not the target's"
        for m in of_kind(lines, "greedy")
        if m["beyond"]
    ]
    return sampled + greedy


def of_sampled(sampled: Sequence[Line]) -> Iterator[str]:
    """The clause on drawn texts."""
    if sampled:
        p = [value for line in sampled for value in line["p"].values()]
        whose = name_of(sampled[0]["method"]) if len(sampled) == 1 else f"each of {len(sampled)} methods"
        yield (
            f"{sampled[0]['tokens']:,} tokens of {whose} cannot be told from the target's own (the least of "
            f"{len(p)} p-values is {min(p):.2g}; {sampled[0]['limit']:.1e} would be too small)"
        )


def of_greedy(lines: Sequence[Line]) -> Iterator[str]:
    """A clause on greedy texts in each dtype."""
    greedy = of_kind(lines, "greedy")
    for dtype in dict.fromkeys(line["dtype"] for line in greedy):
        own = [line for line in greedy if line["dtype"] == dtype and line["method"] != "target"]
        differing, texts = sum(line["differing"] for line in own), sum(line["texts"] for line in own)
        yield (
            f"greedy text in {dtype} equals plain decoding's token for token"
            if not differing
            else f"in {dtype} {differing} of {texts} greedy texts differ from it, each first at a near-tie"
        )


def of_power(power: Sequence[Line]) -> Iterator[str]:
    """The clause on planted mistakes."""
    if power:
        missed = [line["mistake"] for line in power if not line["seen_by"]]
        most = max(line["tokens"] for line in power)
        yield (
            f"all {len(power)} planted mistakes are caught, within {most:,} tokens"
            if not missed
            else f"but {', '.join(missed)} would not be caught with {most:,} tokens: give more --tokens"
        )


def report(lines: Sequence[Line]) -> Iterator[RenderableType]:
    """The verdict and the tables of a run, as rich renderables; nothing if the run proved nothing."""
    sampled, greedy, power = (of_kind(lines, kind) for kind in ("lossless", "greedy", "power"))
    if (sampled or greedy) and of_kind(lines, "end"):
        yield plain(verdict(lines)[1])
    if sampled:
        yield sampled_table(sampled)
        yield Text(SAMPLED_NOTES.format(limit=sampled[0]["limit"]))
    if greedy:
        yield greedy_table(greedy)
        yield Text(GREEDY_NOTES)
    if power:
        yield power_table(power)
        yield Text(POWER_NOTES)


def sampled_table(lines: Sequence[Line]) -> Table:
    """The tests of drawn texts, one row for each method."""
    first = lines[0]
    conditions = f"temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}"
    table = grid(f"Drawn texts: {conditions}", SAMPLED_COLUMNS)
    for line in lines:
        p = {test: f"{value:.2g}" for test, value in line["p"].items()}
        table.add_row(
            name_of(line["method"]),
            f"{line['tokens']:,}",
            p["chi_square"],
            p["kolmogorov_smirnov"],
            f"{line['z']:+.2f}",
            p["surprise"],
            p["neighbours"],
            *("" if line[name] is None else f"{line[name]:.3f}" for name in ("perplexity", "expected_perplexity")),
            f"{line['excluded']:,}",
            f"{line['impossible']:,}",
        )
    return table


def greedy_table(lines: Sequence[Line]) -> Table:
    """Greedy texts beside those of plain decoding, one row for each method and dtype."""
    table = grid("Greedy texts beside plain decoding's", GREEDY_COLUMNS)
    for line in lines:
        table.add_row(
            name_of(line["method"]),
            line["dtype"],
            *(f"{line[name]:,}" for name in ("texts", "tokens", "differing", "near_ties", "beyond")),
            *(f"{line[name]:.2g}" for name in ("largest_gap", "allowed")),
        )
    return table


def power_table(lines: Sequence[Line]) -> Table:
    """How much text it takes to notice each planted mistake."""
    table = grid("Planted mistakes", POWER_COLUMNS)
    for column in table.columns[1], table.columns[3]:
        column.justify, column.no_wrap = "left", False
    for line in lines:
        tests = ", ".join(TESTS[test] for test in line["seen_by"])
        needed = f"{line['tokens']:,}" if tests else f"> {line['tokens']:,}"
        table.add_row(line["mistake"], line["what"], needed, tests or "none")
    return table
