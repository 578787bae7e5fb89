"""What the parts of a round cost, each measured by itself: drafting, scoring, sampling, and a whole round."""

from __future__ import annotations

import torch
from torch import Generator

from benchmark.inTurn import Work, in_turn
from benchmark.peers import SAMPLING
from benchmark.samplers import Variants, synthetic
from benchmark.stepTimes import Line, fill, forward, one_token
from decoding.rounds import score_block
from decoding.verification import token_rule
from engine.cachedModel import CachedModel
from methods.drafters import ModelDrafter
from specSampling import specSampling


def parts(variants: Variants, prompt: list[int], gamma: int, device: str, seed: int) -> list[Line]:
    """[{variant, part, seconds}] of the parts of a round.

    "plain step", "draft step": a token of the target, and of the draft. "scoring": gamma + 1 tokens scored at once, and
    verified. "round": a whole round in which all guesses are accepted. "sampling": its filters, draws and verification
    alone.
    """
    generator = Generator(device).manual_seed(seed)
    works: dict[tuple[str, str], Work] = {}
    for variant, models in variants.items():
        own = works_of(models["target"], models["draft"], prompt, gamma, generator)
        works |= {(variant, part): work for part, work in own.items()}
    seconds = in_turn(works, device, "a round")
    return [{"variant": variant, "part": part, "seconds": own} for (variant, part), own in seconds.items()]


@torch.inference_mode()
def works_of(
    target: CachedModel, draft: CachedModel, prompt: list[int], gamma: int, generator: Generator
) -> dict[str, Work]:
    """{part: the function that is timed}. The KV caches hold as many tokens as the prompt."""
    for model in (target, draft):
        fill(model, len(prompt), len(prompt) + tokens_of_rounds(gamma))
    logits = forward(target, gamma + 1, len(prompt))()
    at = torch.arange(gamma + 1, device=target.device)[None] + len(prompt)
    operators = target.operators
    q = operators.probabilities(logits[:, :gamma], SAMPLING)
    drafts = operators.pick(q, torch.rand(q.shape[:-1], device=target.device, generator=generator))
    block = torch.cat([at[:, :1] % target.vocabulary, drafts], 1)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, device=target.device, generator=generator)

    def scoring() -> None:
        score_block(target, block, at, q, uniform(1, gamma + 1), SAMPLING, token_rule)[1].tolist()

    def sampling() -> None:
        for i in range(gamma):
            operators.pick(operators.probabilities(logits[:, i], SAMPLING), uniform(1))
        p = operators.probabilities(logits, SAMPLING)
        operators.rule(token_rule)(p, q, drafts, uniform(1, gamma + 1))[0].tolist()

    return {
        "plain step": one_token(target, len(prompt), generator),
        "draft step": one_token(draft, len(prompt), generator),
        "scoring": scoring,
        "sampling": sampling,
        "round": lambda: seconds_of_round(target, draft, prompt, gamma, generator),
    }


def tokens_of_rounds(gamma: int) -> int:
    """New tokens of the text that `seconds_of_round` times: the first one, and three rounds."""
    return 1 + 3 * (gamma + 1)


def seconds_of_round(
    target: CachedModel, draft: CachedModel, prompt: list[int], gamma: int, generator: Generator
) -> float:
    """Mean seconds of two rounds in which all guesses are accepted. The round before them does not count: in it the
    draft reads the prompt."""
    rule, max_len = synthetic(1.0, target.operators.rule(token_rule)), tokens_of_rounds(gamma)
    _, (record,) = specSampling(
        [prompt], target, ModelDrafter(draft), max_len, gamma, SAMPLING, None, generator, verify=rule
    )
    return (record.times[-1] - record.times[1]) / (len(record.times) - 2)
