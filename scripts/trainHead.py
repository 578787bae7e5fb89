"""Train a head that guesses from a target's features (EAGLE-3, Li et al., arXiv 2503.01840), or Medusa's heads.

    python -m scripts.trainHead bundled-target models/my-head --texts books/ wiki.valid.tokens:8 --hours 0.5
    python -m scripts.trainHead SmolLM2-135M-Instruct models/my-head --texts books/ --hours 4 --draftVocab 8192

The target first writes the texts to train on, as a user would let it: it continues passages of --texts. A chat model
also writes conversations: both the user's turns and the answers (Magpie, Xu et al., arXiv 2406.08464). Then it reads
the texts, and the hidden states that the head needs are kept on disk. Last, the head is trained on them.

Everything is kept in OUT. If the script is stopped, the same command goes on where it stopped. The head in OUT can be
used as soon as there is one. OUT/training.jsonl has a line for each measurement on text that is not trained on.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from engine.cachedModel import CachedModel
from engine.head import HeadNetwork, embedding_of, save_head
from inputs.commandLine import Parser, as_command, number, one_line, path, script_parser, text, whole
from inputs.devices import pick_device, pick_dtype
from inputs.files import gigabytes, replace_file
from inputs.models import find_model, load_model, model_version
from inputs.progress import Bar
from inputs.prompts import find_prompts
from inputs.tokenizers import end_tokens, load_tokenizer
from scripts.headTexts import LAYERS, WRITTEN, OutputLayer, at_a_time, prepare, tapped
from scripts.training import DIVERGENCE, KEPT, SAMPLING, WARM_UP, acceptance_gradient, divergence_gradient
from utils import UserError, probabilities

# The network
MLP = 2  # width of the MLP, as a multiple of the head's

# Training
BATCH = 2048  # tokens in a step
LENGTHS = (256,) * 7 + (1024,)  # row lengths of the steps, in turn: long rows teach to look far back, and cost more
GAMMA = 4  # guesses of a round, and steps of the training-time test
STEP_WEIGHT = 0.8  # weight of a step's loss against that of the step before it, as in EAGLE-3
FINISH = 0.3  # share of the training, its last, whose loss is the share of guesses that the target rejects
FEATURE = 1.0  # weight of the feature loss beside the cross-entropy, with --featureLoss
MUON_RATE, ADAM_RATE = 0.02, 4e-3  # highest learning rates, for matrices and for all else
CLIP = 1.0  # the longest gradient
EDGE = 1e-5  # a logit that is less by so little is in the nucleus too: it is computed again, and rounded otherwise
KEEP = 120.0  # seconds between two checkpoints
MEASURED = 20  # measurements in a training
SEEDS = 1 << 20  # a step's windows are drawn from the seed `--seed * SEEDS + step`


# ---------------------------------------------------------------------------------------------------------------------
# The networks


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how: one variant of an ablation.

    kind: "head", or "medusa". layers: a key of LAYERS. unroll: steps of the training-time test; 1 trains on true
    features alone. feature_loss: also learn the target's last hidden states (EAGLE, arXiv 2401.15077, section 4.2).
    finish: share of the training on acceptance, its last.
    """

    kind: str = "head"
    layers: str = "three"
    unroll: int = GAMMA
    feature_loss: bool = False
    finish: float = FINISH


class Batch(NamedTuple):
    """Windows of the texts. tokens: int64 `[B, n]`. text: which text each is of, `[B, n]`. drawn: `[B, n]`, whether
    each was drawn with SAMPLING. before: the hidden states of the token before each, `[B, n, layers * d]`, 0 at the
    beginning of a text. last: the last hidden states of each `[B, n, d]`. sums: `[B, n, 3]`, see `Reader.read`."""

    tokens: Tensor
    text: Tensor
    drawn: Tensor
    before: Tensor
    last: Tensor
    sums: Tensor


