"""Train a head that guesses from a target's features (EAGLE-3, Li et al., arXiv 2503.01840), or Medusa's heads.

    python -m scripts.trainHead bundled-target models/my-head --texts books/ wiki.valid.tokens:8 --hours 0.5
    python -m scripts.trainHead SmolLM2-135M-Instruct models/my-head --texts books/ --hours 4 --draftVocab 8192

The target first writes the texts to train on, as a user would let it: it continues passages of --texts. A chat model
also writes conversations: both the user's turns and the answers (Magpie, Xu et al., arXiv 2406.08464). Then it reads
the texts, and the hidden states that the head needs are kept on disk. Last, the head is trained on them.

Everything is kept in OUT. If the script is stopped, the same command continues where it stopped. The head in OUT can be
used as soon as it exists. At the end OUT/head-TARGET.json holds the acceptance on text that is not trained on, over
the tokens trained; with --ablation, ablation-TARGET.json that of each variant. `python -m scripts.keepRecord
head-TARGET --from OUT` keeps it for the documentation.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cachedModel import CachedModel
from engine.head import HeadNetwork, save_head
from engine.sharedWeights import RestrictedHead
from experiments.runRecord import model_record, origin
from inputs.commandLine import as_command, number, path, script_parser, text, whole
from inputs.devices import pick_device, pick_dtype
from inputs.files import replace_file
from inputs.models import end_tokens, find_model, load_model, load_tokenizer, model_version
from inputs.texts import find_prompts
from scripts.headNetworks import LAYERS, TextBatch, TrainedHead, batch_of, begin_near_target, chain_weights, new_network
from scripts.headTexts import WRITTEN, prepare_parts
from scripts.losses import SAMPLING, at_a_time, chain_loss, distributions, output_logits
from scripts.trainBundled import read_documents
from scripts.training import GAMMA, Recipe, Trainer
from utils import UserError, probabilities

RECIPE = Recipe(
    batch=1024,
    lengths=(256,) * 7 + (1024,),  # Long rows teach to look far back, and cost more.
    adam_rate=4e-3,
    head_start=1e-4,
    weight_decay=0.1,  # With few texts, a head otherwise learns them by heart.
    clip=1.0,
    fused=False,
)
VARIANTS: dict[str, dict[str, Any]] = {  # of an ablation: what differs from RECIPE; eagle-1 is the first EAGLE's
    "head": {},
    "last-layer": {"layers": "last"},
    "one-step": {"unroll": 1},
    "no-opening": {"opening": 0.0},
    "feature-loss": {"feature_loss": True},
    "no-finish": {"finish": 0.0},
    "eagle-1": {"layers": "last", "unroll": 1, "feature_loss": True, "finish": 0.0},
    "medusa": {"kind": "medusa"},
}
RECORDED = "kind", "layers", "unroll", "feature_loss", "opening", "finish"  # what files say of a recipe
STEP_WEIGHT = 0.8  # weight of a step's loss against that of the step before it, as in EAGLE-3
Parts = list[dict[str, Tensor]]  # of `prepare_parts`; the first is held out
FITTED = 4  # one text in this many of a part is read for the beginning of a head
SEEDS = 1 << 20  # a step's windows are drawn from the seed `--seed * SEEDS + step`


class HeadTrainer(Trainer):
    """Trains a head, or Medusa's heads, in the folder `out`. output: the target's output layer, for the tokens that are
    guessed."""

    def __init__(
        self, recipe: Recipe, out: Path, args: Namespace, parts: Parts, target: CachedModel, output: RestrictedHead
    ) -> None:
        self.out, self.args, self.parts, self.output = out, args, parts[1:], output
        self.version = model_version(args.folder)
        self.autocast = target.dtype if target.dtype != torch.float16 else torch.bfloat16
        torch.manual_seed(args.seed)
        network = new_network(recipe, target, output.tokens if args.draftVocab else None).to(target.device)
        if isinstance(network, TrainedHead):
            begin_near_target(network, target, list(self.texts_of(parts[1]))[::FITTED])
        self.held_out = list(self.texts_of(parts[0]))
        out.mkdir(parents=True, exist_ok=True)
        self.recorded = {name: getattr(recipe, name) for name in RECORDED}
        self.checkpoint, self.about = out / "training.pt", {"recipe": self.recorded, "tokens": output.tokens}
        super().__init__(recipe, network, out.name)

    def texts_of(self, part: dict[str, Tensor]) -> Iterator[TextBatch]:
        """Each text of a part, as a batch of its own."""
        lengths = torch.bincount(part["text"])
        for start, length in zip((lengths.cumsum(0) - lengths).tolist(), lengths.tolist()):
            yield batch_of([(part, start, length)], self.output.weight)

    def batch(self, rows: int, length: int) -> TextBatch:
        """Windows of the texts. Which ones depends on the seed and the step alone."""
        rng = np.random.default_rng(self.args.seed * SEEDS + self.step)
        return batch_of(random_windows(self.parts, length, rows, rng), self.output.weight)

    def loss(self, batch: TextBatch) -> Tensor:
        """The cross-entropy to the target's distribution in each step of a chain, and in the end the share of guesses
        that the target rejects. The feature loss is not in its value."""
        recipe, finishing = self.recipe, self.share >= 1 - self.recipe.finish
        opening = recipe.kind == "head" and self.share < recipe.opening
        steps = 1 if opening else recipe.unroll
        with torch.autocast(self.device.type, self.autocast, self.autocast != torch.float32):
            hidden = self.network.chain(batch, steps).float()
        weights = chain_weights(batch.text, steps)
        weights *= (STEP_WEIGHT ** torch.arange(steps, device=weights.device))[:, None, None]
        weights /= weights.sum()
        last, sums = batch.last.flatten(0, 1), batch.sums.flatten(0, 1)
        loss = chain_loss(hidden.flatten(1, 2), last, sums, weights.flatten(1), self.output, finishing)
        if recipe.feature_loss and not finishing:
            away = F.smooth_l1_loss(hidden, batch.last.float().expand_as(hidden), reduction="none").mean(-1)
            feature_loss = (away * weights).sum()
            loss = loss + (feature_loss - feature_loss.detach())
        return loss

    def measure(self) -> dict[str, Any]:
        return acceptance_on(self.network, self.output, self.held_out, self.autocast)

    def save(self) -> None:
        """Write the checkpoint and, if it is one, the head."""
        super().save()
        if isinstance(self.network, HeadNetwork):
            record = {"recipe": self.recorded, "seed": self.args.seed, "measured": self.history[-1:]}
            save_head(self.network, self.out, self.version, record)


def guessed_tokens(parts: Parts, vocabulary: int, count: int, ends: Collection[int]) -> Tensor:
    """The tokens that the head guesses, int64 `[count]`, ascending: the most frequent ones of the texts to train on,
    with those that end a text."""
    if count > vocabulary:
        raise UserError(f"--draftVocab {count} exceeds the vocabulary of {vocabulary} tokens")
    counts = sum(torch.bincount(part["tokens"].long(), minlength=vocabulary) for part in parts[1:])
    counts[[token for token in ends if token < vocabulary]] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def random_windows(
    parts: Parts, length: int, count: int, rng: np.random.Generator
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


@torch.inference_mode()
def acceptance_on(
    network: nn.Module, output: RestrictedHead, texts: Sequence[TextBatch], autocast: torch.dtype
) -> dict[str, Any]:
    """How good a network is at GAMMA guesses, on texts (batches of one) that the target drew: what decoding would give,
    up to chance. acceptance: the share that passes of the guesses tested at each position. alpha: that of all.
    tokens_per_round: with the token that the target adds."""
    tested, passed, count = np.zeros(GAMMA), np.zeros(GAMMA), at_a_time(output.weight.device)
    for batch in texts:
        with torch.autocast(batch.tokens.device.type, autocast, autocast != torch.float32):
            hidden = network.chain(batch, GAMMA)[:, 0].float()
        following = F.pad(batch.tokens[0, 1:], (0, 1))
        parts = zip(hidden.split(count, 1), *(x.split(count) for x in (batch.last[0], batch.sums[0], following)))
        chances = zip(*(passing_chances(output, *part) for part in parts))
        overlap, ratio = (torch.cat(x, 1).cpu().double().numpy() for x in chances)
        counts = expected_counts(overlap, ratio, batch.drawn[0].tolist())
        tested, passed = tested + counts[0], passed + counts[1]
    tested = np.maximum(tested, 1e-9)
    alpha, tokens_per_round = float(passed.sum() / tested.sum()), float(1 + passed.sum() / tested[0])
    return {"acceptance": (passed / tested).tolist(), "alpha": alpha, "tokens_per_round": tokens_per_round}


def passing_chances(
    output: RestrictedHead, hidden: Tensor, last: Tensor, sums: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    """For each step and each of m positions, `[steps, m]`: the chance that a guess drawn there passes, sum_x min(p(x),
    q(x)); and min(1, q(x) / p(x)) of the token x in `following[m]`, which the text has next."""
    _, p = distributions(output_logits(output, last), sums)
    q = probabilities(output_logits(output, hidden), SAMPLING)
    place = torch.searchsorted(output.tokens, following).clamp(max=len(output.tokens) - 1)
    known = output.tokens[place] == following
    p_next = p.gather(-1, place[:, None])[:, 0]
    q_next = q.gather(-1, place.expand(len(q), -1)[..., None])[..., 0]
    ratio = torch.where(known & (p_next > 0), q_next / p_next, 0.0).clamp(max=1.0)
    return torch.minimum(p, q).sum(-1), ratio


def expected_counts(overlap: np.ndarray, ratio: np.ndarray, drawn: Sequence[bool]) -> tuple[np.ndarray, np.ndarray]:
    """How many guesses of each position are tested and how many pass, if a text is decoded speculatively, `[steps]`
    each, expected values.

    overlap, ratio: `passing_chances`, `[steps, n]`; row j is for the token after the place it stands at. A guess passes
    and is the token x with probability min(p(x), q(x)). The text's x was drawn from p. So among the decodings that
    write this text, a guess passes with probability min(1, q(x) / p(x)). Followed from the first drawn token on, that
    gives how probable it is that a round begins at each place.
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


