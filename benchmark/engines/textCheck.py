"""What an engine's texts are checked against: the target in float32, whatever dtype the benchmark runs in.

A row is timed only if its greedy text is the target's argmax, up to rounding: otherwise the conversion is wrong. Its
sampled text is audited. Both are judged as `test.py --audit` judges (lossless/audit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from benchmark.contenders import SAMPLING
from lossless.audit import Auditor
from lossless.evidence import TESTS
from utils import GREEDY

GREEDY_TOKENS, TEXTS, TEXT_TOKENS = 50, 40, 100  # of the greedy text of each prompt; drawn texts, and of each of them
Figures = dict[str, Any]  # as the record has them
# (prompts, count, temperature, seeds) -> the new tokens of each
Write = Callable[[Sequence[list[int]], int, float, Sequence[int]], list[list[int]]]


class Float32Model:
    """A model whose `score` computes in float32, one module at a time, so that no second copy of the weights is needed.

    Has what `TextScorer` asks of a `CachedModel`. dtype: the one the texts were written in, for the rounding to allow.
    """

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self.model, self.vocabulary = model, vocabulary
        self.device, self.dtype = model.device, model.dtype
        self.leaves = [module for module in model.modules() if not list(module.children())]

    @torch.inference_mode()
    def score(self, tokens: Tensor) -> Tensor:
        """Logits after each token: int64 `[B, n]` -> float32 `[B, n, V]`."""
        hooks = [hook for leaf in self.leaves for hook in float32_hooks(leaf)]
        try:
            return self.model(input_ids=tokens, use_cache=False).logits[..., : self.vocabulary].float()
        finally:
            for hook in hooks:
                hook.remove()


def float32_hooks(module: nn.Module) -> list[Any]:
    """Hooks that give a module float32 weights while it runs. Afterwards it has its own weights again, and not copies
    of them: others share them."""
    stored: dict[str, Tensor] = {}

    def widen(module: nn.Module, *arguments: object) -> None:
        for name, weight in module._parameters.items():
            if weight is not None:
                stored[name] = weight
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)

    def restore(module: nn.Module, *arguments: object) -> None:
        module._parameters.update(stored)

    return [module.register_forward_pre_hook(widen), module.register_forward_hook(restore, always_call=True)]


class TextChecker:
    """Checks the rows of a run.

    target, draft: in float32; draft: None if there is none with the target's tokenizer. limit: the p-value below which
    a test fails. samples: whether sampled texts are tested. drawn: the prompts and the texts that were sampled last.
    """

    def __init__(
        self, target: Float32Model, draft: Float32Model | None, limit: float, seed: int, samples: bool = True
    ) -> None:
        self.target, self.draft, self.limit, self.seed, self.samples = target, draft, limit, seed, samples
        self.drawn: list[tuple[list[int], list[int]]] = []

    @property
    def tokens(self) -> int:
        """Of the longest text that is checked."""
        return max(GREEDY_TOKENS, TEXT_TOKENS if self.samples else 0)

    def greedy(self, write: Write, prompts: Sequence[list[int]], unit: float) -> Figures:
        """The figures of greedy texts: tokens, those that are not the argmax, and those that rounding does not
        explain. unit: the unit roundoff of the engine. Raises ValueError if there are any of the last kind."""
        texts = write(prompts, GREEDY_TOKENS, 0.0, [self.seed] * len(prompts))
        figures = Auditor(self.target, None, unit, self.seed).greedy(prompts, texts, GREEDY)
        if figures["beyond"]:
            raise ValueError(
                f"not timed: {figures['beyond']} of {figures['tokens']} greedy tokens are not the target's; the "
                f"largest logit gap is {figures['largest_gap']:.2g}, and rounding explains {figures['allowed']:.2g}"
            )
        return dict(figures)

    def sampled(self, write: Write, prompts: Sequence[list[int]], unit: float) -> Figures | None:
        """The figures of drawn texts, and "seen_by": the tests that tell them from the target's own. unit: the unit
        roundoff of the engine."""
        self.drawn = []
        if not self.samples:
            return None
        prefixes = [prompts[number % len(prompts)] for number in range(TEXTS)]
        seeds = [self.seed + 7919 * number for number in range(1, TEXTS + 1)]
        texts = write(prefixes, TEXT_TOKENS, SAMPLING.temperature, seeds)
        self.drawn = list(zip(prefixes, texts))
        auditor = Auditor(self.target, self.draft, unit, self.seed, self.limit)
        return dict(auditor.drawn(prefixes, texts, SAMPLING))


def verdict(figures: Figures | None) -> str:
    """What is said of a row's sampled texts: whether a test found a difference from the target's own."""
    if figures is None:
        return ""
    if not figures["seen_by"]:
        return "none found"
    tests = [TESTS[name] for name in figures["seen_by"]]
    if figures["impossible"]:
        tests[-1] += f" {100 * figures['impossible'] / figures['tokens']:.0f} %"
    return f"found: {', '.join(tests)}"
