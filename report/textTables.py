"""Tables of texts: how varied the texts of each method are, and perplexity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from experiments.diversity import ARTICLE, FIGURES
from report.lines import Line
from report.tableFormat import give_or_take, grid, name_of, number, plain

DIVERSITY_COLUMNS = [
    "",
    "texts",
    "entropy\n1",
    "entropy\n2",
    "entropy\n3",
    "distinct\n1",
    "distinct\n2",
    "repeated",
    "perplexity",
]
DIVERSITY_NOTES = (
    "Means over texts, ± half of the 95 % bootstrap interval. Entropy in bits, distinct-n and repeated "
    "4-grams of prompt and text, split at white space; perplexity under the target of the text after "
    "the prompt. The article: GPT-2 large, GPT-2."
)
PERPLEXITIES = ["draft", "target", "speculative", "relative\ndifference"]
# What the course report prints for Pythia-70m and Pythia-2.8b on WikiText-2.
REPORT = {"draft": 84.37, "target": 17.141058, "speculative": 17.141059}


def diversity_table(lines: Sequence[Line]) -> Table:
    """One row for each method, and below them the article's figures."""
    first = lines[0]
    table = grid(
        f"Diversity: {first['prompts']} prompts, maxLen {first['maxLen']}, "
        f"temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}",
        DIVERSITY_COLUMNS,
    )
    for line in lines:
        figures = (give_or_take([each[name] for each in line["each"]]) for name in FIGURES)
        table.add_row(name_of(line["method"]), str(line["texts"]), *figures)
    for method, values in ARTICLE.items():
        table.add_row(f"article, {method}", "5", *(f"{value:.3g}" for value in values), "", "")
    return table


def text_table(lines: Sequence[Line], pythia: bool) -> Table:
    """Perplexity per text, one row for each corpus; if the models are the course report's, its figures below."""
    table = grid(
        f"Perplexity per text (mean over texts of at least {lines[0]['sentenceLimit']} characters), "
        + lines[0]["dtype"],
        ["", "texts", "tokens", *PERPLEXITIES],
    )
    for line in lines:
        table.add_row(plain(line["corpus"]), str(line["texts"]), f"{line['tokens']:,}", *perplexities(line["ppl"]))
    if pythia:
        table.add_row("the report (WikiText-2)", "", "", *map(str, REPORT.values()), difference(REPORT))
    return table


def corpus_table(lines: Sequence[Line]) -> Table:
    """Perplexity of each whole corpus, per token, word and byte."""
    first = lines[0]
    table = grid(
        f"Perplexity of the corpus (windows of {first['window']} tokens, stride {first['stride']}), " + first["dtype"],
        ["", "tokens", "per", *PERPLEXITIES],
    )
    for line in lines:
        for unit in ("token", "word", "byte"):
            corpus = (plain(line["corpus"]), f"{line['tokens']:,}") if unit == "token" else ("", "")
            table.add_row(*corpus, unit, *perplexities({role: ppl[unit] for role, ppl in line["ppl"].items()}))
    return table


def perplexities(ppl: Mapping[str, float]) -> tuple[str, ...]:
    """The cells of PERPLEXITIES."""
    figures = number(ppl["draft"], 4), number(ppl["target"], 6), number(ppl["speculative"], 6)
    return *figures, difference(ppl)


def difference(ppl: Mapping[str, float]) -> str:
    """How far the speculative perplexity is from the target's, relative to it."""
    return f"{abs(ppl['speculative'] / ppl['target'] - 1):.1e}"
