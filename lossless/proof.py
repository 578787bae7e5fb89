"""What `test.py --lossless` does with models that are loaded: texts of every method, texts with mistakes planted in
them, and greedy texts are put to the tests of losslessness.py; each line of results as it comes."""

import time
from dataclasses import replace

import torch
from tqdm import tqdm

from experiments.measure import settings
from inputs.models import pick_dtype
from lossless.evidence import Witness, greedy_figures, limit_of, seen_by
from lossless.plantedMistakes import MISTAKES
from methods.catalogue import catalogue as methods
from regrSampling import regrSampling

FIRST = 2  # texts in which a planted mistake is sought at first
SHOWN, SHOWN_TOKENS = "replace from p", 6400  # the mistake in the figure, and tokens that its histogram needs
GREEDY_TOKENS = 50  # of each greedy text


def other_dtype(dtype, device):
    """The dtype in which greedy texts are compared beside `dtype`: a short one, or float32 beside a short one."""
    short = pick_dtype(device)
    return "float32" if dtype != "float32" else "bfloat16" if short == "float32" else short


class Proof:
    """args: the flags; names: the methods; models: {role: `CachedModel`}, of that dtype; prompts: lists of token ids,
    taken in turn and again; append: takes what is measured, by keywords."""

    def __init__(self, args, names, models, prompts, device, dtype, append):
        self.args, self.names, self.models, self.prompts = args, names, models, prompts
        self.device, self.dtype, self.append = device, dtype, append
        self.sampling, self.max_len = settings.sampling(args, "lossless"), settings.max_len(args, "lossless")
        self.rows, self.limit = settings.rows(args), limit_of(len(names))
        self.batches = -(-(args.tokens or settings.TOKENS) // (self.rows * self.max_len))
        self.shown = {
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "maxLen": self.max_len,
            "dtype": dtype,
            "limit": self.limit,
        }

    def choose(self, first, count):
        return [self.prompts[i % len(self.prompts)] for i in range(first, first + count)]

    def write(self, sampler, witness, first, count):
        """`Evidence` of `count` texts, numbered from `first`: a number stands for a prompt and a seed.

        None ends early: u is uniform over all tokens only if what they are does not decide how many there are."""
        chosen = self.choose(first, count)
        generator = torch.Generator(self.device).manual_seed(self.args.seed + 1_000_003 * first)
        return witness.evidence(chosen, sampler(chosen, self.max_len, witness.sampling, None, generator)[0])

    def repeatable(self, name):
        return methods.repeatable(name, self.args)

    def witness(self, sampling, order="draft"):
        return Witness(self.models["target"], self.models.get(order), sampling, self.args.seed)

    def test_methods(self):
        """The tokens that were asked for, by each method."""
        with tqdm(total=len(self.names) * self.batches, desc="lossless", disable=None, leave=False) as bar:
            for name, sampler in methods.build(self.names, self.models, self.args).items():
                witness = self.witness(self.sampling, "mid" if name == "cascade" else "draft")
                start, found = time.perf_counter(), None
                for batch in range(self.batches):
                    more = self.write(sampler, witness, batch * self.rows, self.rows)
                    found = found + more if found else more
                    bar.update()
                shown = self.shown | {"seconds": time.perf_counter() - start, "repeatable": self.repeatable(name)}
                self.append(kind="lossless", method=name, **shown, **found.figures())

    def find_mistakes(self):
        """Texts with each planted mistake, twice as many each time, until a test sees it."""
        for name, mistake in tqdm(MISTAKES.items(), desc="planted mistakes", disable=None, leave=False):
            if name == "dropped guess" and "draft" not in self.models:
                continue  # a guess from the text so far has probability 1
            tested, drafter = mistake.tested(self.sampling), methods.guesser(self.models, self.args)
            threshold, gamma = self.args.draftThreshold, self.args.gamma or 4
            sampler = mistake.sampler(self.models["target"], drafter, gamma, tested, threshold)
            witness = self.witness(tested)
            most = self.batches * self.rows
            found = self.write(sampler, witness, 0, min(FIRST, most))
            while not (seen := seen_by(found.figures(), self.limit)) and len(found.u) < most:
                done = len(found.u)
                found += self.write(sampler, witness, done, min(done, self.rows, most - done))
            line = found.figures() | {"mistake": name, "what": mistake.what, "seen_by": seen, "shown": name == SHOWN}
            missing = min(-(-SHOWN_TOKENS // self.max_len), most) - len(found.u)
            if name == SHOWN and missing > 0:
                found += self.write(sampler, witness, len(found.u), missing)
                line["counts"] = found.figures()["counts"]
            self.append(kind="power", **self.shown, **line)

    def compare_greedy(self):
        """Greedy texts of each method beside plain decoding's, in the dtype of the models."""
        sampling = replace(self.sampling, temperature=0.0, top_p=1.0, top_k=0)
        chosen, target = self.choose(0, self.rows), self.models["target"]
        count = min(self.max_len, GREEDY_TOKENS)
        plain, _ = regrSampling(chosen, target, count, sampling)
        witness = self.witness(sampling)
        self.append(kind="greedy", method="target", dtype=self.dtype, **greedy_figures(plain, plain, chosen, witness))
        samplers = methods.build([name for name in self.names if name != "target"], self.models, self.args)
        for name, sampler in tqdm(samplers.items(), desc="greedy", disable=None, leave=False):
            texts, _ = sampler(chosen, count, sampling)
            shown = {"dtype": self.dtype, "repeatable": self.repeatable(name)}
            self.append(kind="greedy", method=name, **shown, **greedy_figures(texts, plain, chosen, witness))
