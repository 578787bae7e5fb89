"""Train the bundled models: one tokenizer, and three GPT-NeoX models (Pythia's architecture) that share it.

    python -m scripts.trainBundled --texts books/ wiki.valid.tokens:3
    python test.py --ppl --dataset heldoutBook.txt

`PATH:3` counts a text three times in the corpus. The smaller models learn the target's distribution
instead of the text's next token (distillation; DistillSpec, arXiv 2310.08461): speculative decoding gains from a draft
that agrees with the target. The draft is then trained for acceptance (`rejection` in scripts/training.py), on texts
that the target writes, as a head is (scripts/headTexts.py).
"""

import math
import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from engine.cachedModel import CachedModel
from inputs.commandLine import as_script, number, path, script_parser, text, whole
from inputs.devices import pick_device
from inputs.files import ROOT
from scripts.headTexts import WRITTEN, Part, output_layer, prepare_parts, random_windows, read_documents, read_passages
from scripts.training import Recipe, Trainer, chain_loss
from utils import UserError

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 2048  # tokens a trained model can read
HEAD = 32  # width of an attention head
MIXED = (256, 256, 1024, CONTEXT)  # row lengths

# {name: (layers, width, the model whose distribution it learns or None for the text, stages)}. models/README.md says
# what each stage is for.
MODELS: dict[str, tuple[int, int, str | None, list[Recipe]]] = {
    "target": (12, 192, None, [Recipe(26_800_000, lengths=MIXED)]),
    "draft": (1, 128, "target", [
        Recipe(7_000_000, lengths=MIXED),
        Recipe(72_299_940, lengths=(256, 256, 1024), acceptance=True),
    ]),
    "mid": (4, 160, "target", [Recipe(4_000_000, lengths=MIXED)]),
}  # fmt: skip


def stage_loss(
    tokens: Tensor, seed: int, teacher: CachedModel | None = None, parts: Sequence[Part] = ()
) -> Callable[[Trainer, int, int], Tensor]:
    """The loss of a stage on texts that its teacher wrote, `parts`: the share of guesses that the teacher would reject.
    Without any the cross-entropy, in nats, to the teacher's distribution, or to the corpus `tokens[N]`. Rows are
    windows from any place."""
    output = output_layer(teacher) if teacher and parts else None

    def loss(trainer: Trainer, rows: int, length: int) -> Tensor:
        network, device = trainer.network, next(trainer.network.parameters()).device
        autocast = torch.autocast(device.type, dtype=torch.bfloat16)
        if output:
            batch = random_windows(parts, rows, length, (seed, trainer.step), output.weight)
            with autocast:
                logits = network(batch.tokens, use_cache=False).logits.flatten(0, 1)
            labels = batch.last.flatten(0, 1), batch.sums.flatten(0, 1)
            mean = torch.full((1, len(logits)), 1 / len(logits), device=device)
            return chain_loss(logits[None], *labels, mean, output, finishing=True)
        starts = np.random.default_rng((seed, trainer.step)).integers(len(tokens) - length, size=(rows, 1))
        read = tokens[starts + np.arange(length + 1)].to(device)
        with autocast:
            logits, targets = network(read[:, :-1], use_cache=False).logits.flatten(0, 1), read[:, 1:].flatten()
            if teacher:
                with torch.no_grad():
                    targets = teacher.model(read[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        return F.cross_entropy(logits.float(), targets)

    return loss


def bundled_flags(argv: Sequence[str] | None) -> Namespace:
    parser = script_parser("python -m scripts.trainBundled", __doc__)
    add, texts = parser.add_argument, "files or folders to train on; PATH:3 counts it three times"
    add("--texts", nargs="+", type=text, required=True, help=texts)
    minutes = "at most this long for each stage, and for the texts"
    add("--minutes", type=number(0.01, 10**6), default=math.inf, help=minutes)
    add("--out", type=path, default=ROOT / "models")
    add("--device", type=text, help="(cuda if available)")
    add("--seed", type=whole(0, 10**9), default=0)
    args = parser.parse_args(argv)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    args.out = Path(os.path.abspath(args.out))
    args.device = pick_device(args.device)
    args.passages = read_passages(args.texts)  # Now: the draft's texts are written hours later.
    return args


@as_script("trainBundled", "The stages that ended are kept.")
def main(argv: Sequence[str] | None = None) -> None:
    """Train the tokenizer if it does not exist, then the models. The tokenizer is a byte-level BPE of VOCABULARY
    entries. As in Pythia's, `<|endoftext|>` is entry 0."""
    args = bundled_flags(argv)
    documents = [document for path in args.texts for document in read_documents(path)]
    folder = args.out / "bundled-target"
    if not (folder / "tokenizer.json").exists():
        bpe, ends = ByteLevelBPETokenizer(), {f"{end}_token": END_OF_TEXT for end in ("bos", "eos", "unk")}
        options = {"vocab_size": VOCABULARY, "min_frequency": 0, "special_tokens": [END_OF_TEXT]}
        bpe.train_from_iterator(sorted(set(documents)), show_progress=False, **options)
        trained = Tokenizer.from_str(bpe.to_str())
        PreTrainedTokenizerFast(tokenizer_object=trained, model_max_length=CONTEXT, **ends).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    # Each document comes after an end-of-text token.
    pieces = [np.array([tokenizer.eos_token_id] + tokenizer(d, verbose=False)["input_ids"]) for d in documents]
    tokens = torch.from_numpy(np.concatenate(pieces).astype(np.int64))
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} characters, {len(tokens):,} tokens", flush=True)
    if len(tokens) <= 2 * CONTEXT:
        raise UserError(f"--texts has {len(tokens)} tokens, too few for rows of {CONTEXT}; add more texts")
    for name in MODELS:
        train_model(args, name, tokenizer, tokens)


def train_model(args: Namespace, name: str, tokenizer: PreTrainedTokenizerFast, tokens: Tensor) -> None:
    """Train a model through its stages and save it after each."""
    (layers, width, learnt, stages), folder = MODELS[name], args.out / f"bundled-{name}"
    torch.manual_seed(args.seed)
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // HEAD}
    sizes |= {"intermediate_size": 4 * width, "max_position_embeddings": CONTEXT}
    config = GPTNeoXConfig(**sizes, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0)
    model = GPTNeoXForCausalLM(config)
    source, teacher = args.out / f"bundled-{learnt}", None
    if learnt:
        stored = GPTNeoXForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True)
        teacher = CachedModel(stored.eval().to(args.device), name=source.name)
    with tempfile.TemporaryDirectory(prefix=".texts", dir=args.out) as data:
        for stage, recipe in enumerate(stages, 1):
            parts: list[Part] = []
            if recipe.acceptance and teacher:
                about = {"folder": source, "data": Path(data), "written": WRITTEN}
                parts = prepare_parts(Namespace(**vars(args) | about), teacher, 60 * args.minutes)
            recipe = replace(recipe, seconds=60 * args.minutes)
            loss_of = stage_loss(tokens, args.seed + stage - 1, teacher, parts[1:])
            trainer = Trainer(recipe, model.to(args.device).train(), f"bundled-{name}, stage {stage}", loss_of)
            trainer.train()
            size, last = sum(p.numel() for p in model.parameters()), trainer.history[-1]
            done = f"stage {stage}: {last['step']:,} steps, {last['tokens']:,} tokens, loss {last['loss']:.4f}"
            print(f"bundled-{name}: {size:,} parameters, {done}", flush=True)
            model = model.cpu().to(torch.bfloat16)  # As stored: the next stage starts from what is stored.
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            model = model.float()


if __name__ == "__main__":
    sys.exit(main())
