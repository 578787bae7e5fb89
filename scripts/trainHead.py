"""Train a head that guesses from a target's features (EAGLE-3, Li et al., arXiv 2503.01840), or one to compare it with.

    python -m scripts.trainHead bundled-target models/my-head --texts books/ wiki.valid.tokens:8 --hours 0.5
    python -m scripts.trainHead SmolLM2-135M-Instruct models/my-head --texts books/ --hours 4 --draftVocab 8192
    python -m scripts.trainHead bundled-target models/my-heads --texts books/ --recipe medusa

The target writes the texts to train on and reads them (scripts/headTexts.py). All is kept in OUT, and the same command
continues where one stopped. OUT/head-TARGET.json has the acceptance on text that is not trained on, over the tokens
trained. `python -m scripts.keepRecord head-TARGET --from OUT` keeps it for the documentation.
"""

import json
import math
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, apply_rotary_pos_emb

from engine.cachedModel import CachedModel
from engine.head import CONFIG, HeadNetwork, save_head
from engine.sharedWeights import RestrictedHead
from experiments.runRecord import model_record, origin
from inputs.commandLine import as_script, number, path, script_parser, text, whole
from inputs.devices import pick_device, pick_dtype
from inputs.files import replace_file
from inputs.models import end_tokens, find_model, load_model, load_tokenizer, model_version
from scripts import headTexts
from scripts.headTexts import Part, TextBatch
from scripts.keepRecord import last_name
from scripts.medusa import MedusaHeads
from scripts.training import GAMMA, Pair, Recipe, Trainer, chain_loss
from utils import UserError

# Long rows teach to look far back, and cost more. Without weight decay, a head learns few texts by heart.
RECIPE = Recipe(batch=1024, lengths=(256,) * 7 + (1024,), adam_rate=4e-3, weight_decay=0.1)
RECIPES: dict[str, dict[str, Any]] = {  # {--recipe: what differs from RECIPE}
    "eagle-3": {},
    "eagle-1": {"opening": 1.0, "finish": 0.0},  # Li et al., arXiv 2401.15077: see `head_trainer`
    "medusa": {"opening": 0.0, "finish": 0.0},
}
CLASSIFICATION = 0.1  # weight of the cross-entropy beside the loss on features, in EAGLE-1
NOISE = 0.1  # of a feature in EAGLE-1's training: uniform, up to this, so that it bears the errors of its own states
CHECKPOINT = "training.pt"
TEXTS = "texts", "passages"  # of the flags: not in the record
STEP_WEIGHT = 0.8  # weight of a step's loss against that of the step before it, as in EAGLE-3
FITTED = 4  # one text in this many of a part is read for the beginning of a head
MLP = 4  # width of the MLP, as a multiple of the head's, where it is not that of the target's last layer
RIDGE = 1e-3  # of the mean square of what is read, added in the fit of a head's beginning

# A head guesses GAMMA tokens in a row. `chain(batch, steps)` gives its last hidden states, from which the output layer
# guesses, in each step of a chain: `[steps, B, n, d]`. In step j, that at position t is for the j-th guess after the
# true features of the tokens up to t - j. What is guessed is the token t + 1; the tokens guessed before it are those of
# the text. So the first j - 1 positions of a text have no step j (`chain_weights`).


def chain_weights(text: Tensor, steps: int) -> Tensor:
    """1.0 where a chain of j steps ends in a text at the j-th of them, else 0.0, `[steps, B, n]`: not where it began
    before the text, or before the window."""
    earlier = [F.pad(text, (j, 0), value=-1)[:, : text.shape[1]] for j in range(steps)]
    return torch.stack([(before == text).float() for before in earlier])


def shifted(x: Tensor, by: int) -> Tensor:
    """`x[..., n, d]` with row t - by at place t, and zeros before: `shifted(x, 1)` is what stood one token before."""
    return F.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :] if by else x


class TrainedHead(HeadNetwork):
    """`HeadNetwork` with the training-time test of EAGLE-3: a chain whose first step reads true features. Step j reads
    at position t the hidden state that step j - 1 gave at t - 1."""

    def chain(self, batch: TextBatch, steps: int) -> Tensor:
        layer, features = self.model.layers[0], self.features_before(batch)
        angles = self.model.rotary_emb(features, torch.arange(features.shape[1], device=features.device)[None])
        hidden, cache = [], list[Pair]()
        for _ in range(steps):
            x = self.join(self.joined(batch.tokens, features))
            x = x + chain_attention(layer.self_attn, layer.input_layernorm(x), angles, batch.text, cache)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            hidden.append(self.model.norm(x))
            features = shifted(hidden[-1], 1)
        return torch.stack(hidden)

    save = save_head

    def features_before(self, batch: TextBatch) -> Tensor:
        """The true feature before each token, `[B, n, d]`."""
        return self.fuse(batch.before[..., -self.fuse.in_features :].float())


