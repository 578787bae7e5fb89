"""`PYTORCH`: filters, draws and verification in pure PyTorch, for a model without kernels of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from decoding.interfaces import Rule
from decoding.treeDrawing import siblings
from utils import Sampling, pick, probabilities


class PyTorchOperators:
    """Filters, draws and verification in pure PyTorch: those of utils.py, treeDrawing.py and verification.py."""

    def probabilities(self, logits: Tensor, sampling: Sampling, seen: Tensor | None = None) -> Tensor:
        return probabilities(logits, sampling, seen)

    def pick(self, probs: Tensor, u: Tensor) -> Tensor:
        return pick(probs, u)

    def siblings(self, q: Tensor, u: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return siblings(q, u, counts)

    def rule(self, verify: Rule) -> Rule:
        return verify


PYTORCH = PyTorchOperators()
