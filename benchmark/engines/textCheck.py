"""Checks the texts of other programs against the target in float32, whatever dtype the run has.

A method is timed only if its greedy text is the target's argmax, up to rounding: otherwise the conversion is wrong. Its
sampled text is audited. Both are judged as `test.py --audit` judges (lossless/audit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from experiments.schema import AuditFigures, GreedyAuditFigures
from lossless.audit import Auditor
from utils import GREEDY, Sampling

GREEDY_TOKENS, TEXTS, TEXT_TOKENS = 50, 40, 100  # of the greedy text of each prompt; drawn texts, and of each of them
CHECKED_BATCH = 8  # texts at once, of a method that decodes many
# (prompts, count, sampling, seeds) -> the new tokens of each
Write = Callable[[Sequence[list[int]], int, Sampling, Sequence[int]], Sequence[Sequence[int]]]


class Float32Model:
    """A model whose `score` computes in float32, one module at a time, so that no second copy of the weights is needed.

    Has the interface of `CachedModel` that `TextScorer` uses. dtype: the one the texts were written in, for the
    rounding to allow.
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


def stored_model(folder: Path, vocabulary: int, device: str) -> Float32Model:
    """The model in a folder, with the weights that other programs read."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval().to(device)
    return Float32Model(model, vocabulary)


def float32_hooks(module: nn.Module) -> list[Any]:
    """Hooks that give a module float32 weights while it runs. Afterwards it has its own weights again, not copies:
    other modules share them."""
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
    """Checks the texts of other programs.

    target, draft: in float32; draft: None if no draft has the target's tokenizer. sampling: of drawn texts.
    limit: the p-value below which a test fails. drawn: the prompts and the texts that were sampled last.
    """

    drawn: Sequence[tuple[list[int], list[int]]] = ()

    def __init__(
        self, target: Float32Model, draft: Float32Model | None, sampling: Sampling, limit: float, seed: int
    ) -> None:
        self.target, self.draft, self.sampling, self.limit, self.seed = target, draft, sampling, limit, seed

    def greedy(self, write: Write, prompts: Sequence[list[int]], unit: float) -> GreedyAuditFigures:
        """The figures of greedy texts. unit: the unit roundoff of the engine. Raises ValueError if rounding does not
        explain one of their tokens."""
        texts = write(prompts, GREEDY_TOKENS, GREEDY, [self.seed] * len(prompts))
        figures = Auditor(cast(Any, self.target), None, unit, self.seed).greedy(prompts, texts, GREEDY)
        if figures["beyond"]:
            raise ValueError(
                f"not timed: {figures['beyond']} of {figures['tokens']} greedy tokens are not the target's; the "
                f"largest logit gap is {figures['largest_gap']:.2g}, and rounding explains {figures['allowed']:.2g}"
            )
        return figures

    def sampled(self, write: Write, prompts: Sequence[list[int]], unit: float) -> AuditFigures:
        """The figures of drawn texts, and which tests tell them from the target's own."""
        prefixes = [prompts[number % len(prompts)] for number in range(TEXTS)]
        seeds = [self.seed + 7919 * number for number in range(1, TEXTS + 1)]
        texts = write(prefixes, TEXT_TOKENS, self.sampling, seeds)
        self.drawn = list(zip(prefixes, map(list, texts)))
        auditor = Auditor(cast(Any, self.target), cast(Any, self.draft), unit, self.seed, self.limit)
        return auditor.drawn(prefixes, texts, self.sampling)