def chain_attention(layer: nn.Module, x: Tensor, angles: Pair, text: Tensor, cache: list[Pair]) -> Tensor:
    """The attention of one step j over `x[B, n, d]`. cache: keys and values of the steps before, each `[B, heads, n,
    width]`; its own are added. text: int32 `[B, n]`; a token sees its own text alone.

    What the query at position t sees is what is in the KV cache in decoding, at the j-th guess:
    - the keys of step 1 up to position t - j + 1, the last token before whose place the true feature is known,
    - the key of step i at position t - j + i, for i = 2 ... j: one of each earlier guess, and its own.
    """
    n, heads = x.shape[1], (*x.shape[:2], -1, layer.head_dim)
    q, k, v = (project(x).view(heads).transpose(1, 2) for project in (layer.q_proj, layer.k_proj, layer.v_proj))
    q, k = apply_rotary_pos_emb(q, k, *angles)
    groups = q.shape[1] // k.shape[1]
    cache.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
    j, (first_keys, first_values) = len(cache), cache[0]
    visible = (text[:, :, None] == text[:, None]) & torch.ones(n, n, dtype=torch.bool, device=x.device).tril(1 - j)
    later = [[shifted(y, j - i) for y in cache[i - 1]] for i in range(2, j + 1)]  # keys and values of steps 2 ... j
    scores = [(q @ first_keys.mT).masked_fill(~visible[:, None], -math.inf)]  # [B, heads, n, n]
    scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in later]  # [B, heads, n, 1]
    weights = (torch.cat(scores, -1).float() * layer.scaling).softmax(-1).to(v.dtype)
    seen = weights[..., :n] @ first_values
    for i, (_, values) in enumerate(later):
        seen = seen + weights[..., n + i, None] * values
    return layer.o_proj(seen.transpose(1, 2).flatten(2))


def new_network(target: CachedModel, tokens: Tensor | None, kind: str = "eagle-3") -> TrainedHead:
    """An untrained head. tokens: those that the output layer is cut to, or None. kind: of RECIPES."""
    of_target = target.model.config.get_text_config()
    vocabulary, width = target.model.get_input_embeddings().weight.shape
    d, heads = of_target.hidden_size, of_target.num_attention_heads
    if width != d:
        raise UserError(f"{target.name} has embeddings whose width differs from its layers'; heads are not supported")
    sizes = {"num_attention_heads": heads, "num_key_value_heads": getattr(of_target, "num_key_value_heads", heads)}
    sizes |= {"intermediate_size": MLP * d, "max_position_embeddings": target.context}
    sizes |= of_target.to_dict() if llama_layers(target) else {}  # The head begins as its last layer.
    sizes |= {"vocab_size": vocabulary, "hidden_size": d, "num_hidden_layers": 1, "tie_word_embeddings": False}
    layers = headTexts.tapped(target)
    head = {"layers": layers[-1:] if kind == "eagle-1" else layers}
    return TrainedHead.of(LlamaConfig(**sizes, head=head), target, tokens)


def llama_layers(target: CachedModel) -> list[nn.Module]:
    """The target's layers, if they are of the kind that a head has, else none."""
    return [module for module in target.model.modules() if isinstance(module, LlamaDecoderLayer)]


@torch.no_grad()
def begin_near_target(network: TrainedHead, target: CachedModel, texts: Sequence[TextBatch]) -> None:
    """Let a head begin as a copy of the target's last layer, which reads the best linear guess of what it reads there.

    The feature is the target's last hidden state, and `join` is fitted by least squares. The norm after the layer is
    the target's too. If the target's layers are of another kind than the head's, the head's layer begins as one that
    changes nothing, and `join` is fitted to what the last norm reads.

    texts: batches of one text each, from its beginning. A token counts by the inverse size of what is fitted, because
    some, such as the first one of a text, have huge hidden states.
    """
    d, layer, norm = network.config.hidden_size, network.model.layers[0], network.model.norm
    network.fuse.weight.zero_()[:, -d:].fill_diagonal_(1.0)
    copied = llama_layers(target)
    if copied:
        layer.load_state_dict(copied[-1].state_dict())
        norm.load_state_dict(target.model.base_model.norm.state_dict())
    else:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        norm.weight.copy_(torch.cat([batch.last[0].float() for batch in texts]).square().mean(0).sqrt())
    products = torch.zeros(3 * d, 3 * d, dtype=torch.float64, device=norm.weight.device)
    for batch in texts:
        read = network.joined(batch.tokens, network.features_before(batch))
        if copied:
            states = target.model.base_model(batch.tokens, use_cache=False, output_hidden_states=True).hidden_states
        fitted = states[-2].float() if copied else batch.last.float() / norm.weight
        pairs = torch.cat([read, fitted], -1) / fitted.square().mean(-1, keepdim=True).sqrt()
        products += pairs[0].double().mT @ pairs[0].double()
    squares, cross = products[: 2 * d, : 2 * d], products[: 2 * d, 2 * d :]
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    network.join.weight.copy_(torch.linalg.solve(squares, cross).mT)


