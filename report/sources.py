"""The figures that the sources print: the course report, a post on SmolLM2, an article on contrastive decoding.

What the project measures beside them is in docs/reproduction.md.
"""

from __future__ import annotations

from typing import NamedTuple

from experiments.lines import RunLine


class Reported(NamedTuple):
    """A figure of speed in the course report.

    role: of the decoding. words: its description. field: its name in `intervals.summarize`, in units of 1 / scale.
    best, typical: of its two groups of runs, as printed (TTFT: in seconds). Of one configuration, group one is the best
    of several runs, which the report calls not representative, and group two is typical.
    """

    role: str
    words: str
    field: str
    scale: float
    best: str
    typical: str


TTFT, TOTAL, RATE = ("TTFT, ms", "ttft", 1e3), ("total/n, ms", "report_tpot", 1e3), ("tokens/s", "throughput", 1.0)

# The course report: Pythia-2.8b with Pythia-70m, 200 new tokens after one prompt. The speed-ups are the ratios of its
# tokens/s.
REPORT_SPEED = (
    Reported("draft", *TTFT, "445.8", "462.9"),
    Reported("draft", *TOTAL, "8.9753", "8.7781"),
    Reported("draft", *RATE, "111.4168", "113.9199"),
    Reported("target", *TTFT, "1406.1", "1546.9"),
    Reported("target", *TOTAL, "267.0314", "268.5069"),
    Reported("target", *RATE, "3.7449", "3.7243"),
    Reported("speculative", *TTFT, "957.0", "363.6"),
    Reported("speculative", *TOTAL, "107.1935", "148.7493"),
    Reported("speculative", *RATE, "9.3289", "6.7227"),
    Reported("speculative", "speed-up", "speedup", 1.0, "2.49", "1.81"),
)
SPEED_UP = REPORT_SPEED[-1]
REPORT = {"draft": 84.372630, "target": 17.141058, "speculative": 17.141059}  # perplexities on WikiText-2, as printed
# In its results.txt: the number of texts, and the relative difference of their means, which REPORT has cut off.
REPORT_TEXTS, REPORT_DIFFERENCE = 10, "3.3e-08"
# The setting of the report's code: the dtype of the speeds; the prompts of the table, and of what was added later; the
# texts of the perplexities, 20 in the code as published.
REPORT_DTYPE, REPORT_PROMPTS = "float16", ("Computer Science is", "He redid the main theme")
REPORT_PASSAGES = "--sentenceLimit", "100", "--sentences", "20"

# Clay's post: SmolLM2-1.7B-Instruct with SmolLM2-135M-Instruct, gamma 5. Each variant's run timed plain decoding too.
POST_FIGURES = (
    *("plain decoding: tokens/s", "speculative decoding: tokens/s", "speed-up", "tokens of a round"),
    *("accepted, of the drafted tokens", "alpha: accepted, of the tested guesses"),
)
POST = {
    "fixed": ("28.07", "34.82", "1.24", "", "0.34 - 0.55", ""),
    "targetConfidence": ("27.92", "46.42", "1.66", "", "0.34 - 0.55", ""),
}

# R. Gadgil's article: GPT-2 large with GPT-2, texts of 50 tokens after the prompts of `experiments.diversity`. The
# entropies of n-grams for n = 1, 2, 3, and distinct-1 and -2.
ARTICLE = {"naive": (4.990, 5.175, 5.144, 0.8950, 0.9951), "contrastive": (5.183, 5.350, 5.314, 0.9028, 1.0)}


def is_the_reports(run: RunLine) -> bool:
    """Whether a run's models are those of the course report."""
    names = {role: model["name"] for role, model in run["models"].items()}
    return (names.get("target"), names.get("draft")) == ("pythia-2.8b", "pythia-70m")