def batch_of(windows: Sequence[tuple[dict[str, Tensor], int, int]], d: int, device: torch.device) -> Batch:
    """The windows (part, first token, length) of the texts. d: numbers in a hidden state."""
    rows = []
    for part, start, length in windows:
        at = slice(start, start + length)
        text, states = part["text"][at], part["states"][at]
        first = text[:1] if start == 0 else part["text"][start - 1 : start]
        earlier = torch.zeros_like(states[:1]) if start == 0 else part["states"][start - 1 : start]
        begins = text != torch.cat([first, text[:-1]])
        before = torch.cat([earlier, states[:-1]]).masked_fill(begins[:, None], 0.0)
        rows.append((part["tokens"][at].long(), text, part["drawn"][at], before, states[:, -d:], part["sums"][at]))
    return Batch(*(torch.stack(parts).to(device) for parts in zip(*rows)))


def shifted(x: Tensor, by: int) -> Tensor:
    """`x[..., n, d]` with row t - by at place t, and zeros before: `shifted(x, 1)` is what stood one token before."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


class Network(nn.Module):
    """What is trained: it guesses GAMMA tokens in a row."""

    def chain(self, batch: Batch, steps: int) -> Tensor:
        """The last hidden states, from which the output layer guesses, in each step of a chain: `[steps, B, n, d]`.

        In step j, that at position t is for the j-th guess after the true features of the tokens up to t - j. What is
        guessed is the token t + 1; the tokens guessed before it are those of the text. So the first j - 1 positions of
        a text have no step j (`chain_weights`).
        """
        raise NotImplementedError

    def parameters_of_training(self) -> dict[str, nn.Parameter]:
        """{name: weight} of what is trained."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


class TrainedHead(HeadNetwork, Network):
    """`HeadNetwork` with the training-time test of EAGLE-3: a chain whose first step reads true features. Step j reads
    at position t the hidden state that step j - 1 gave at t - 1."""

    def chain(self, batch: Batch, steps: int) -> Tensor:
        layer, cache = self.model.layers[0], KeysValues(batch.text)
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        features = self.fuse(batch.before[..., -self.fuse.in_features :].float())
        angles = self.model.rotary_emb(features, positions)
        hidden = []
        for _ in range(steps):
            x = self.inputs(batch.tokens, features)
            x = x + attention(layer.self_attn, layer.input_layernorm(x), angles, cache)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden.append(self.model.norm(x))
            features = shifted(hidden[-1], 1)
        return torch.stack(hidden)


class KeysValues:
    """Keys and values of the steps so far, each `[B, heads, n, width]`. text: int32 `[B, n]`; a token sees its own
    text alone."""

    def __init__(self, text: Tensor) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        place = torch.arange(text.shape[1], device=text.device)
        self.distance = place[:, None] - place  # of the key at s from the query at t, [n, n]
        self.same_text = text[:, None, :, None] == text[:, None, None, :]


def attention(layer: nn.Module, x: Tensor, angles: tuple[Tensor, Tensor], cache: KeysValues) -> Tensor:
    """The attention of one step j over `x[B, n, d]`. Its keys and values are added to the cache.

    What the query at position t sees is what is in the KV cache in decoding, at the j-th guess:
    - the keys of step 1 up to position t - j + 1, the last token before whose place the true feature is known,
    - the key of step i at position t - j + i, for i = 2 ... j: one of each earlier guess, and its own.
    """
    heads = (*x.shape[:2], -1, layer.head_dim)
    q, k, v = (project(x).view(heads).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *angles)
    groups = q.shape[1] // k.shape[1]
    cache.keys.append(k.repeat_interleave(groups, 1))
    cache.values.append(v.repeat_interleave(groups, 1))
    j = len(cache.keys)
    hidden_from_it = ~(cache.same_text & (cache.distance >= j - 1))
    scores = [(q @ cache.keys[0].mT).masked_fill(hidden_from_it, -math.inf)]  # [B, heads, n, n]
    for i in range(2, j + 1):
        scores.append((q * shifted(cache.keys[i - 1], j - i)).sum(-1, keepdim=True))  # [B, heads, n, 1]
    weights = (torch.cat(scores, -1).float() * layer.scaling).softmax(-1).to(v.dtype)
    n = x.shape[1]
    seen = weights[..., :n] @ cache.values[0]
    for i in range(2, j + 1):
        seen = seen + weights[..., n + i - 2, None] * shifted(cache.values[i - 1], j - i)
    return layer.o_proj(seen.transpose(1, 2).flatten(2))