def parse(argv: Sequence[str]) -> Namespace:
    """The flags, checked. Raises UserError for invalid ones."""
    parser = script_parser("python -m scripts.trainHead", __doc__)
    parser.add_argument("target", type=text, help="the model whose head is trained: a folder of models/, or a path")
    parser.add_argument("out", type=path, metavar="OUT", help="the folder of the head")
    parser.add_argument("--texts", nargs="+", type=text, help="texts whose passages the target continues (the samples)")
    parser.add_argument("--prompts", type=text, help="a JSONL file of users' turns, for a chat model (it writes them)")
    parser.add_argument("--written", type=whole(1), default=WRITTEN, help=f"tokens the target writes ({WRITTEN:,})")
    parser.add_argument("--data", type=path, help="where the texts and their hidden states are kept (OUT/texts)")
    parser.add_argument("--hours", type=number(0.001, 10**4), default=0.5, help="of training (0.5)")
    parser.add_argument(
        "--steps", type=whole(1), help=f"of training, of {RECIPE.batch} tokens each, instead of --hours"
    )
    parser.add_argument("--draftVocab", type=whole(1), help="guess only this number of frequent tokens (all)")
    parser.add_argument("--kind", choices=["head", "medusa"], default="head", help="the kind of network (head)")
    parser.add_argument("--layers", choices=list(LAYERS), default="three", help="of the target, for features (three)")
    parser.add_argument("--unroll", type=whole(1, 8), default=GAMMA, help=f"steps of training-time test ({GAMMA})")
    parser.add_argument("--featureLoss", action="store_true", help="also learn the target's last hidden states")
    parser.add_argument("--ablation", action="store_true", help="train each variant for that time, and compare them")
    parser.add_argument("--device", type=text, help="(cuda if available)")
    parser.add_argument("--seed", type=whole(0, 10**9), default=0)
    args = parser.parse_args(argv)
    args.folder = find_model(args.target)
    args.device = pick_device(args.device)
    args.data = args.data or args.out / "texts"
    if args.prompts and find_prompts(args.prompts).resolve() == find_prompts("sample").resolve():
        raise UserError(f"--prompts {args.prompts} are reserved for measuring heads; train on other prompts")
    for name in args.texts or ():
        read_documents(name)  # Raises UserError if it cannot be read.
    if args.kind == "medusa" and (args.layers != "three" or args.unroll != GAMMA or args.featureLoss):
        raise UserError("--layers, --unroll and --featureLoss are for --kind head; leave them out")
    return args


