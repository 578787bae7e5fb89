"""Blocks of the documentation that show the runs of test.py: Markdown tables, quoted output, single figures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from io import StringIO

from experiments.diversity import ARTICLE, FIGURES
from experiments.speed import summarize
from experiments.sweep import predict
from lossless.evidence import BINS, TESTS
from report.losslessReport import verdict
from report.results import show
from report.runTables import beside_theory, tokens_a_round
from report.tableFormat import give_or_take, span
from scripts.docsRecords import Record, Records
from utils import UserError

ENGLISH, CHINESE = "en", "zh"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers are aligned right."""
    filled = [[cells[i] for cells in rows if cells[i]] for i in range(len(columns))]
    numbers = [bool(cells) and all(re.match(r"[-+]?\d", cell) for cell in cells) for cells in filled]
    lines = [columns, ["---:" if each else "---" for each in numbers], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def cell(triple: Sequence[float], scale: float = 1.0) -> str:
    """A median and its interval in one line."""
    return span(tuple(triple), scale).replace("\n", " ")


def of(lines: Iterable[Record], kind: str) -> list[Record]:
    """The lines of one kind. Raises UserError if there are none."""
    found = [line for line in lines if line["kind"] == kind]
    if not found:
        raise UserError(f"the record holds no line of kind {kind!r}")
    return found


def source(command: str, record: Record, models: Iterable[str], dtype: str, language: str = ENGLISH) -> str:
    """The line under a table: how, with what and where its figures were measured."""
    machine, count = record["machine"], record["machine"]["threads"]
    if language == CHINESE:
        parts = [f"{machine['processor']}，{count} 线程，{record['device']}", "、".join(models), dtype]
        return f"`{command}`；" + "；".join([*parts, f"torch {machine['torch']}", record["time"][:10]]) + "。"
    parts = [f"{machine['processor']}, {count} thread{'s' * (count != 1)}, {record['device']}", ", ".join(models)]
    return f"`{command}`; " + "; ".join([*parts, dtype, f"torch {machine['torch']}", record["time"][:10]]) + "."


def command_of(run: Record) -> str:
    """The command line of a run."""
    return f"python test.py {run['command']}".rstrip()


def run_source(run: Record, dtype: str, language: str = ENGLISH) -> str:
    """`source` of a run of test.py."""
    names = [model["name"] for model in run["models"].values()]
    return source(command_of(run), run, names, dtype, language)


def excerpt(records: Records, language: str) -> str:
    """What `make run` prints, without the notes and without the perplexity of whole corpora."""
    run, lines = records.run("first")
    buffer = StringIO()
    kept = [line for line in lines if line["kind"] != "ppl_corpus"]
    show(run, kept, file=buffer, color_system=None, force_terminal=False, legacy_windows=False)
    text = [line.rstrip() for line in buffer.getvalue().splitlines() if line.strip("= \n")]
    notes = next((i for i, line in enumerate(text) if line.startswith("Acceptance")), 0)
    tables = next((i for i, line in enumerate(text) if line.startswith("Perplexity")), 0)
    if 0 < notes < tables:
        text[notes:tables] = ["[...]"]
    return "\n".join(["```text", *text, "[...]", "```"])


def compare(records: Records, language: str) -> str:
    """Every method, side by side."""
    run, lines = records.run("compare")
    speed = of(lines, "speed")
    theory = {m["method"]: m for m in lines if m["kind"] == "overlap"}
    rows = []
    for row in summarize(speed):
        guesses = bool(row["acceptance_by_position"])
        rows.append(
            [
                f"`{row['method']}`",
                cell(row["ttft"][:1] * 3, 1e3),
                cell(row["tpot"][:1] * 3, 1e3),
                cell(row["throughput"]),
                cell(row["speedup"]),
                f"{row['alpha']:.3f}" if guesses else "",
                cell(row["tokens_per_round"][:1] * 3) if guesses else "",
            ]
        )
        if theory:  # Earlier records have none.
            rows[-1] += beside(row, theory.get(row["method"]))
    columns = ["method", "TTFT, ms", "TPOT, ms", "tokens/s", "speed-up", "alpha", "tokens per round"]
    columns += ["sum min(p, q)", "of expected"] if theory else []
    return f"{table(columns, rows)}\n\n{conditions(speed)} {run_source(run, speed[0]['dtype'])}"


def beside(row: Record, line: Record | None) -> list[str]:
    """The cells of a method beside theory. line: of kind "overlap"."""
    if line is None:
        return ["", ""]
    overlap, tokens, wanted = beside_theory(row, line)
    return [f"{overlap:.3f}", f"{tokens / wanted:.2f}"]


def conditions(speed: Sequence[Record]) -> str:
    """What was timed, in one sentence."""
    first, count, repeats = speed[0], len({m["prompt"] for m in speed}), len({m["repeat"] for m in speed})
    return (
        f"{count} prompts of {first['prompt_tokens']} tokens, {repeats} times each, at most {first['maxLen']} new "
        f"tokens, temperature {first['temperature']}, top-p {first['top_p']}; medians [95 % bootstrap interval]."
    )


def sweep_of(records: Records) -> tuple[Record, list[Record], Record, Record]:
    """(the run, the speed lines of its first temperature and length of prompt, its costs, theory beside them)."""
    run, lines = records.run("sweep")
    costs = of(lines, "costs")[0]
    same = ("temperature", "promptLen")
    speed = [m for m in of(lines, "speed") if all(m[name] == costs[name] for name in same)]
    return run, speed, costs, predict(speed, costs)


def sweep(records: Records, language: str) -> str:
    """Speed over gamma, beside theory."""
    run, speed, _, found = sweep_of(records)
    known = any(row["expected"] == row["expected"] for row in found["rows"])  # Earlier records say nothing of it.
    rows = [["plain", cell(found["plain"]["throughput"]), "1", "", "", "", "", "", *[""] * known]]
    for row in found["rows"]:
        rows.append(
            [
                str(row["gamma"]),
                cell(row["throughput"]),
                cell(row["speedup"]),
                f"{row['theory']:.2f}",
                f"{row['speedup'][0] / row['theory']:.2f}",
                f"{row['paper']:.2f}",
                f"{row['alpha']:.3f}",
                f"{row['tokens_per_round'][0]:.2f}",
            ]
        )
        if known:
            rows[-1].append(f"{tokens_a_round(row) / row['expected']:.2f}")
    columns = ["gamma", "tokens/s", "speed-up", "theory", "measured / theory", "the paper's theory", "alpha"]
    return (
        table([*columns, "tokens per round", *["of expected"] * known], rows)
        + f"\n\n{conditions(speed)} {run_source(run, speed[0]['dtype'])}"
    )


def sweep_alpha(records: Records, language: str) -> str:
    """The acceptance rate, by counting."""
    return f"{sweep_of(records)[3]['alpha']:.3f}"


def sweep_overlap(records: Records, language: str) -> str:
    """The acceptance rate, as the mean overlap of p and q."""
    return f"{sweep_of(records)[2]['alpha']:.3f}"


def sweep_cost(records: Records, language: str) -> str:
    """c, the cost of a draft step over a target step."""
    return f"{sweep_of(records)[3]['c']:.3f}"


def sweep_range(records: Records, language: str) -> str:
    """Measured speed-ups over theory's, the least to the greatest."""
    ratios = [row["speedup"][0] / row["theory"] for row in sweep_of(records)[3]["rows"]]
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def sweep_scoring(records: Records, language: str) -> str:
    """What it costs to score the block of the longest round, in units of one token."""
    return f"{sweep_of(records)[2]['scoring'][-1]:.2f}"


def diversity(records: Records, language: str) -> str:
    """How varied the texts of each method are, and the article's figures."""
    run, lines = records.run("diversity")
    measured = of(lines, "diversity")
    rows = []
    for m in measured:
        values = [give_or_take([each[name] for each in m["each"]]).replace("\n", " ") for name in FIGURES]
        rows.append([f"`{m['method']}`", str(m["texts"]), *values])
    for method, figures in ARTICLE.items():
        rows.append([f"the article, {method}", "5", *(f"{value:.3g}" for value in figures), "", ""])
    columns = ["", "texts", *(name.replace("_", " ") for name in FIGURES)]
    first = measured[0]
    how = (
        f"{first['prompts']} prompts, at most {first['maxLen']} new tokens, temperature {first['temperature']}, "
        f"top-p {first['top_p']}; means, ± half of the 95 % bootstrap interval."
    )
    return f"{table(columns, rows)}\n\n{how} {run_source(run, first['dtype'])}"


def lossless_verdict(records: Records, language: str) -> str:
    """The sentence that `--lossless` prints."""
    run, lines = records.run("lossless")
    words = verdict(lines)[1].split(" ")
    text = [""]
    for word in words:
        text[-1:] = [f"{text[-1]} {word}".strip()] if len(text[-1]) + len(word) < 100 else [text[-1], word]
    return "\n".join(["```text", f"$ {command_of(run)}", *text, "```"])


def lossless_tests(records: Records, language: str) -> str:
    """The tests of drawn texts, a row for each method."""
    run, lines = records.run("lossless")
    sampled = of(lines, "lossless")
    names = ("chi_square", "kolmogorov_smirnov", "neighbours", "surprise")
    rows = [
        [
            f"`{m['method']}`",
            f"{m['tokens']:,}",
            *(f"{m['p'][name]:.2g}" for name in names),
            f"{m['z']:+.2f}",
            f"{m['perplexity']:.3f}",
            f"{m['expected_perplexity']:.3f}",
            f"{m['impossible']:,}",
        ]
        for m in sampled
    ]
    columns = ["method", "tokens", f"u in {BINS} bins: p", "u, Kolmogorov-Smirnov: p", "neighbours of u: p"]
    more = ["surprise: p", "surprise: z", "perplexity of the text", "expected", "impossible tokens"]
    how = (
        f"The answer is no if a p-value is below {sampled[0]['limit']:.1e} or a token is impossible. "
        f"Temperature {sampled[0]['temperature']}, top-p {sampled[0]['top_p']}."
    )
    return f"{table([*columns, *more], rows)}\n\n{how} {run_source(run, sampled[0]['dtype'])}"


def lossless_greedy(records: Records, language: str) -> str:
    """Greedy texts beside plain decoding's, in each dtype."""
    run, lines = records.run("lossless")
    greedy = of(lines, "greedy")
    dtypes = list(dict.fromkeys(m["dtype"] for m in greedy))
    found = {(m["method"], m["dtype"]): m for m in greedy}
    rows = []
    for method in dict.fromkeys(m["method"] for m in greedy):
        cells = [f"`{method}`"]
        for m in (found.get((method, dtype)) for dtype in dtypes):
            cells += (
                [f"{m['differing']:,} of {m['texts']:,}", f"{m['near_ties']:,} of {m['tokens']:,}", f"{m['beyond']:,}"]
                if m
                else ["", "", ""]
            )
        rows.append(cells)
    whats = ("texts that differ", "near-ties", "beyond rounding")
    columns = ["method", *(f"{dtype}: {what}" for dtype in dtypes for what in whats)]
    return f"{table(columns, rows)}\n\n{run_source(run, ' and '.join(dtypes))}"


def lossless_mistakes(records: Records, language: str) -> str:
    """The planted mistakes, and after how many tokens each is caught."""
    run, lines = records.run("lossless")
    power = of(lines, "power")
    rows = [
        [
            m["mistake"],
            m["what"],
            f"{m['tokens']:,}" if m["seen_by"] else f"more than {m['tokens']:,}",
            ", ".join(TESTS[test] for test in m["seen_by"]) or "none",
        ]
        for m in power
    ]
    body = table(["planted mistake", "what is wrong", "caught after tokens", "by"], rows)
    return f"{body}\n\n{run_source(run, of(lines, 'lossless')[0]['dtype'])}"


BLOCKS = {
    "results": excerpt,
    "compare": compare,
    "sweep": sweep,
    "sweep-alpha": sweep_alpha,
    "sweep-overlap": sweep_overlap,
    "sweep-c": sweep_cost,
    "sweep-range": sweep_range,
    "sweep-scoring": sweep_scoring,
    "diversity": diversity,
    "lossless-verdict": lossless_verdict,
    "lossless-tests": lossless_tests,
    "lossless-greedy": lossless_greedy,
    "lossless-mistakes": lossless_mistakes,
}