class MedusaHeads(Network):
    """Medusa's heads (Cai et al., arXiv 2401.10774): each guesses the token at its own distance from the target's last
    hidden state alone, with a residual block before the target's output layer. In step j, that of the token t - j is
    read at position t."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, d) for _ in range(GAMMA))
        for block in self.blocks:
            nn.init.zeros_(block.weight)  # Each head begins as the target's own guess of the next token.
            nn.init.zeros_(block.bias)

    def chain(self, batch: Batch, steps: int) -> Tensor:
        before = batch.before[..., -self.blocks[0].in_features :].float()
        seen = [shifted(before, by) for by in range(steps)]
        return torch.stack([x + F.silu(block(x)) for block, x in zip(self.blocks, seen)])


def chain_weights(text: Tensor, steps: int) -> Tensor:
    """1.0 where a chain of j steps ends in a text at the j-th of them, else 0.0, `[steps, B, n]`: not where it began
    before the text, or before the window."""
    earlier = [F.pad(text, (j, 0), value=-1)[:, : text.shape[1]] for j in range(steps)]
    return torch.stack([(there == text).float() for there in earlier])


def new_network(recipe: Recipe, target: CachedModel, tokens: Tensor | None) -> Network:
    """An untrained network. tokens: those that the output layer is cut to, or None."""
    of_target = target.model.config.get_text_config()
    d, heads = of_target.hidden_size, of_target.num_attention_heads
    if recipe.kind == "medusa":
        return MedusaHeads(d)
    if embedding_of(target).shape[1] != d:
        raise UserError(f"{target.name} has embeddings of another width than its layers; no head is trained for it")
    config = LlamaConfig(
        vocab_size=len(embedding_of(target)),
        hidden_size=d,
        intermediate_size=MLP * d,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(of_target, "num_key_value_heads", None) or heads,
        max_position_embeddings=target.context,
        tie_word_embeddings=False,
        head={"layers": tapped(of_target, recipe.layers)},
    )
    return TrainedHead.of(config, target, tokens)


# ---------------------------------------------------------------------------------------------------------------------
# Losses and measurement


class Labels(NamedTuple):
    """The target's distributions over the head's tokens. logits, plain (the model's own) and p (that tokens are drawn
    from with SAMPLING), each `[m, V]`."""

    logits: Tensor
    plain: Tensor
    p: Tensor

    @classmethod
    def of(cls, output: OutputLayer, last: Tensor, sums: Tensor) -> Labels:
        """From last hidden states `[m, d]` and their `sums[m, 3]`. The probabilities are those among all of the
        target's tokens: if the output layer is cut, they do not sum to 1."""
        logits = output(last)
        whole, kept, least = sums.split(1, -1)
        p = (logits / SAMPLING.temperature - kept).exp().masked_fill_(logits < least - EDGE, 0.0)
        return cls(logits, (logits - whole).exp(), p)


