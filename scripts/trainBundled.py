"""Train the bundled models: one tokenizer and three GPT-NeoX (Pythia architecture) models that share it.

    python trainBundled.py --texts books/ wiki.valid.tokens:3 --heldout wiki.test.raw heldoutBook.txt

`PATH:3` counts a text three times in each pass over the corpus. Layers' matrices are trained with Muon, the rest with
AdamW; the learning rate warms up and then falls to zero on a cosine. The smaller models learn from the target's
distribution instead of the text's next token (distillation; DistillSpec, arXiv 2310.08461): what speculative decoding
rewards is agreement with the target.
"""

import argparse
import math
import os
import random
import re
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GPTNeoXConfig, GPTNeoXForCausalLM, PreTrainedTokenizerFast

from engine.cachedModel import CachedModel
from inputs.commandLine import Parser, as_command, number, path, text, whole
from inputs.models import find_model, pick_device
from inputs.texts import read
from PPL import calculate_ppl_corpus
from utils import UserError

VOCABULARY = 4096
END_OF_TEXT = "<|endoftext|>"
CONTEXT = 2048  # tokens a trained model may read
HEAD = 32  # width of an attention head
BATCH = 2048  # tokens per step: 8 rows of 256, or 2 of 1024, or one of CONTEXT
MIXED = (256, 256, 1024, CONTEXT)  # row lengths, step by step in turn
WARM_UP = 0.02  # share of a stage over which the learning rate rises
MUON_RATE, ADAM_RATE = 0.02, 3e-3

# A stage: tokens, peak of the learning rates' cosine (1: the rates above), row lengths, row lengths in its last fifth.
# The target's first stage meets long rows only at the end, at rates too low to learn from them: its second mended part
# of that, its third, at full rates and on more text, the rest.
#          layers width teacher stages
MODELS = {
    "target": (
        12,
        192,
        None,
        [(12_600_000, 1.0, (256,), (CONTEXT,)), (4_000_000, 0.3, MIXED, MIXED), (10_200_000, 1.0, MIXED, MIXED)],
    ),
    "draft": (1, 128, "target", [(7_000_000, 1.0, MIXED, MIXED)]),
    "mid": (4, 160, "target", [(4_000_000, 1.0, MIXED, MIXED)]),
}


def read_texts(path):
    """Documents of one file or folder (`PATH` or `PATH:TIMES`), as a list of strings.

    A WikiText file is split at its article headings. Its word-level split marks rare words `<unk>`: they are dropped,
    as no real text holds them."""
    path, _, times = str(path).partition(":")
    if not re.fullmatch("([1-9][0-9]?)?", times):
        raise UserError(f"--texts {path}:{times}: a text is counted 1 to 99 times")
    documents = []
    for file in sorted(Path(path).rglob("*.txt")) if os.path.isdir(path) else [Path(path)]:
        text = read(file)
        if re.search(r"^ = [^=].* = $", text, re.M):
            text = re.sub(r" ?<unk>", "", re.sub(r"^ *\n", "", text, flags=re.M))
            documents += re.split(r"^(?= = [^=].* = $)", text, flags=re.M)
        else:
            documents.append(text)
    return [d for d in documents if d.strip()] * int(times or 1)


