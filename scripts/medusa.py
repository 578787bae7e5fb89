"""Medusa's heads (Cai et al., arXiv 2401.10774), to compare them with a head that reads its own guesses.

`scripts.trainHead --recipe medusa` trains them, and `scripts.costFrontier` decodes with them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from decoding.drafter import Drafter, Guesses, LengthRule, no_guesses
from decoding.rows import Rows
from engine.cachedModel import CachedModel
from engine.head import CONFIG, WEIGHTS
from inputs.files import replace_file
from scripts.headTexts import TextBatch
from scripts.training import GAMMA
from utils import Sampling, pick, probabilities


class MedusaHeads(nn.Module):
    """GAMMA heads. All read the target's last hidden state h of the last token that it has read. The target draws the
    next token from h; head j guesses the j-th token after that one (section 2.1 of the paper).

    A head is a residual block, `h + silu(block(h))`, and an output layer of its own. It starts as the target's own
    prediction from h: the block adds nothing, and the output layer is the target's.

    output: the weight of the target's output layer, `[V, d]`.
    """

    def __init__(self, output: Tensor) -> None:
        super().__init__()
        vocabulary, d = output.shape
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(GAMMA))
        self.lm_heads = nn.ModuleList(nn.Linear(d, vocabulary, bias=False) for _ in range(GAMMA))
        for block, lm_head in zip(self.blocks, self.lm_heads):
            nn.init.zeros_(block.weight), nn.init.zeros_(block.bias)
            lm_head.weight.data = output.detach().float().clone()

    def logits(self, head: int, hidden: Tensor) -> Tensor:
        """The logits of a head, counted from 0, for `hidden[..., d]`: `[..., V]`."""
        return self.lm_heads[head](hidden + silu(self.blocks[head](hidden)))

    def chain(self, batch: TextBatch, steps: int) -> Tensor:
        """The logits of the first `steps` heads, `[steps, B, n, V]`, as `trainHead` reads a head's hidden states: in
        step j, those at position t are of the head j + 1 for the hidden state before token t - j."""
        before = batch.before[..., -self.blocks[0].in_features :].float()
        earlier = [before.roll(j, 1) for j in range(steps)]  # Where it rolls over, the loss has no weight.
        return torch.stack([self.logits(j, hidden) for j, hidden in enumerate(earlier)])

    def save(self, folder: Path, target: str, record: Mapping[str, Any]) -> None:
        """Write the weights to a folder, in bfloat16, as `engine.head.save_head` does."""
        weights = {name: x.detach().to("cpu", torch.bfloat16) for name, x in self.state_dict().items()}
        save_file(weights, folder / WEIGHTS)
        replace_file(folder / CONFIG, json.dumps({"medusa": {**record, "target": target}}) + "\n")


class MedusaDrafter(Drafter):
    """Medusa's heads guess, each without knowing what the others guess. Guesses are drawn from each head's
    distribution, so verification is lossless: the paper accepts typical tokens instead, which is not.

    The target reads the text anew in each round: that is slow, and needs no state.

    folder: where `MedusaHeads.save` wrote the heads.
    """

    varies = True

    def __init__(self, heads: MedusaHeads, target: CachedModel) -> None:
        self.heads, self.target = heads, target

    @classmethod
    def load(cls, folder: Path, target: CachedModel) -> "MedusaDrafter":
        heads = MedusaHeads(target.model.get_output_embeddings().weight[: target.vocabulary])
        heads.load_state_dict({name: x.float() for name, x in load_file(folder / WEIGHTS).items()})
        return cls(heads, target)

    @torch.inference_mode()
    def draft(self, rows: Rows, gammas: Sequence[int], sampling: Sampling, length: LengthRule | None = None) -> Guesses:
        """At most GAMMA guesses for a row."""
        counts = [min(gamma, GAMMA) for gamma in gammas]
        if max(counts) == 0:
            return no_guesses(rows, self.target.vocabulary)
        read = [text[: committed - 1] for text, committed in zip(rows.texts, rows.committed_lengths)]
        model = self.target.model.base_model
        hidden = torch.cat([model(torch.tensor([text]), use_cache=False).last_hidden_state[:, -1] for text in read])
        logits = [self.heads.logits(head, hidden.float()) for head in range(max(counts))]
        q = probabilities(torch.stack(logits, 1), sampling)
        return Guesses(pick(q, rows.uniform(counts)), q).limited(counts)