class ChainLoss(torch.autograd.Function):
    """The loss of a chain, and its gradient by the hidden states, computed together.

    Logits and distributions of all positions would fill gigabytes. So a few positions are computed at a time, in the
    processor's cache, and only the gradient by the hidden states is kept.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        hidden: Tensor,
        last: Tensor,
        sums: Tensor,
        weights: Tensor,
        output: OutputLayer,
        finishing: bool,
    ) -> Tensor:
        """hidden `[steps, N, d]`, last `[N, d]`, sums `[N, 3]`, weights `[steps, N]`: of each position's loss.

        The loss is the cross-entropy to the target's distribution. finishing: it is that of `RejectionLoss`.
        """
        gradient, total, count = torch.empty_like(hidden), hidden.new_zeros(()), at_a_time(hidden.device)
        for at in range(0, len(last), count):
            part = slice(at, at + count)
            labels = Labels.of(output, last[part], sums[part])
            for step in range(len(hidden)):
                loss, descent = (rejection if finishing else cross_entropy)(output(hidden[step, part]), labels)
                share = weights[step, part, None]
                total += (loss * share).sum()
                gradient[step, part] = ((descent * share).to(output.weight.dtype) @ output.weight).to(hidden.dtype)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient kept by `forward`."""
        return ctx.saved_tensors[0] * gradients[0], None, None, None, None, None