def texts_of(part: Part, output: RestrictedHead) -> list[TextBatch]:
    """Each text of a part, as a batch of its own."""
    lengths = torch.bincount(part["text"])
    starts = lengths.cumsum(0) - lengths
    return [headTexts.batch_of([(part, *place)], output.weight) for place in zip(starts.tolist(), lengths.tolist())]


def begun(
    kind: str, args: Namespace, parts: list[Part], target: CachedModel, output: RestrictedHead
) -> TrainedHead | MedusaHeads:
    """An untrained network of a kind of RECIPES, as its training begins."""
    torch.manual_seed(args.seed)
    if kind == "medusa":
        return MedusaHeads(output.weight).to(target.device)
    network = new_network(target, output.tokens if args.draftVocab else None, kind).to(target.device)
    begin_near_target(network, target, texts_of(parts[1], output)[::FITTED])
    return network


def head_trainer(
    recipe: Recipe, args: Namespace, parts: list[Part], target: CachedModel, output: RestrictedHead
) -> Trainer:
    """The training of a head in the folder `args.out`. parts: of `prepare_parts`, the first is held out. output: the
    target's output layer, for the tokens that are guessed.

    By the recipe of EAGLE-1, a head reads true features of the last layer alone, with noise, and learns the feature of
    the next token above all. By Medusa's, each head learns the token at its distance. Texts, optimizers, a head's layer
    and its beginning are the same for all recipes.
    """
    autocast = target.dtype if target.dtype != torch.float16 else torch.bfloat16
    network = begun(recipe.kind, args, parts, target, output)
    held_out = texts_of(parts[0], output)
    shares = {"kind": recipe.kind, "opening": recipe.opening, "finish": recipe.finish}
    about = {"recipe": shares, "tokens": output.tokens.tolist(), "texts": headTexts.origin_of(args)}

    def loss(trainer: Trainer, rows: int, length: int) -> Tensor:
        """The cross-entropy to the target's distribution in each step of a chain, and in the end the share of guesses
        that the target rejects."""
        finishing = trainer.share >= 1 - recipe.finish
        batch = headTexts.random_windows(parts[1:], rows, length, (args.seed, trainer.step), output.weight)
        steps = 1 if trainer.share < recipe.opening else GAMMA
        if recipe.kind == "eagle-1":
            noise = np.random.default_rng((args.seed, trainer.step, 1)).uniform(-NOISE, NOISE, batch.before.shape)
            batch = batch._replace(before=batch.before + torch.from_numpy(noise).to(batch.before))
        with torch.autocast(target.device.type, autocast, autocast != torch.float32):
            hidden = network.chain(batch, steps).float()
        weights = chain_weights(batch.text, steps)
        weights *= (STEP_WEIGHT ** torch.arange(steps, device=weights.device))[:, None, None]
        weights /= weights.sum()
        flat = hidden.flatten(1, 2), batch.last.flatten(0, 1), batch.sums.flatten(0, 1), weights.flatten(1)
        total = chain_loss(*flat, output, finishing)
        if recipe.kind == "eagle-1":
            away = F.smooth_l1_loss(hidden[0], batch.last.float(), reduction="none").mean(-1)
            total = (away * weights[0]).sum() + CLASSIFICATION * total
        return total

    def measure(trainer: Trainer) -> dict[str, Any]:
        """The acceptance on text that is held out. The head is saved with it."""
        figures = headTexts.acceptance_on(network, output, held_out, autocast)
        record = {"recipe": shares, "seed": args.seed, "measured": [{"step": trainer.step} | figures]}
        network.save(args.out, model_version(args.folder), record)
        return figures

    return Trainer(recipe, network, args.out.name, loss, measure, args.out / CHECKPOINT, about)


