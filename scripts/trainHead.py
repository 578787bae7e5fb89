"""Train a head that guesses from a target's features (EAGLE-3, Li et al., arXiv 2503.01840), or Medusa's heads.

    python -m scripts.trainHead bundled-target models/my-head --texts books/ wiki.valid.tokens:8 --hours 0.5
    python -m scripts.trainHead SmolLM2-135M-Instruct models/my-head --texts books/ --hours 4 --draftVocab 8192

The target first writes the texts to train on, as a user would let it: it continues passages of --texts. A chat model
also writes conversations: both the user's turns and the answers (Magpie, Xu et al., arXiv 2406.08464). Then it reads
the texts, and the hidden states that the head needs are kept on disk. Last, the head is trained on them.

Everything is kept in OUT. If the script is stopped, the same command goes on where it stopped. The head in OUT can be
used as soon as there is one. At the end OUT/head-TARGET.json holds the acceptance on text that is not trained on, over
the tokens trained; with --ablation, ablation-TARGET.json that of each variant. `python -m scripts.keepRecord
head-TARGET --from OUT` keeps it for the documentation.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.cachedModel import CachedModel
from engine.head import HeadNetwork, save_head
from experiments.runRecord import model_record, origin
from inputs.commandLine import Parser, as_command, number, one_line, path, script_parser, text, whole
from inputs.devices import pick_device, pick_dtype
from inputs.files import gigabytes, replace_file
from inputs.models import find_model, load_model, model_version
from inputs.progress import Bar
from inputs.prompts import find_prompts
from inputs.tokenizers import end_tokens, load_tokenizer
from scripts.headLosses import ChainLoss, Quality, measure
from scripts.headNetworks import (
    GAMMA,
    Batch,
    Network,
    Recipe,
    TrainedHead,
    batch_of,
    begin_near_target,
    chain_weights,
    new_network,
)
from scripts.headStates import LAYERS, WRITTEN, OutputLayer, prepare
from scripts.training import WARM_UP
from utils import UserError

BATCH = 1024  # tokens in a step
LENGTHS = (256,) * 7 + (1024,)  # row lengths of the steps, in turn: long rows teach to look far back, and cost more
STEP_WEIGHT = 0.8  # weight of a step's loss against that of the step before it, as in EAGLE-3
FEATURE = 1.0  # weight of the feature loss beside the cross-entropy, with --featureLoss
MUON_RATE, ADAM_RATE = 0.02, 4e-3  # highest learning rates, for matrices and for all else
WEIGHT_DECAY = 0.1  # of matrices: with few texts, a head otherwise learns them by heart
FITTED = 4  # one text in so many of a part is read for the beginning of a head
CLIP = 1.0  # the longest gradient
KEEP = 120.0  # seconds between two checkpoints
MEASURED = 20  # measurements in a training
SEEDS = 1 << 20  # a step's windows are drawn from the seed `--seed * SEEDS + step`


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
        if isinstance(self.network, TrainedHead):
            begin_near_target(self.network, target, list(texts_of(parts[1], self.output, self.device))[::FITTED])
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
        steps = self.recipe.steps(self.share)
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
        """Measure on the texts that are held out."""
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
        """Write a checkpoint and, if it is one, the head."""
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


def optimizers_of(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for all else, as in `scripts.training`."""
    trained = network.parameters_of_training().values()
    matrices, others = ([p for p in trained if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="original"),
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


# The variants of an ablation: the whole recipe, and the same with one part changed. The last but one is EAGLE's.
VARIANTS = {
    "head": Recipe(),
    "last-layer": Recipe(layers="last"),
    "one-step": Recipe(unroll=1),
    "no-opening": Recipe(opening=0.0),
    "feature-loss": Recipe(feature_loss=True),
    "no-finish": Recipe(finish=0.0),
    "eagle-1": Recipe(layers="last", unroll=1, feature_loss=True, finish=0.0),
    "medusa": Recipe(kind="medusa"),
}


def parse(argv: Sequence[str]) -> Namespace:
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


def run(args: Namespace, argv: Sequence[str]) -> None:
    """Make the texts, then train the head, or the variants of the ablation."""
    place = Workplace.of(args)
    recipe = Recipe(args.kind, args.layers, args.unroll, args.featureLoss)
    recipes = {args.out / name: variant for name, variant in VARIANTS.items()} if args.ablation else {args.out: recipe}
    trained = {}
    for out, recipe in recipes.items():
        name = out.name if args.ablation else recipe.kind
        trained[name] = trainer = Trainer(recipe, out, place)
        print(f"{out.name:>12}: {described(trainer.train())}", flush=True)
    name = f"{'ablation' if args.ablation else 'head'}-{args.folder.name}.json"
    replace_file(args.out / name, json.dumps(record_of(place, trained, argv), ensure_ascii=False) + "\n")


def record_of(place: Workplace, trained: Mapping[str, Trainer], argv: Sequence[str]) -> dict[str, Any]:
    """What the command line `argv` did: on which texts it trained each of its networks, how, for how long, and how good
    they were meanwhile. Of a folder or a file the record has the name alone."""
    args = place.args
    models = {"target": model_record(args.folder.name, place.version, place.target)}
    written = {
        "tokens": sum(len(part["tokens"]) for part in place.parts),
        "seconds": sum(float(part["seconds"]) for part in place.parts),
    }
    variants = {
        name: {
            "recipe": asdict(trainer.recipe),
            "parameters": sum(p.numel() for p in trainer.network.parameters_of_training().values()),
            "history": trainer.history,
        }
        for name, trainer in trained.items()
    }
    words = [Path(word).name for word in argv]
    flags = {
        flag: Path(x).name if isinstance(x, str | Path) else x for flag, x in vars(args).items() if flag != "texts"
    }
    record = {"program": "-m scripts.trainHead", **origin(words, flags, args.device, models)}
    return record | {"dtype": pick_dtype(args.device), "written": written, "variants": variants}


def described(quality: Quality) -> str:
    """A quality on one line."""
    positions = ", ".join(f"{share:.3f}" for share in quality.acceptance)
    return (
        f"{quality.alpha:.3f} of the tested guesses pass ({positions} by position); at gamma {GAMMA} that is "
        f"{quality.tokens_per_round:.2f} tokens a round"
    )


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    return as_command(
        "trainHead",
        lambda: run(parse(words), words),
        "The same command goes on where this one stopped.",
        "lower --written",
    )


if __name__ == "__main__":
    sys.exit(main())
