"""The tables of measurements of texts: diversity, perplexity, and how often a trained head guesses right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.diversity import FIGURES
from experiments.intervals import FEW
from experiments.lines import CorpusPerplexityLine, DiversityLine, TextPerplexityLine
from inputs.commandLine import counted
from report.sources import ARTICLE, REPORT, REPORT_DIFFERENCE, REPORT_TEXTS
from report.tables import Table, give_or_take, name_of, number, plain

DIVERSITY_TITLES = "entropy\n1", "entropy\n2", "entropy\n3", "distinct\n1", "distinct\n2", "repeated", "perplexity"
DIVERSITY_NOTES = (
    f"Means over texts ± half of the 95 % bootstrap interval, or (range of fewer than {FEW} independent values). "
    "entropy n: of n-grams, in bits; distinct n: different n-grams over all; repeated: the share of 4-grams that "
    "occurred before. N-grams are of prompt and text, split at white space. perplexity: under the target, of the text "
    "after the prompt. article: GPT-2 large with GPT-2."
)
PERPLEXITY_NOTES = (
    "speculative: the perplexity of the speculative sampler itself; relative difference: between it and the target's."
)
PERPLEXITIES = "draft", "target", "speculative", "relative\ndifference"
TRAINING_TITLES = (
    "",
    "weights",
    "tokens trained",
    "minutes",
    "memory, GB",
    "acceptance by position",
    "of all",
    "tokens/round",
)


def diversity_table(lines: Sequence[DiversityLine]) -> Table:
    """One row for each method, and below them the article's figures."""
    first = lines[0]
    table = Table(
        f"Diversity: {counted(first['prompts'], 'prompt')}, maxLen {first['maxLen']}, "
        f"temperature {first['temperature']}, top_p {first['top_p']}, {first['dtype']}",
        ["", "texts", *DIVERSITY_TITLES],
        notes=DIVERSITY_NOTES,
    )
    for line in lines:
        figures = (give_or_take([text[name] for text in line["each"]]) for name in FIGURES)
        table.add(name_of(line["method"]), str(line["texts"]), *figures)
    for method, values in ARTICLE.items():
        table.add(f"article, {method}", "5", *(f"{value:.3g}" for value in values))
    return table


def text_table(lines: Sequence[TextPerplexityLine], pythia: bool) -> Table:
    """Perplexity per text, one row for each corpus; if the models are the course report's, its figures below."""
    limit, dtype = lines[0]["sentenceLimit"], lines[0]["dtype"]
    title = f"Perplexity per text (mean over texts of at least {limit} characters), {dtype}"
    table = Table(title, ["", "texts", "tokens", *PERPLEXITIES])
    for line in lines:
        table.add(plain(line["corpus"]), str(line["texts"]), f"{line['tokens']:,}", *perplexities(line["ppl"]))
    if pythia:
        table.add("the report (WikiText-2)", str(REPORT_TEXTS), "", *perplexities(REPORT)[:-1], REPORT_DIFFERENCE)
    return table


def corpus_table(lines: Sequence[CorpusPerplexityLine]) -> Table:
    """Perplexity of each whole corpus, per token, word and byte."""
    window, stride, dtype = lines[0]["window"], lines[0]["stride"], lines[0]["dtype"]
    title = f"Perplexity of the corpus (windows of {window} tokens, stride {stride}), {dtype}"
    table = Table(title, ["", "tokens", "per", *PERPLEXITIES])
    for line in lines:
        for unit in ("token", "word", "byte"):
            corpus = (plain(line["corpus"]), f"{line['tokens']:,}") if unit == "token" else ("", "")
            table.add(*corpus, unit, *perplexities({role: ppl[unit] for role, ppl in line["ppl"].items()}))
    return table


def perplexities(ppl: Mapping[str, float]) -> tuple[str, ...]:
    """The cells of PERPLEXITIES."""
    return number(ppl["draft"], 4), number(ppl["target"], 6), number(ppl["speculative"], 6), difference(ppl)


def difference(ppl: Mapping[str, float]) -> str:
    """How far the speculative perplexity is from the target's, relative to it."""
    return f"{abs(ppl['speculative'] / ppl['target'] - 1):.1e}"


def training_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """What trained heads cost, and how good they are on text that is held out; of variants a row each. records: of
    `scripts.trainHead`."""
    table = Table("Heads, on text that is held out", [*TRAINING_TITLES], left=(5,))
    for record in records:
        for name, variant in record["variants"].items():
            last = variant["history"][-1]
            shares = " ".join(f"{share:.3f}" for share in last["acceptance"])
            cost = f"{variant['parameters']:,}", f"{last['tokens']:,}", f"{last['seconds'] / 60:.0f}"
            quality = f"{last['memory'] / 1e9:.1f}", shares, f"{last['alpha']:.3f}", f"{last['tokens_per_round']:.2f}"
            table.add(name if len(record["variants"]) > 1 else record["models"]["target"]["name"], *cost, *quality)
    return table