def head_flags(argv: Sequence[str]) -> Namespace:
    parser = script_parser("python -m scripts.trainHead", __doc__)
    add, of_steps = parser.add_argument, f"of training, of {RECIPE.batch} tokens each, instead of --hours"
    add("target", type=text, help="the model whose head is trained: a folder of models/, or a path")
    add("out", type=path, metavar="OUT", help="the folder of the head")
    add("--texts", nargs="+", type=text, default=["sample"], help="texts whose passages the target continues (sample)")
    add("--written", type=whole(1), default=headTexts.WRITTEN, help="tokens the target writes (2,000,000)")
    add("--data", type=path, help="where the texts and their hidden states are kept (OUT/texts)")
    add("--hours", type=number(0.001, 10**4), default=0.5, help="of training (0.5)")
    add("--steps", type=whole(1), help=of_steps)
    add("--draftVocab", type=whole(1), help="guess only this number of frequent tokens (all)")
    add("--recipe", choices=list(RECIPES), default="eagle-3", help="Medusa's heads are for comparison alone (eagle-3)")
    add("--device", type=text, help="(cuda if available)")
    add("--seed", type=whole(0, 10**9), default=0)
    args = parser.parse_args(argv)
    if args.recipe == "medusa" and args.draftVocab:
        raise UserError("--draftVocab is not supported with --recipe medusa: leave one of them out")
    args.folder, args.device = find_model(args.target), pick_device(args.device)
    args.data = args.data or args.out / "texts"
    if (args.out / CONFIG).exists() and not (args.out / CHECKPOINT).exists():
        raise UserError(f"{args.out} holds a model, or a head without {CHECKPOINT}; name another OUT")
    args.passages = headTexts.read_passages(args.texts)
    args.out.mkdir(parents=True, exist_ok=True)
    if not os.access(args.out, os.W_OK):
        raise UserError(f"{args.out} is a folder that you may not write to; name another OUT")
    return args


@as_script("trainHead", "The same command continues where this one stopped.", "lower --written")
def main(argv: Sequence[str] | None = None) -> None:
    """Write the texts, then train the head, and write the record."""
    argv = sys.argv[1:] if argv is None else argv
    args = head_flags(argv)
    tokenizer = load_tokenizer(args.folder)
    target = load_model(args.folder, tokenizer, pick_dtype(args.device), args.device)
    target.model.requires_grad_(False)
    new_network(target, None)  # It refuses some targets: before texts are written.
    if args.draftVocab and args.draftVocab > target.vocabulary:
        raise UserError(f"--draftVocab {args.draftVocab} exceeds the vocabulary of {target.vocabulary} tokens")
    parts, cut = headTexts.prepare_parts(args, target), None
    if args.draftVocab:  # the most frequent tokens of the texts to train on, with those that end a text, ascending
        counts = sum(torch.bincount(part["tokens"].long(), minlength=target.vocabulary) for part in parts[1:])
        counts[[token for token in end_tokens(args.folder, tokenizer) if token < target.vocabulary]] = counts.sum() + 1
        cut = counts.argsort(descending=True, stable=True)[: args.draftVocab].sort().values
    output = headTexts.output_layer(target, cut)
    end = {"tokens": args.steps * RECIPE.batch} if args.steps else {"seconds": 3600 * args.hours}
    recipe = replace(RECIPE, **end, kind=args.recipe, **RECIPES[args.recipe])
    trainer = head_trainer(recipe, args, parts, target, output)
    trainer.train()
    parameters, last = sum(p.numel() for p in trainer.weights.values()), trainer.history[-1]
    positions = ", ".join(f"{share:.3f}" for share in last["acceptance"])
    passing = f"{last['alpha']:.3f} of the tested guesses pass ({positions} by position)"
    print(f"{passing}; at gamma {GAMMA} that is {last['tokens_per_round']:.2f} tokens a round", flush=True)
    # Of a folder or a file the record has the name alone.
    flags = {key: Path(x).name if isinstance(x, str | Path) else x for key, x in vars(args).items() if key not in TEXTS}
    models = {"target": model_record(args.folder.name, model_version(args.folder), target)}
    record = origin([last_name(word) for word in argv], flags, args.device, models)
    variant = {"recipe": trainer.about["recipe"], "parameters": parameters, "history": trainer.history}
    record |= {"program": "-m scripts.trainHead", "dtype": pick_dtype(args.device), "variants": {args.recipe: variant}}
    tokens = sum(len(part["tokens"]) for part in parts)
    record["written"] = {"tokens": tokens, "seconds": sum(float(part["seconds"]) for part in parts)}
    replace_file(args.out / f"head-{args.folder.name}.json", json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    sys.exit(main())
