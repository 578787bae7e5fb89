"""The figures that the sources print (the course report, an article on contrastive decoding), and the tables in which
perplexity and diversity stand beside them. All of it is in docs/reproduction.md."""

import math
from collections.abc import Mapping, Sequence

from experiments.intervals import FEW
from experiments.schema import FIGURES, CorpusPerplexityLine, DiversityLine, PerplexityLine, RunLine, TextPerplexityLine
from inputs.commandLine import counted
from report.tables import Table, give_or_take, name_of, plain

# The course report: Pythia-2.8b with Pythia-70m, 200 new tokens after one prompt. {(role, figure): as printed in its
# two groups of runs of one configuration, but TTFT, which it prints in seconds}: the best of several runs, "not
# representative" in the report's words, and a typical one. The speed-ups are the ratios of its tokens/s.
REPORT_SPEED = {
    ("draft", "TTFT, ms"): ("445.8", "462.9"),
    ("draft", "total/n, ms"): ("8.9753", "8.7781"),
    ("draft", "tokens/s"): ("111.4168", "113.9199"),
    ("target", "TTFT, ms"): ("1406.1", "1546.9"),
    ("target", "total/n, ms"): ("267.0314", "268.5069"),
    ("target", "tokens/s"): ("3.7449", "3.7243"),
    ("speculative", "TTFT, ms"): ("957.0", "363.6"),
    ("speculative", "total/n, ms"): ("107.1935", "148.7493"),
    ("speculative", "tokens/s"): ("9.3289", "6.7227"),
    ("speculative", "speed-up"): ("2.49", "1.81"),
}
# {figure: its name in `intervals.summarize`, in units of 1 / scale}
FIELDS = {"TTFT, ms": ("ttft", 1e3), "total/n, ms": ("report_tpot", 1e3), "tokens/s": ("throughput", 1.0)}
FIELDS["speed-up"] = "speedup", 1.0
BEST_SPEED_UP, SPEED_UP = REPORT_SPEED["speculative", "speed-up"]
REPORT = {"draft": 84.372630, "target": 17.141058, "speculative": 17.141059}  # perplexities on WikiText-2, as printed
# In its results.txt: the number of texts, and the relative difference of their means, which REPORT has cut off.
REPORT_TEXTS, REPORT_DIFFERENCE = 10, "3.3e-08"
# The setting of the report's code: the dtype of the speeds; the prompts of the table, and of what was added later; the
# texts of the perplexities, 20 in the code as published.
REPORT_DTYPE, REPORT_PROMPTS = "float16", ("Computer Science is", "He redid the main theme")
REPORT_PASSAGES = "--sentenceLimit", "100", "--sentences", "20"

# R. Gadgil's article: GPT-2 large with GPT-2, texts of 50 tokens, prompt included, that continue the prompts of
# `experiments.prepare`. The entropies of n-grams for n = 1, 2, 3, and distinct-1 and -2.
ARTICLE = {"naive": (4.990, 5.175, 5.144, 0.8950, 0.9951), "contrastive": (5.183, 5.350, 5.314, 0.9028, 1.0)}

DIVERSITY_NOTES = (
    f"Means over texts ± half of the 95 % bootstrap interval, or (range: fewer than {FEW} independent values). "
    "entropy n: of n-grams, in bits; distinct n: different n-grams over all; repeated: the share of 4-grams that "
    "occurred before. N-grams are of prompt and text, split at white space. perplexity: under the target, of the text "
    "after the prompt. article: GPT-2 large with GPT-2."
)
DIVERSITY = "entropy\n1", "entropy\n2", "entropy\n3", "distinct\n1", "distinct\n2", "repeated", "perplexity"
PERPLEXITY_NOTES = (
    "speculative: the perplexity of the speculative sampler itself, at temperature 1 and without filters; relative "
    "difference: between it and the target's. Of a text longer than the models' context, the first tokens count. "
    "The first token of a text is not scored; per word and per byte divide by the words and bytes of whole texts."
)
PERPLEXITIES = "draft", "target", "speculative", "relative\ndifference"