def train_tokenizer(documents, folder):
    """Byte-level BPE with VOCABULARY entries, `<|endoftext|>` being entry 0, as in Pythia's tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=CONTEXT,
    ).save_pretrained(folder)


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)


def encode(tokenizer, documents):
    """All documents as one int64 tensor, an end-of-text token before each."""
    pieces = [np.array([tokenizer.eos_token_id] + tokenizer(d, verbose=False)["input_ids"]) for d in documents]
    return torch.from_numpy(np.concatenate(pieces).astype(np.int64))


def windows(tokens, length, rng):
    """Endless windows `[length + 1]`: passes over the corpus from a random offset, in random order."""
    while True:
        starts = list(range(rng.randrange(length), len(tokens) - length - 1, length))
        rng.shuffle(starts)
        for start in starts:
            yield tokens[start : start + length + 1]


def new_model(layers, width):
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // HEAD,
            intermediate_size=4 * width,
            max_position_embeddings=CONTEXT,
            bos_token_id=0,
            eos_token_id=0,
        )
    )


def train(model, tokens, stage, minutes=math.inf, teacher=None, device="cpu", seed=0, label=""):
    """Train `model` for one stage (see MODELS) on the corpus `tokens`, or for `minutes` if they end first: the schedule
    follows whichever is nearer its end.

    Returns (steps, tokens seen, mean loss of the last 5 %); the loss is the cross-entropy in nats per token, with the
    teacher's distribution as the labels where there is a teacher."""
    budget, peak, lengths, last_lengths = stage
    rng = random.Random(seed)
    sources = {length: windows(tokens, length, rng) for length in (*lengths, *last_lengths)}
    matrices = [p for p in model.gpt_neox.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.0, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]
    rates = [group["lr"] for o in optimizers for group in o.param_groups]
    model.train().to(device)
    begin, seen, steps, losses, progress = time.monotonic(), 0, 0, [], 0.0
    bar = tqdm(
        total=100, desc=label, bar_format="{l_bar}{bar}| {elapsed}<{remaining}{postfix}", disable=None, mininterval=5
    )
    while progress < 1:
        rate = min(progress / WARM_UP, 0.5 + 0.5 * math.cos(math.pi * progress)) if steps else 0.0
        for group, full in zip([g for o in optimizers for g in o.param_groups], rates):
            group["lr"] = full * peak * rate
        in_turn = last_lengths if progress > 0.8 else lengths
        length = in_turn[steps % len(in_turn)]
        batch = torch.stack([next(sources[length]) for _ in range(BATCH // length)]).to(device)
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(batch[:, :-1], use_cache=False).logits
            labels = batch[:, 1:].flatten()
            if teacher is not None:
                with torch.no_grad():
                    labels = teacher(batch[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        steps, seen = steps + 1, seen + batch[:, 1:].numel()
        before, progress = progress, max(seen / budget, (time.monotonic() - begin) / 60 / minutes)
        bar.set_postfix_str(
            f"loss {np.mean(losses[-50:]):.3f}, {seen / (time.monotonic() - begin):,.0f} tokens/s", refresh=False
        )
        bar.update(min(100, 100 * progress) - bar.n)
        if int(20 * before) != int(20 * progress):
            tqdm.write(
                f"{label}: {seen:,} tokens, loss {np.mean(losses[-200:]):.4f}, "
                f"{(time.monotonic() - begin) / 60:.1f} min",
                file=sys.stderr,
            )
    bar.close()
    return steps, seen, float(np.mean(losses[-max(1, steps // 20) :]))


def parse(argv):
    parser = Parser(
        prog="trainBundled.py",
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--texts",
        nargs="+",
        type=text,
        required=True,
        help="files or folders to train on; PATH:3 counts it three times",
    )
    parser.add_argument("--heldout", nargs="*", type=path, default=[], help="texts whose perplexity is printed")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="which to train")
    parser.add_argument(
        "--minutes", type=number(0.01, 10**6), default=math.inf, help="at most this long for each stage of a model"
    )
    parser.add_argument("--tokens", type=whole(1), help="at most this many tokens for each stage of a model")
    parser.add_argument("--stage", type=whole(1, 3), default=1, help="start at this stage, from the weights in --out")
    parser.add_argument("--out", type=path, default=Path(__file__).resolve().parent.parent / "models")
    parser.add_argument("--device", type=text, help="(cuda if there is one)")
    parser.add_argument("--seed", type=whole(0, 10**9), default=0)
    args = parser.parse_args(argv)
    if not os.path.isdir(args.out):
        raise UserError(f"--out {args.out} is not a folder")
    for name in args.models:
        *_, teacher, stages = MODELS[name]
        if args.stage > len(stages):
            raise UserError(f"bundled-{name} has no stage {args.stage}, the last is {len(stages)}")
        if args.stage > 1:
            find_model(str(folder_of(args, name)))
        if teacher and teacher not in args.models:
            find_model(str(folder_of(args, teacher)))
    args.device = pick_device(args.device)
    return args


def folder_of(args, name):
    return Path(os.path.abspath(args.out)) / f"bundled-{name}"


def run(args):
    folders = {name: folder_of(args, name) for name in MODELS}
    documents = [document for path in args.texts for document in read_texts(path)]
    heldout_texts = {file: read(file) for file in args.heldout}
    if not documents:
        raise UserError("the --texts hold no text; name others")

    if not (folders["target"] / "tokenizer.json").exists():
        train_tokenizer(sorted(set(documents)), folders["target"])
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folders["target"])
    tokens = encode(tokenizer, documents)
    print(f"{len(documents)} documents, {sum(map(len, documents)):,} characters, {len(tokens):,} tokens", flush=True)
    if len(tokens) <= 2 * CONTEXT:
        raise UserError(f"the --texts hold {len(tokens)} tokens, and rows of {CONTEXT} are cut from them; give more")

    for name in args.models:
        layers, width, teacher_name, stages = MODELS[name]
        torch.manual_seed(args.seed)
        model = new_model(layers, width) if args.stage == 1 else load(folders[name])
        teacher = teacher_name and load(folders[teacher_name]).eval().to(args.device)
        for turn, (budget, *how) in list(enumerate(stages, 1))[args.stage - 1 :]:
            stage = (min(budget, args.tokens or budget), *how)
            steps, seen, loss = train(
                model,
                tokens,
                stage,
                args.minutes,
                teacher,
                args.device,
                args.seed + turn - 1,
                f"bundled-{name}, stage {turn}",
            )
            print(
                f"bundled-{name}: {sum(p.numel() for p in model.parameters()):,} parameters, stage {turn}: "
                f"{steps:,} steps, {seen:,} tokens, loss {loss:.4f}",
                flush=True,
            )
            model = model.cpu().to(torch.bfloat16)  # as stored; a further stage starts from what is stored
            model.save_pretrained(folders[name])
            tokenizer.save_pretrained(folders[name])
            model = model.float().eval()
        for file, words in heldout_texts.items():
            heldout = calculate_ppl_corpus(words, tokenizer, CachedModel(model))["target"]
            print(
                f"  perplexity on {file.name}: {heldout.token_ppl:.3f} per token, {heldout.word_ppl:.2f} per word",
                flush=True,
            )


def main(argv=None):
    return as_command("trainBundled.py", lambda: run(parse(argv)), "The stages that ended are kept.")


if __name__ == "__main__":
    sys.exit(main())
