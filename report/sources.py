"""The figures that the sources print: the course report, a post on SmolLM2, an article on contrastive decoding.

What the project measures beside them is in docs/reproduction.md.
"""

from __future__ import annotations

from typing import NamedTuple

from experiments.lines import RunLine


class Reported(NamedTuple):
    """A figure of speed in the course report.

    words: what it is. plain: of plain decoding, else of speculative decoding. field: its name in `speed.summarize`, in
    units of 1 / scale. values: as printed; two where the two groups of runs differ.
    """

    words: str
    plain: bool
    field: str
    scale: float
    values: tuple[str, ...]


# The course report: Pythia-2.8b with Pythia-70m. It is not said whose the second TTFT is, nor what sets the two groups
# apart.
REPORT_SPEED = (
    Reported("plain decoding: TTFT, ms", True, "ttft", 1e3, ("1406.1",)),
    Reported("plain decoding: total/n, ms", True, "report_tpot", 1e3, ("267.03",)),
    Reported("plain decoding: tokens/s", True, "throughput", 1.0, ("3.74",)),
    Reported("speculative decoding: TTFT, ms (inferred)", False, "ttft", 1e3, ("957.0",)),
    Reported("speculative decoding: total/n, ms", False, "report_tpot", 1e3, ("107.19", "148.75")),
    Reported("speculative decoding: tokens/s", False, "throughput", 1.0, ("9.33", "6.72")),
    Reported("speed-up", False, "speedup", 1.0, ("2.49", "1.80")),
)
REPORTED_SPEEDUP = "1.8 - 2.5"
REPORT = {"draft": 84.372630, "target": 17.141058, "speculative": 17.141059}  # perplexities on WikiText-2

# Clay's post: SmolLM2-1.7B-Instruct with SmolLM2-135M-Instruct. accepted: of the drafted tokens.
POST = {"plain": "34.82", "tokens/s": "46.42", "speed-up": "1.24 - 1.66", "accepted": "0.34 - 0.55"}

# R. Gadgil's article: GPT-2 large with GPT-2, texts of 50 tokens after the prompts of `experiments.diversity`. The
# entropies of n-grams for n = 1, 2, 3, and distinct-1 and -2.
ARTICLE = {"naive": (4.990, 5.175, 5.144, 0.8950, 0.9951), "contrastive": (5.183, 5.350, 5.314, 0.9028, 1.0)}


def is_the_reports(run: RunLine) -> bool:
    """Whether a run's models are those of the course report."""
    names = {role: model["name"] for role, model in run["models"].items()}
    return (names.get("target"), names.get("draft")) == ("pythia-2.8b", "pythia-70m")