def is_the_reports(run: RunLine) -> bool:
    """Whether a run's models are those of the course report."""
    names = {role: model["name"] for role, model in run["models"].items()}
    return (names.get("target"), names.get("draft")) == ("pythia-2.8b", "pythia-70m")


def diversity_table(run: RunLine, lines: Sequence[DiversityLine]) -> Table:
    """One row for each method, and below them the article's figures."""
    first, flags = lines[0], run["flags"]
    unsaid = {"top_k": 0, "repetition_penalty": 1}.items()
    more = "".join(f"{name} {flags[name]}, " for name, value in unsaid if flags.get(name, value) != value)
    title = (
        f"Diversity: {counted(first['prompts'], 'prompt')}, maxLen {first['maxLen']}, "
        f"temperature {first['temperature']}, top_p {first['top_p']}, {more}{first['dtype']}"
    )
    table = Table(title, ["", "texts", *DIVERSITY], notes=DIVERSITY_NOTES)
    for line in lines:
        prompts = [(number % line["prompts"],) for number in range(line["texts"])]  # A repeat has a text of each.
        figures = (give_or_take([text[name] for text in line["each"]], prompts) for name in FIGURES)
        table.add(name_of(line["method"]), str(line["texts"]), *figures)
    for method, values in ARTICLE.items():
        table.add(f"article, {method}", "5", *(f"{value:.3g}" for value in values))
    return table


def text_table(lines: Sequence[TextPerplexityLine], pythia: bool) -> Table:
    """Perplexity per text, one row for each corpus; if the models are the course report's, its figures below."""
    limit = lines[0]["sentenceLimit"]
    title = f"Perplexity per text (mean over texts of at least {limit} characters), {computed_in(lines[0])}"
    table = Table(title, ["", "texts", "tokens", *PERPLEXITIES])
    for line in lines:
        table.add(plain(line["corpus"]), str(line["texts"]), f"{line['tokens']:,}", *perplexity_cells(line["ppl"]))
    if pythia:
        table.add("the report (WikiText-2)", str(REPORT_TEXTS), "", *perplexity_cells(REPORT)[:-1], REPORT_DIFFERENCE)
    return table


def corpus_table(lines: Sequence[CorpusPerplexityLine]) -> Table:
    """Perplexity of each whole corpus, per token, word and byte."""
    window, stride = lines[0]["window"], lines[0]["stride"]
    title = f"Perplexity of the corpus (windows of {window} tokens, stride {stride}), {computed_in(lines[0])}"
    table = Table(title, ["", "tokens", "per", *PERPLEXITIES])
    for line in lines:
        for unit in ("token", "word", "byte"):
            corpus = (plain(line["corpus"]), f"{line['tokens']:,}") if unit == "token" else ("", "")
            table.add(*corpus, unit, *perplexity_cells({role: ppl[unit] for role, ppl in line["ppl"].items()}))
    return table


def computed_in(line: PerplexityLine) -> str:
    """The dtype, and whether kernels computed the forwards."""
    return line["dtype"] + ", compiled" * line.get("compiled", False)


def perplexity_cells(ppl: Mapping[str, float | None]) -> tuple[str, ...]:
    """The cells of PERPLEXITIES; from a million on in powers of ten, so that they fit their columns; a dash where a
    figure is not finite."""
    known = {role: math.nan if figure is None else figure for role, figure in ppl.items()}
    cells = [
        f"{known[role]:,.{digits}f}" if known[role] < 1e6 else f"{known[role]:.{digits}e}"
        for role, digits in (("draft", 4), ("target", 6), ("speculative", 6))
    ]
    cells.append(f"{abs(known['speculative'] / known['target'] - 1):.1e}")
    return tuple("-" if cell == "nan" else cell for cell in cells)
