"""What is shown of a proof of losslessness: a verdict in one sentence, and the tables behind it."""

from rich.text import Text

from lossless.evidence import BINS, FALSE_ALARM, TESTS, seen_by
from report.tables import grid, name_of, plain

NOTES = (
    f"p: of the {BINS} bins of u by chi-square, of u by Kolmogorov-Smirnov, of the z of the surprise, of the "
    "correlation of u with its neighbours'. Below {limit:.1e} the answer would be no, which an exact sampler gets once "
    f"in {1 / FALSE_ALARM:,.0f} runs. perplexity: of the text, and what the target's own entropy leads one to expect. "
    "at the edge: tokens that only rounding put outside of top-p or top-k."
)
GREEDY_NOTES = (
    "near-ties: tokens that are not the argmax when the text is read whole, but within rounding of it. The gap is in "
    "logits; allowed is what rounding in that dtype explains."
)
POWER_NOTES = (
    "Each is this project's sampler with that one thing wrong. Texts are written, twice as many each time, until a "
    "test says no."
)


def of(measurements, kind):
    return [m for m in measurements if m["kind"] == kind]


def verdict(measurements):
    """(whether no test says no, the sentence) of a run that has ended."""
    sampled, greedy, power = (of(measurements, kind) for kind in ("lossless", "greedy", "power"))
    noes = [
        f"{name_of(m['method'])} fails by " + " and ".join(TESTS[test] for test in failed)
        for m in sampled
        if (failed := seen_by(m, m["limit"]))
    ] + [
        f"{name_of(m['method'])} writes {m['beyond']:,} greedy tokens in {m['dtype']} that are not the target's"
        for m in greedy
        if m["beyond"]
    ]
    if noes:
        return False, f"Not lossless: {'; '.join(noes)}."
    parts = []
    if sampled:
        p = [value for m in sampled for value in m["p"].values()]
        parts.append(
            f"{sampled[0]['tokens']:,} tokens of {whose(sampled)} cannot be told from the target's own (the least of "
            f"{len(p)} p-values is {min(p):.2g}; {sampled[0]['limit']:.1e} would be too small)"
        )
    for dtype in dict.fromkeys(m["dtype"] for m in greedy):
        own = [m for m in greedy if m["dtype"] == dtype and m["method"] != "target"]
        differing, texts = sum(m["differing"] for m in own), sum(m["texts"] for m in own)
        parts.append(
            f"greedy text in {dtype} equals plain decoding's token for token"
            if not differing
            else f"in {dtype} {differing} of {texts} greedy texts differ from it, each first at a near-tie"
        )
    if power:
        missed = [m["mistake"] for m in power if not m["seen_by"]]
        most = max(m["tokens"] for m in power)
        parts.append(
            f"all {len(power)} planted mistakes are caught, within {most:,} tokens"
            if not missed
            else f"but {', '.join(missed)} would not be caught with {most:,} tokens: give more --tokens"
        )
    return True, f"Lossless: {'; '.join(parts)}."


def exit_code(measurements):
    """1 where the verdict is no."""
    return 0 if verdict(measurements)[0] else 1


def whose(measurements):
    return name_of(measurements[0]["method"]) if len(measurements) == 1 else f"each of {len(measurements)} methods"


def report(measurements):
    """The rich renderables of a run's lines, none where it proved nothing."""
    sampled, greedy, power = (of(measurements, kind) for kind in ("lossless", "greedy", "power"))
    if (sampled or greedy) and of(measurements, "end"):
        yield plain(verdict(measurements)[1])
    if sampled:
        yield sampled_table(sampled)
        yield Text(NOTES.format(limit=sampled[0]["limit"]))
    if greedy:
        yield greedy_table(greedy)
        yield Text(GREEDY_NOTES)
    if power:
        yield power_table(power)
        yield Text(POWER_NOTES)


def sampled_table(measurements):
    first = measurements[0]
    table = grid(
        f"Drawn texts: temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}",
        [
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
        ],
    )
    for m in measurements:
        p = {test: f"{value:.2g}" for test, value in m["p"].items()}
        table.add_row(
            name_of(m["method"]),
            f"{m['tokens']:,}",
            p["chi_square"],
            p["kolmogorov_smirnov"],
            f"{m['z']:+.2f}",
            p["surprise"],
            p["neighbours"],
            *("" if m[name] is None else f"{m[name]:.3f}" for name in ("perplexity", "expected_perplexity")),
            f"{m['excluded']:,}",
            f"{m['impossible']:,}",
        )
    return table


def greedy_table(measurements):
    table = grid(
        "Greedy texts beside plain decoding's",
        [
            "",
            "dtype",
            "texts",
            "tokens",
            "of them\ndiffer",
            "near-\nties",
            "beyond\nrounding",
            "largest\ngap",
            "allowed",
        ],
    )
    for m in measurements:
        table.add_row(
            name_of(m["method"]),
            m["dtype"],
            *(f"{m[name]:,}" for name in ("texts", "tokens", "differing", "near_ties", "beyond")),
            *(f"{m[name]:.2g}" for name in ("largest_gap", "allowed")),
        )
    return table


def power_table(measurements):
    table = grid("Planted mistakes", ["", "what is wrong", "tokens\nneeded", "seen by"])
    for column in table.columns[1], table.columns[3]:
        column.justify, column.no_wrap = "left", False
    for m in measurements:
        tests = ", ".join(TESTS[test] for test in m["seen_by"])
        table.add_row(m["mistake"], m["what"], f"{m['tokens']:,}" if tests else f"> {m['tokens']:,}", tests or "none")
    return table
