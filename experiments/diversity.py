"""Measures of the diversity of texts: n-gram entropy, distinct-n, repetition, and their perplexity under the target.

The prompts, and the figures to compare with, are those of R. Gadgil, "Combining Large and Small LLMs to Boost Inference
Time and Quality" (2024): GPT-2 large with GPT-2, one text of 50 tokens, including the prompt, for each prompt
(report/sources.py).
"""

import math
from collections import Counter

import torch
from transformers import PreTrainedTokenizerBase

import PPL
from engine.cachedModel import CachedModel

PROMPTS = (
    "Large Language models are",
    "Barack Obama was",
    "Decoding strategy is important because",
    "A good recipe for Halloween is",
    "Stanford is known for",
)
FIGURES = ("entropy_1", "entropy_2", "entropy_3", "distinct_1", "distinct_2", "repetition", "perplexity")


def ngrams(text: str, n: int) -> Counter[tuple[str, ...]]:
    """How often each n-gram of words occurs in `text`. Words are separated by white space."""
    tokens = text.split()
    return Counter(zip(*(tokens[i:] for i in range(n))))


def entropy(text: str, n: int) -> float:
    """The entropy of the n-grams of a text, in bits; 0 if it has none."""
    counts = ngrams(text, n)
    total = counts.total()
    return math.fsum(c / total * math.log2(total / c) for c in counts.values())


def distinct(text: str, n: int) -> float:
    """The number of different n-grams over the number of all n-grams; 0 if there are none."""
    counts = ngrams(text, n)
    return len(counts) / counts.total() if counts else 0.0


def repetition(text: str, n: int = 4) -> float:
    """The share of n-grams that occurred before in the text; 0 if there are none."""
    return 1 - distinct(text, n) if ngrams(text, n) else 0.0


def figures(
    prompt: list[int], tokens: list[int], tokenizer: PreTrainedTokenizerBase, target: CachedModel
) -> dict[str, float]:
    """All FIGURES of one continuation (`prompt`, `tokens`: token ids). N-grams are counted over prompt and continuation
    together, as in the article. perplexity: of the continuation under `target`, at temperature 1 without filters."""
    text = tokenizer.decode(prompt + tokens, skip_special_tokens=True)
    log_probs = PPL.token_log_probs(torch.tensor(prompt + tokens), target)["target"][len(prompt) - 1 :]
    values = (
        *(entropy(text, n) for n in (1, 2, 3)),
        *(distinct(text, n) for n in (1, 2)),
        repetition(text),
        PPL.exp(-log_probs.double().mean().item()),
    )
    return dict(zip(FIGURES, values))
