"""`UncachedModel`: decoding without a KV cache, as a baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from decoding.model import Model
from decoding.tree import Places


class UncachedModel(Model):
    """Another model, decoding without a KV cache: each forward reads the whole text again, as in the course report's
    code. Its steps are computed eagerly.

    It stores the tokens of each row instead of their keys and values. Rows may be ragged: a row is read past its
    end up to the longest one, and causal attention hides that from its own logits. It does not read trees.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.name = model, f"{model.name} without a KV cache"
        self.vocabulary, self.context = model.vocabulary, model.context
        self.device, self.dtype = model.device, model.dtype
        self.text = torch.zeros(0, 0, dtype=torch.int64, device=self.device)  # `[B, capacity]`

    def reserve(self, rows: int, capacity: int) -> None:
        if self.text.shape != (rows, capacity):
            self.text = torch.zeros(rows, capacity, dtype=torch.int64, device=self.device)

    def copy_row(self, source: int, row: int) -> None:
        self.text[row] = self.text[source]

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, places: Places | None = None, keep: Tensor | None = None
    ) -> Tensor:
        if places is not None:
            raise TypeError(f"{self.name} reads no tree of guesses")
        text = self.text[self.first_row : self.first_row + len(tokens)]
        text.scatter_(1, positions, tokens)
        logits = self.score(text[:, : int(positions.max()) + 1])
        at = positions if keep is None else positions[:, keep]
        return logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))

    def score(self, tokens: Tensor) -> Tensor:
        return self.model.score(tokens)
