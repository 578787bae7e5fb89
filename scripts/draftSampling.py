"""Which temperature and top-p of the draft alone make most of its guesses right: `--draftTemperature`, `--draftTop_p`.

    python -m scripts.draftSampling --sentences 40          every flag of test.py says what it says there

The target writes a text after each prompt. Both models then read it once, so all pairs of settings are compared in the
same contexts. Written to the screen, for each pair: alpha, the mean of sum min(p, q), and the tokens of a round.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from experiments.loading import LoadedModels
from experiments.prepare import prepare
from experiments.settings import parse
from experiments.speed import interval
from experiments.theory import overlap
from inputs.commandLine import as_command
from inputs.progress import followed
from regrSampling import regrSampling
from utils import Sampling, UserError, probabilities, seen_after

TEMPERATURES = 0.4, 0.55, 0.7, 0.775, 0.85, 0.925, 1.0, 1.15, 1.3
TOP_PS = 0.8, 0.9, 0.95, 1.0
Cell = tuple[float, float]  # temperature and top-p of the draft


def tokens_of_round(p: Tensor, q: Tensor, tokens: Tensor, gamma: int) -> float:
    """The mean tokens of a round of `gamma` guesses, from p and q `[n, V]` before each of the `tokens[n]` drawn from p.

    The guesses x_1, ..., x_i are all accepted with the probability that the tokens drawn from q are those of the text
    and pass: the mean of min(1, q/p)(x_1) ... min(1, q/p)(x_i) over texts drawn from p. The last factor's mean over x_i
    is sum min(p, q), which is less noisy.
    """
    px, qx = (d.gather(-1, tokens[:, None])[:, 0] for d in (p, q))
    passed, chance, total = (qx / px).clamp(max=1), overlap(p, q), 1.0
    reached = torch.ones_like(chance)
    for i in range(min(gamma, len(tokens))):
        total += float((reached * chance[i:]).mean())
        reached = reached[:-1] * passed[i:-1]
    return total


def grid(
    models: LoadedModels, prompts: Sequence[list[int]], max_len: int, sampling: Sampling, gamma: int, seed: int
) -> dict[Cell, list[tuple[float, float]]]:
    """{(temperature, top-p): (alpha, tokens of a round) of each text}."""
    target, draft = models["target"], models.get("restricted", models["draft"])
    cells: dict[Cell, list[tuple[float, float]]] = {(t, top_p): [] for t in TEMPERATURES for top_p in TOP_PS}
    for number, prompt in enumerate(followed(prompts, "texts", len(prompts))):
        generator = torch.Generator(target.device).manual_seed(seed + number)
        text = regrSampling([prompt], target, max_len, sampling, generator=generator)[0][0]
        whole = torch.tensor([prompt + text], device=target.device)
        seen = torch.zeros(1, target.vocabulary, dtype=torch.bool, device=target.device)
        after = seen_after(seen, whole)
        assert after is not None, "seen is given"
        seen = after[0, len(prompt) - 1 : -1]
        target_logits, draft_logits = (model.score(whole)[0, len(prompt) - 1 : -1] for model in (target, draft))
        p = probabilities(target_logits, sampling, seen)
        for cell, texts in cells.items():
            q = probabilities(draft_logits, sampling.but(*cell), seen)
            texts.append((float(overlap(p, q).mean()), tokens_of_round(p, q, whole[0, len(prompt) :], gamma)))
    return cells


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` and return the exit code."""
    return as_command("draftSampling", lambda: show(sys.argv[1:] if argv is None else argv), "Nothing is kept.")


def show(argv: Sequence[str]) -> None:
    """Measure the grid, and print each pair beside the target's own: means and 95 % intervals over the texts."""
    settings = parse(["--speed", *argv])
    prepared, sampling = prepare(settings), settings.sampling.of("speed")
    if settings.decoding.lookup or prepared.translation:
        raise UserError("there is no q to compare: name a --draft model with the target's tokenizer")
    prompts = prepared.inputs.rows
    models, gamma = prepared.load(prepared.place.text_dtype), settings.decoding.gamma_of("fixed")
    max_len = settings.sampling.max_len_of("speed")
    measured = grid(models, prompts, max_len, sampling, gamma, settings.measuring.seed)
    cells = {cell: np.array(texts) for cell, texts in measured.items()}
    usual = cells.get((sampling.temperature, sampling.top_p))
    print(f"{len(prompts)} texts of {max_len} tokens; target at {sampling}; gamma {gamma}")
    title = "T     top-p  alpha  tokens/round"
    print(title if usual is None else f"{title}  more than at the target's own [95 % interval]")
    for (temperature, top_p), texts in cells.items():
        alpha, tokens = texts.mean(0)
        line = f"{temperature:<5} {top_p:<5}  {alpha:.4f} {tokens:.4f}"
        for more in [] if usual is None else (texts - usual).T:
            line += "  {:+.4f} [{:+.4f}, {:+.4f}]".format(*interval(more, np.mean))
        print(line)


if __name__ == "__main__":
    sys.exit(main())