def run(args: Namespace, argv: Sequence[str]) -> None:
    """Write the texts, then train the head, or the variants of the ablation, and write the record."""
    tokenizer = load_tokenizer(args.folder)
    target = load_model(args.folder, tokenizer, pick_dtype(args.device), args.device)
    target.model.requires_grad_(False)
    parts, tokens = prepare_parts(args, target), torch.arange(target.vocabulary)
    if args.draftVocab:
        tokens = guessed_tokens(parts, target.vocabulary, args.draftVocab, end_tokens(args.folder, tokenizer))
    output = RestrictedHead(target.model.get_output_embeddings(), tokens.to(target.device))
    flags = {"kind": args.kind, "layers": args.layers, "unroll": args.unroll, "feature_loss": args.featureLoss}
    end = {"tokens": args.steps * RECIPE.batch} if args.steps else {"seconds": 3600 * args.hours}
    variants = {}
    for name, changes in (VARIANTS if args.ablation else {args.kind: flags}).items():
        out = args.out / name if args.ablation else args.out
        trainer = HeadTrainer(replace(RECIPE, **end, **changes), out, args, parts, target, output)
        trainer.train()
        parameters, last = sum(p.numel() for p in trainer.weights.values()), trainer.history[-1]
        variants[name] = {"recipe": trainer.recorded, "parameters": parameters, "history": trainer.history}
        positions = ", ".join(f"{share:.3f}" for share in last["acceptance"])
        print(
            f"{out.name:>12}: {last['alpha']:.3f} of the tested guesses pass ({positions} by position); at gamma "
            f"{GAMMA} that is {last['tokens_per_round']:.2f} tokens a round",
            flush=True,
        )
    # Of a folder or a file the record has the name alone.
    flags = {
        name: Path(x).name if isinstance(x, str | Path) else x for name, x in vars(args).items() if name != "texts"
    }
    models = {"target": model_record(args.folder.name, model_version(args.folder), target)}
    record = {
        "program": "-m scripts.trainHead",
        **origin([Path(word).name for word in argv], flags, args.device, models),
        "dtype": pick_dtype(args.device),
        "written": {
            "tokens": sum(len(part["tokens"]) for part in parts),
            "seconds": sum(float(part["seconds"]) for part in parts),
        },
        "variants": variants,
    }
    name = f"{'ablation' if args.ablation else 'head'}-{args.folder.name}.json"
    replace_file(args.out / name, json.dumps(record, ensure_ascii=False) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return as_command(
        "trainHead",
        lambda: run(parse(words), words),
        "The same command continues where this one stopped.",
        "lower --written",
    )


if __name__ == "__main__":
    sys.exit(main())
