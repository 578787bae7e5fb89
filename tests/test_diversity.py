"""Figures of texts against values computed by hand."""

import math

import pytest

import PPL
from experiments.diversity import FIGURES, distinct, entropy, figures, repetition
from inputs.models import load_model, load_tokenizer

TEXT = "the cat and the dog and the cat"  # the 3, cat 2, and 2, dog 1


def test_entropy_is_that_of_the_counts():
    assert entropy(TEXT, 1) == pytest.approx(3 / 8 * math.log2(8 / 3) + 2 * 2 / 8 * 2 + 1 / 8 * 3)
    assert entropy(TEXT, 2) == pytest.approx(2 * 2 / 7 * math.log2(7 / 2) + 3 / 7 * math.log2(7))
    assert entropy("a b c d", 1) == 2 and entropy("a a a", 1) == 0


def test_distinct_and_repeated_ngrams_are_counted():
    assert distinct(TEXT, 1) == 4 / 8 and distinct(TEXT, 2) == 5 / 7
    assert repetition("a b c d e") == 0
    assert repetition("a b c d a b c d") == pytest.approx(1 / 5)
    assert repetition("x x x x x x") == pytest.approx(2 / 3)


def test_a_text_too_short_for_an_ngram_has_none():
    assert (entropy("a", 2), distinct("a", 2), repetition("a b c"), entropy("", 1)) == (0, 0, 0, 0)


def test_white_space_of_any_kind_parts_tokens():
    assert entropy("a\n b\t\u3000c  d", 1) == 2


def test_figures_of_a_continuation(pair_folder):
    tokenizer = load_tokenizer(pair_folder / "target")
    target = load_model(pair_folder / "target", tokenizer, "float32", "cpu")
    prompt, tokens = (tokenizer(text)["input_ids"] for text in ("The bell and the", " bell and the lamp"))
    values = figures(prompt, tokens, tokenizer, target)
    assert tuple(values) == FIGURES
    assert values["distinct_1"] == distinct("The bell and the bell and the lamp", 1) == 5 / 8
    whole, head = (
        len(ids) * math.log(PPL.calculate_ppl_regr(ids, target)) * (1 - 1 / len(ids))
        for ids in (prompt + tokens, prompt)
    )
    assert values["perplexity"] == pytest.approx(math.exp((whole - head) / len(tokens)), rel=1e-5)