def cross_entropy(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """-sum_x p(x) log q(x) `[m, 1]`, at temperature 1, and its gradient by `logits[m, V]`."""
    logits = logits - logits.amax(-1, keepdim=True)
    q = logits.exp()
    whole = q.sum(-1, keepdim=True)
    among = labels.plain.sum(-1, keepdim=True)
    loss = among * whole.log() - (labels.plain * logits).sum(-1, keepdim=True)
    return loss, q.mul_(among / whole).sub_(labels.plain)


def rejection(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor]:
    """1 - sum_x min(p(x), q(x)) `[m, 1]`, p and q as tokens are drawn from them, and the gradient by `logits[m, V]`
    of `scripts.training.RejectionLoss`."""
    kept = labels.logits.topk(min(KEPT, logits.shape[-1])).indices
    passed, descent = acceptance_gradient(logits, kept, labels.p.gather(-1, kept))
    descent.add_(divergence_gradient(logits, kept, labels.plain.gather(-1, kept)), alpha=DIVERGENCE)
    return 1 - passed, descent


class Quality(NamedTuple):
    """How good a head is at GAMMA guesses. acceptance: the share that passes of the guesses tested at each position.
    alpha: that of all. tokens_per_round: with the token that the target adds."""

    acceptance: list[float]
    alpha: float
    tokens_per_round: float


@torch.inference_mode()
def measure(network: Network, output: OutputLayer, texts: Sequence[Batch], autocast: torch.dtype) -> Quality:
    """The quality on texts (batches of one) that the target drew: what decoding would give, up to chance."""
    tested, passed, count = np.zeros(GAMMA), np.zeros(GAMMA), at_a_time(output.weight.device)
    for batch in texts:
        with torch.autocast(batch.tokens.device.type, autocast, autocast != torch.float32):
            hidden = network.chain(batch, GAMMA)[:, 0].float()
        parts = [
            chances(output, *few)
            for few in zip(
                hidden.split(count, 1),
                batch.last[0].split(count),
                batch.sums[0].split(count),
                F.pad(batch.tokens[0, 1:], (0, 1)).split(count),
            )
        ]
        overlap, ratio = (torch.cat(x, 1).cpu().double().numpy() for x in zip(*parts))
        counts = rounds(overlap, ratio, batch.drawn[0].tolist())
        tested, passed = tested + counts[0], passed + counts[1]
    tested = np.maximum(tested, 1e-9)
    return Quality((passed / tested).tolist(), float(passed.sum() / tested.sum()), float(1 + passed.sum() / tested[0]))


def chances(
    output: OutputLayer, hidden: Tensor, last: Tensor, sums: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    """For each step and each of m positions, `[steps, m]`: the chance that a guess drawn there passes, sum_x min(p(x),
    q(x)); and min(1, q(x) / p(x)) of the token x in `following[m]`, which the text has next."""
    p, q = Labels.of(output, last, sums).p, probabilities(output(hidden), SAMPLING)
    place = torch.searchsorted(output.tokens, following).clamp(max=len(output.tokens) - 1)
    known = output.tokens[place] == following
    p_next = p.gather(-1, place[:, None])[:, 0]
    q_next = q.gather(-1, place.expand(len(q), -1)[..., None])[..., 0]
    ratio = torch.where(known & (p_next > 0), q_next / p_next, 0.0).clamp(max=1.0)
    return torch.minimum(p, q).sum(-1), ratio


def rounds(overlap: np.ndarray, ratio: np.ndarray, drawn: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """How many guesses of each position are tested and how many pass, if a text is decoded speculatively, `[steps]`
    each, expected values.

    overlap, ratio: `chances`, `[steps, n]`; row j is for the token after the place it stands at. A guess passes and is
    the token x with probability min(p(x), q(x)). The text's x was drawn from p. So among the decodings that write this
    text, a guess passes with probability min(1, q(x) / p(x)). Followed from the first drawn token on, that gives how
    probable it is that a round begins at each place.
    """
    steps, n = overlap.shape
    begins = np.zeros(n + steps + 2)  # how probable it is that a round begins with the token at this place as its last
    tested, passed = np.zeros(steps), np.zeros(steps)
    for s in range(n - steps - 1):
        if not drawn[s]:
            continue
        if s == 0 or not drawn[s - 1]:
            begins[s] = 1.0
        whole, reached = all(drawn[s + 1 : s + steps + 2]), begins[s]
        for j in range(steps):
            tested[j] += whole * reached
            passed[j] += whole * reached * overlap[j, s + j]
            begins[s + j + 1] += reached * (1 - ratio[j, s + j])
            reached *= ratio[j, s + j]
        begins[s + steps + 1] += reached
    return tested, passed


# ---------------------------------------------------------------------------------------------------------------------
# Training


class Workplace(NamedTuple):
    """What all trainings of a command share: the flags, the parts of `prepare`, the target, the version of its weights,
    and the tokens that end its texts."""

    args: Namespace
    parts: list[dict[str, Tensor]]
    target: CachedModel
    version: str
    ends: frozenset[int]

    @classmethod
    def of(cls, args: Namespace) -> Workplace:
        """Make the texts, then load the target."""
        tokenizer, parts = load_tokenizer(args.folder), prepare(args)
        target = load_model(args.folder, tokenizer, pick_dtype(args.device), args.device)
        target.model.requires_grad_(False)
        return cls(args, parts, target, model_version(args.folder), end_tokens(args.folder, tokenizer))


class Trainer:
    """Trains one network, and keeps what it needs to go on in the folder `out`."""

    def __init__(self, recipe: Recipe, out: Path, place: Workplace) -> None:
        args, parts, target, version, ends = place
        torch.manual_seed(args.seed)
        self.recipe, self.out, self.args, self.version = recipe, out, args, version
        self.device = target.device
        self.autocast = target.dtype if target.dtype != torch.float16 else torch.bfloat16
        tokens = guessed_tokens(parts, target.vocabulary, args.draftVocab, ends)
        self.output = OutputLayer.of(target.model, tokens)
        self.network = new_network(recipe, target, tokens if args.draftVocab else None).to(self.device)
        begin_near_target(self.network, parts[0], self.output.weight.shape[1])
        self.optimizers = optimizers_of(self.network)
        self.held_out, self.parts = list(texts_of(parts[0], self.output, self.device)), parts[1:]
        self.step, self.seconds = 0, 0.0
        self.history: list[dict[str, Any]] = []
        self.losses: list[float] = []

    @property
    def share(self) -> float:
        """How much of the training is done, from 0 to 1."""
        if self.args.steps:
            return self.step / self.args.steps
        return self.seconds / (3600 * self.args.hours)

    def train(self) -> Quality:
        """Train to the end, and return the quality then."""
        self.go_on()
        kept = began = time.monotonic()
        with Bar(f"{self.out.name} is trained", 100, " %") as bar:
            while self.share < 1:
                before = self.share
                self.one_step()
                now = time.monotonic()
                self.seconds, began = self.seconds + now - began, now
                bar.update(int(100 * min(1.0, self.share)) - bar.done)
                if int(before * MEASURED) != int(self.share * MEASURED):
                    self.note()
                    began = time.monotonic()  # Measuring is no part of the training.
                if now - kept > KEEP:
                    self.keep()
                    kept = time.monotonic()
        if not self.history or self.history[-1]["step"] != self.step:
            self.note()
        self.keep()
        last = self.history[-1]
        return Quality(last["acceptance"], last["alpha"], last["tokens_per_round"])

    def one_step(self) -> None:
        """Train on one batch. Which windows it holds depends on the seed and the step alone."""
        length = LENGTHS[self.step % len(LENGTHS)]
        rng = np.random.default_rng(self.args.seed * SEEDS + self.step)
        batch = batch_of(windows(self.parts, length, BATCH // length, rng), self.output.weight.shape[1], self.device)
        finishing = self.share >= 1 - self.recipe.finish
        steps = GAMMA if self.recipe.kind == "medusa" else self.recipe.unroll
        with torch.autocast(self.device.type, self.autocast, self.autocast != torch.float32):
            hidden = self.network.chain(batch, steps)
        weights = chain_weights(batch.text, steps)
        weights *= (STEP_WEIGHT ** torch.arange(steps, device=weights.device))[:, None, None]
        weights /= weights.sum()
        loss = ChainLoss.apply(
            hidden.float().flatten(1, 2), batch.last.flatten(0, 1), batch.sums.flatten(0, 1), weights.flatten(1),
            self.output, finishing,
        )  # fmt: skip
        self.losses = [*self.losses[-99:], loss.item()]
        if self.recipe.feature_loss and not finishing:
            away = F.smooth_l1_loss(hidden.float(), batch.last.float().expand_as(hidden), reduction="none").mean(-1)
            loss = loss + FEATURE * (away * weights).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters_of_training().values(), CLIP)
        factor = min((self.share + 1e-4) / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * min(1.0, self.share)))
        for optimizer, rate in zip(self.optimizers, (MUON_RATE, ADAM_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1

    def note(self) -> None:
        """Measure, and add a line to training.jsonl."""
        quality = measure(self.network, self.output, self.held_out, self.autocast)
        tokens = self.step * BATCH
        line = {
            "step": self.step,
            "tokens": tokens,
            "seconds": round(self.seconds, 1),
            "tokens_per_second": round(tokens / max(self.seconds, 1e-3)),
            "memory": psutil.Process().memory_info().rss,
            "loss": float(np.mean(self.losses)),
            **quality._asdict(),
        }
        self.history.append(line)
        positions = " ".join(f"{a:.3f}" for a in quality.acceptance)
        print(
            f"{self.out.name}: {self.seconds / 60:.1f} min, {tokens:,} tokens ({line['tokens_per_second']:,}/s, "
            f"{gigabytes(line['memory'])}), loss {line['loss']:.4f}, acceptance by position {positions}, of all "
            f"{quality.alpha:.3f}; {quality.tokens_per_round:.3f} tokens a round",
            file=sys.stderr, flush=True,
        )  # fmt: skip
        self.keep()

    def keep(self) -> None:
        """Write a checkpoint, the lines of training.jsonl and, if it is one, the head."""
        self.out.mkdir(parents=True, exist_ok=True)
        state = {
            "recipe": asdict(self.recipe),
            "tokens": self.output.tokens,
            "weights": {name: p.detach() for name, p in self.network.parameters_of_training().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "losses": self.losses,
        }
        torch.save(state, self.out / ".training.pt")
        os.replace(self.out / ".training.pt", self.out / "training.pt")
        replace_file(self.out / "training.jsonl", "".join(json.dumps(line) + "\n" for line in self.history))
        if isinstance(self.network, HeadNetwork):
            save_head(self.network, self.out, self.version, self.record())

    def record(self) -> dict[str, Any]:
        """What a head's config.json says of its training."""
        return {"recipe": asdict(self.recipe), "seed": self.args.seed, "measured": self.history[-1:]}

    def go_on(self) -> None:
        """Take the checkpoint up, if there is one. Raises UserError if it is of another training."""
        file = self.out / "training.pt"
        if not file.exists():
            return
        try:
            state = torch.load(file, map_location=self.device, weights_only=True)
        except Exception as error:  # A broken file can raise nearly anything.
            raise UserError(f"{file} cannot be read ({one_line(error)}); remove it to train anew") from None
        if state["recipe"] != asdict(self.recipe) or not torch.equal(state["tokens"], self.output.tokens):
            raise UserError(f"{self.out} holds a training with other flags; name another OUT, or remove {file}")
        with torch.no_grad():
            for name, parameter in self.network.parameters_of_training().items():
                parameter.copy_(state["weights"][name])
        for optimizer, kept in zip(self.optimizers, state["optimizers"]):
            optimizer.load_state_dict(kept)
        self.step, self.seconds, self.history = state["step"], state["seconds"], state["history"]
        self.losses = state["losses"]


def guessed_tokens(
    parts: Sequence[dict[str, Tensor]], vocabulary: int, count: int | None, ends: frozenset[int]
) -> Tensor:
    """The tokens that the head guesses, int64 `[count]`, ascending: the most frequent ones of the texts to train on,
    with those that end a text. All if `count` is None."""
    if count is None:
        return torch.arange(vocabulary)
    if count > vocabulary:
        raise UserError(f"--draftVocab {count} is more than the {vocabulary} tokens there are")
    counts = sum(torch.bincount(part["tokens"].long(), minlength=vocabulary) for part in parts[1:])
    counts[[token for token in ends if token < vocabulary]] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def begin_near_target(network: Network, part: dict[str, Tensor], d: int) -> None:
    """Give the head's last norm the size that the target's last hidden states have in each place."""
    if isinstance(network, HeadNetwork):
        with torch.no_grad():
            network.model.norm.weight.copy_(part["states"][:, -d:].float().square().mean(0).sqrt())


def optimizers_of(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for all else, as in `scripts.training`."""
    trained = network.parameters_of_training().values()
    matrices, others = ([p for p in trained if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def windows(
    parts: Sequence[dict[str, Tensor]], length: int, count: int, rng: np.random.Generator
) -> list[tuple[dict[str, Tensor], int, int]]:
    """`count` windows of `length` tokens: (part, first token, length). Each place is as probable as any other."""
    places = np.array([max(0, len(part["tokens"]) - length + 1) for part in parts])
    if not places.sum():
        raise UserError(f"the texts have fewer than {length} tokens; raise --written")
    chosen = []
    for place in rng.integers(places.sum(), size=count):
        index = int(np.searchsorted(places.cumsum(), place, side="right"))
        chosen.append((parts[index], int(place - places[:index].sum()), length))
    return chosen


def texts_of(part: dict[str, Tensor], output: OutputLayer, device: torch.device) -> Iterator[Batch]:
    """Each text of a part, as a batch of its own."""
    lengths = torch.bincount(part["text"])
    for start, length in zip((lengths.cumsum(0) - lengths).tolist(), lengths.tolist()):
        yield batch_of([(part, start, length)], output.weight.shape[1], device)


# ---------------------------------------------------------------------------------------------------------------------
# The command

# The variants of an ablation: the whole recipe, and what it is without each of its parts. The last but one is EAGLE's.
VARIANTS = {
    "head": Recipe(),
    "last-layer": Recipe(layers="last"),
    "one-step": Recipe(unroll=1),
    "no-finish": Recipe(finish=0.0),
    "eagle-1": Recipe(layers="last", unroll=1, feature_loss=True, finish=0.0),
    "medusa": Recipe(kind="medusa"),
}


def parse(argv: Sequence[str] | None) -> Namespace:
    """The flags, checked. Raises UserError for what cannot be used."""
    parser = script_parser("python -m scripts.trainHead", __doc__)
    parser.add_argument("target", type=text, help="the model whose head is trained: a folder of models/, or a path")
    parser.add_argument("out", type=path, metavar="OUT", help="the folder of the head")
    add_flags(parser)
    args = parser.parse_args(argv)
    args.folder = find_model(args.target)
    args.device = pick_device(args.device)
    args.data = args.data or args.out / "texts"
    if args.prompts and find_prompts(args.prompts).resolve() == find_prompts("sample").resolve():
        raise UserError(f"--prompts {args.prompts} are what heads are measured on; train on others")
    if args.texts:
        for name in args.texts:
            if not os.path.exists(name.rpartition(":")[0] if name.rpartition(":")[2].isdigit() else name):
                raise UserError(f"--texts {name}: there is no such file or folder")
    if args.kind == "medusa" and (args.layers != "three" or args.unroll != GAMMA or args.featureLoss):
        raise UserError("--layers, --unroll and --featureLoss are for --kind head; leave them out")
    return args


def add_flags(parser: Parser) -> None:
    parser.add_argument("--texts", nargs="+", type=text, help="texts whose passages the target continues (the samples)")
    parser.add_argument("--prompts", type=text, help="a JSONL file of users' turns, for a chat model (it writes them)")
    parser.add_argument("--written", type=whole(1), default=WRITTEN, help=f"tokens the target writes ({WRITTEN:,})")
    parser.add_argument("--data", type=path, help="where the texts and their hidden states are kept (OUT/texts)")
    parser.add_argument("--hours", type=number(0.001, 10**4), default=0.5, help="of training (0.5)")
    parser.add_argument("--steps", type=whole(1), help=f"of training, of {BATCH} tokens each, instead of --hours")
    parser.add_argument("--draftVocab", type=whole(1), help="guess only so many frequent tokens (all)")
    parser.add_argument("--kind", choices=["head", "medusa"], default="head", help="what is trained (head)")
    parser.add_argument("--layers", choices=list(LAYERS), default="three", help="of the target, for features (three)")
    parser.add_argument("--unroll", type=whole(1, 8), default=GAMMA, help=f"steps of training-time test ({GAMMA})")
    parser.add_argument("--featureLoss", action="store_true", help="also learn the target's last hidden states")
    parser.add_argument("--ablation", action="store_true", help="train each variant, so long each, and compare them")
    parser.add_argument("--device", type=text, help="(cuda if there is one)")
    parser.add_argument("--seed", type=whole(0, 10**9), default=0)


def run(args: Namespace) -> None:
    """Make the texts, then train the head, or the variants of the ablation."""
    place = Workplace.of(args)
    if not args.ablation:
        recipe = Recipe(args.kind, args.layers, args.unroll, args.featureLoss)
        quality = Trainer(recipe, args.out, place).train()
        print(f"{args.out}: {described(quality)}")
        return
    results = {}
    for name, recipe in VARIANTS.items():
        trainer = Trainer(recipe, args.out / name, place)
        quality = trainer.train()
        results[name] = {"recipe": asdict(recipe), "tokens": trainer.step * BATCH, **quality._asdict()}
        print(f"{name:>12}: {described(quality)}", flush=True)
    record = {"target": place.version, "seed": args.seed, "hours": args.hours, "steps": args.steps, "variants": results}
    replace_file(args.out / "ablation.json", json.dumps(record, indent=1) + "\n")


def described(quality: Quality) -> str:
    """A quality on one line."""
    positions = ", ".join(f"{share:.3f}" for share in quality.acceptance)
    return (
        f"{quality.alpha:.3f} of the tested guesses pass ({positions} by position); at gamma {GAMMA} that is "
        f"{quality.tokens_per_round:.2f} tokens a round"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return as_command(
        "trainHead", lambda: run(parse(argv)), "The same command goes on where this one stopped.", "lower --written"
    )


if __name__ == "__main__":
    sys.exit(main())
