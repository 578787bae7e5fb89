"""A draft with another tokenizer: what it reads, that its q is what its guesses were drawn from, and that the output
does not show it; the tokens both have, and texts in the draft's tokens as its own tokenizer writes them."""

import copy
import itertools
import re
from dataclasses import replace

import helpers
import pytest
import torch
from conftest import refused
from mistakes import always_accept
from outcomes import speculative_error
from test_specSampling import FREE, PROMPTS
from tokenizerKinds import KINDS, byte_level
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from decoding.drafter import Fixed
from decoding.lengthRules import Additive, DraftConfidence
from decoding.rows import Rows
from decoding.verification import block_rule, token_rule
from engine.cachedModel import CachedModel, UncachedModel
from engine.sharedWeights import RestrictedModel
from inputs.files import DATASETS
from methods import otherTokenizer
from methods.cascade import CascadeDrafter
from methods.otherTokenizer import TAIL, GrowingText, OtherTokenizerDrafter, Translation
from regrSampling import regrSampling
from specSampling import specSampling
from utils import GREEDY, Sampling, probabilities

TEXTS = ["The harbour was dark", "and the", "a “lamp” café 🙂 was lit and the tide of the harbour was out", "I"]
PENALTY = Sampling(0.0, 0, 1.0, 1.3)


def models_of(kinds, target="llama", draft="gpt2", texts=TEXTS, context=256):
    """(prompts, target, draft, translation) with random weights. The draft's output layer knows the common tokens
    alone."""
    translation = Translation(kinds[target], kinds[draft])
    family = "gpt_neox" if target in ("gpt2", "pythia") else target
    ours = helpers.tiny(family, 0, len(kinds[target]), context=256)
    theirs = helpers.tiny(draft, 1, len(kinds[draft]), 1, context=context)
    prompts = [kinds[target](text)["input_ids"] for text in texts]
    return prompts, ours, RestrictedModel(theirs, translation.draft), translation


@pytest.mark.parametrize(
    "ours, theirs", [("llama", "gpt2"), ("gpt2", "llama"), *[("pythia", "gpt2"), ("qwen2", "gpt2")] * helpers.FULL]
)
def test_greedy_rows_equal_plain_greedy(kinds, ours, theirs):
    prompts, target, draft, translation = models_of(kinds, ours, theirs)
    for sampling, length, verify in (
        (GREEDY, 4, token_rule),
        (GREEDY, DraftConfidence(4, 0.1), token_rule),
        (PENALTY, 3, block_rule),
    ):
        wanted, drafter = regrSampling(prompts, target, 12, sampling)[0], OtherTokenizerDrafter(draft, translation)
        found, records = specSampling(prompts, target, drafter, 12, length, sampling, verify=verify)
        assert found == wanted and all(max(record.drafted) > 0 for record in records)
    end = wanted[0][7]
    stopped = [row[: row.index(end) + 1] if end in row else row for row in wanted]
    cascade = CascadeDrafter(helpers.tiny("llama", 3, len(kinds[ours])), OtherTokenizerDrafter(draft, translation))
    for drafter in cascade, OtherTokenizerDrafter(UncachedModel(draft), translation):
        assert specSampling(prompts, target, drafter, 12, 3, PENALTY, end)[0] == stopped


def few(tokens, *merges):
    """A byte-level tokenizer of these tokens; the one in brackets ends a text."""
    made = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    (end,) = (token for token in tokens if re.fullmatch("<.+>", token))
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)


LETTERS = [chr(code) for code in range(ord("A"), ord("z") + 1)] + ["0", "1"]  # 60, each a token


def letters(order):
    """A tokenizer of 60 letters and an end of text, whose ids are in this order."""
    tokens = ["<e>", *LETTERS]
    return few([tokens[i] for i in order])


def other_ids(model):
    """The same model with its tokens in another order, which draws common tokens alone, and the translation to it."""
    order = torch.randperm(61, generator=torch.Generator().manual_seed(0))
    translation, same = Translation(letters(range(61)), letters(order.tolist())), copy.deepcopy(model.model)
    assert translation.draft[translation.target.argsort()].tolist() == order.argsort().tolist()
    with torch.no_grad():
        for layer in same.get_input_embeddings(), same.get_output_embeddings():
            layer.weight.copy_(layer.weight[order])
    return RestrictedModel(CachedModel(same), translation.draft), translation


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.85, 0, 0.9, 1.3)])
def test_a_draft_equal_to_the_target_but_for_its_ids_is_always_accepted(sampling):
    target = helpers.tiny(vocabulary=61)
    drafter, generator = OtherTokenizerDrafter(*other_ids(target)), torch.Generator().manual_seed(0)
    _, records = specSampling(PROMPTS, target, drafter, 40, 4, sampling, generator=generator)
    assert all(record.committed == [1] + [5] * 7 + [4] and record.alpha > 0.999 for record in records)


class Checked(OtherTokenizerDrafter):
    """Reads each row anew, without a cache, and compares what its guesses were drawn from."""

    compared = 0

    def draft(self, rows, gammas, sampling, length=None):
        guesses = super().draft(rows, gammas, sampling, length)
        vocabulary = self.translation.vocabulary
        seen, partner = rows.seen(vocabulary, sampling), dict(zip(self.targets.tolist(), self.drafts.tolist()))
        for row, (text, drafts) in enumerate(zip(rows.texts, guesses.drafts.tolist())):
            if rows.ended[row] or not guesses.q[row].any():
                continue
            self.compared += 1
            whole = self.translation.row(text) + [partner[token] for token in drafts]
            logits = self.model.score(torch.tensor([whole]))[0, -len(drafts) - 1]
            wanted = torch.full((vocabulary,), -torch.inf).index_copy(0, self.targets, logits[self.drafts])
            q = probabilities(wanted, sampling.but(self.temperature, self.top_p), None if seen is None else seen[row])
            torch.testing.assert_close(guesses.q[row, 0], q, atol=1e-5, rtol=1e-4)
            assert (guesses.q[row].sum(-1) - 1).abs().max() < 1e-5 and (guesses.of_drafts()[row] > 0).all()
        return guesses


@pytest.mark.parametrize("sampling", [Sampling(0.8, 0, 1.0, 1.4), Sampling(1.0, 5, 1.0)])
@pytest.mark.parametrize("cascade", [False, True])
def test_guesses_come_from_what_the_draft_says_after_the_same_text(kinds, cascade, sampling):
    """Whatever its cache holds of the rounds before: texts that merged, rejected guesses, rows of any length."""
    prompts, target, draft, translation = models_of(kinds)
    checked = drafter = Checked(draft, translation, 0.7)
    if cascade:
        drafter = CascadeDrafter(helpers.tiny("llama", 2, len(kinds["llama"])), checked, Additive(1))
    specSampling(prompts, target, drafter, 12, 3, sampling, generator=torch.Generator().manual_seed(0))
    assert checked.compared > 30


def test_a_cache_that_keeps_what_has_changed_is_caught(kinds, monkeypatch):
    prompts, target, draft, translation = models_of(kinds)
    monkeypatch.setattr(otherTokenizer, "commonprefix", lambda texts: min(texts, key=len))
    with pytest.raises(AssertionError, match="close"):
        specSampling(prompts, target, Checked(draft, translation), 12, 3, FREE)


def test_a_row_that_outgrows_the_drafts_room_gets_no_more_guesses_and_a_long_prompt_is_refused(kinds):
    """The draft's tokens are shorter: 42 of its own where the target has fewer."""
    prompts, target, draft, translation = models_of(kinds, texts=TEXTS[:3], context=84)
    assert max(len(translation.row(prompt)) for prompt in prompts) + 30 <= 84
    found, records = specSampling(prompts, target, OtherTokenizerDrafter(draft, translation), 40, 4, GREEDY)
    assert found == regrSampling(prompts, target, 40, GREEDY)[0]
    late = [record.drafted[-3] for record in records]
    assert min(late) == 0 and max(record.drafted[1] for record in records) == 4
    with refused("context of", "84 tokens"):
        specSampling([prompts[2]], target, OtherTokenizerDrafter(draft, translation), 60, 4, GREEDY)


def test_the_name_of_a_token_that_the_draft_has_no_logit_of_is_left_out(kinds):
    """As of Gemma 3's token for an image, where a text has its name as plain characters."""
    draft = copy.deepcopy(kinds["gpt2"])
    size = len(draft)
    draft.add_special_tokens({"additional_special_tokens": ["<img>"]})
    translation = Translation(kinds["llama"], draft, vocabularies=(len(kinds["llama"]), size))
    encoded, without = (translation.row(kinds["llama"](text)["input_ids"]) for text in ("a <img> b", "a  b"))
    assert draft.decode(encoded) == draft.decode(without) == "a  b" and max(encoded) < size


class ByText(Fixed):
    """A number of guesses for each text."""

    def __init__(self, *lengths):
        super().__init__(max(lengths))
        self.lengths = lengths

    def gammas(self):
        return [self.lengths[text] for text in self.rows.numbers]


@pytest.mark.parametrize("context", [86, 256])
def test_a_text_near_the_end_of_the_drafts_room_does_not_depend_on_its_neighbours(kinds, context, monkeypatch):
    """Also if these have more guesses, or longer prompts."""
    monkeypatch.setattr(otherTokenizer, "GROWTH", 1)
    prompts, target, draft, translation = models_of(kinds, texts=TEXTS[2:], context=context)

    def written(texts):
        generators = [torch.Generator().manual_seed(text) for text in texts]
        drafter, rule = Checked(draft, translation), ByText(*((1, 6)[text] for text in texts))
        some = [prompts[text] for text in texts]
        tokens, records = specSampling(some, target, drafter, 34, rule, FREE, generator=generators)
        return [(row, record.drafted) for row, record in zip(tokens, records)]

    alone = [*written([0]), *written([1])]
    assert written([0, 1]) == alone and all(0 in drafted[1:-1] for _, drafted in alone)


# The distribution of whole texts, exactly, with four tokens on each side, of which both have three.


def sum_below_one(guesses):
    """The mistake that invites itself: drawn among the common tokens, while q is the draft's own over all its
    tokens."""
    return guesses.q * 0.6


def at_the_drafts_ids(guesses):
    """q is at the draft's ids, the guesses are the target's."""
    if not guesses.q.shape[1]:
        return guesses.q
    return guesses.q.roll(1, -1).scatter(-1, guesses.drafts[..., None], guesses.of_drafts()[..., None])


def error(wrong_q=None, cascade=False, own=(), restricted=True, **options):
    """The largest difference between the probability of a text and the target's."""

    class Guessing(OtherTokenizerDrafter):
        def draft(self, *given, **named):
            guesses = super().draft(*given, **named)
            return replace(guesses, q=wrong_q(guesses)) if wrong_q else guesses

    def drafter(target, mid, draft):
        translation = Translation(few(["<e>", "a", "b", "ab"], ("a", "b")), few(["b", "ba", "a", "<end>"], ("b", "a")))
        assert dict(zip(translation.target.tolist(), translation.draft.tolist())) == {0: 3, 1: 2, 2: 0}
        guesses = Guessing(RestrictedModel(draft, translation.draft), translation, *own)
        if not restricted:  # As if it had not been refused.
            with refused("may guess tokens that the target lacks"):
                Guessing(draft, translation, *own)
            guesses.model.model.set_output_embeddings(draft.model.get_output_embeddings())
        return CascadeDrafter(mid, guesses, Fixed(1)) if cascade else guesses

    return speculative_error(drafter, vocabulary=4, prefixes=[[1, 2, 3, 1]], **options)


FILTERED = {"sampling": Sampling(0.9, 0, 0.9, 1.3)}


@pytest.mark.parametrize(
    "options", [{}, {"verify": block_rule}, FILTERED, {"own": (0.5, 0.9)}, {"cascade": True, "gamma": 1}]
)
def test_texts_have_the_targets_probabilities(options):
    assert error(**options) < 1e-6


@pytest.mark.parametrize(
    "options",
    [{"wrong_q": sum_below_one}, {"wrong_q": at_the_drafts_ids}, {"verify": always_accept}, {"restricted": False}],
)
def test_a_planted_mistake_is_caught(options):
    assert error(**options, length=3, gamma=1) > 1e-3


def test_a_row_without_a_guess_has_a_q_of_0_beside_those_with_one(kinds):
    prompts, target, draft, translation = models_of(kinds, texts=TEXTS[:2])
    rows = Rows(prompts, 9, [target])
    drafter = OtherTokenizerDrafter(draft, translation)
    drafter.begin(rows)
    drafter.read_prompts(rows)
    rows.ended[1] = True
    guesses = drafter.draft(rows, [3, 3], FREE)
    assert guesses.counts().tolist() == [3, 0] and not guesses.q[1].any()
    assert drafter.draft(rows, [0, 0], FREE).q.shape == (2, 0, len(kinds["llama"]))


@pytest.mark.parametrize("sampling", [GREEDY, FREE, Sampling()], ids=["greedy", "free", "top-p"])
def test_a_draft_whose_logits_are_not_finite_is_told(kinds, sampling):
    """Also if neither the draft's last token nor the target's first one is common to both."""
    prompts, target, _, translation = models_of(kinds, texts=TEXTS[:1])
    kept = (translation.draft < len(kinds["gpt2"]) - 1) & (translation.target > 0)
    translation.target, translation.draft = translation.target[kept], translation.draft[kept]
    draft = RestrictedModel(helpers.tiny("gpt2", 1, len(kinds["gpt2"]), 1, context=256), translation.draft)
    with torch.no_grad():
        draft.model.get_output_embeddings().weight[:] = torch.inf
    draft.name = "the broken one"
    with refused("the broken one", "not finite"):
        specSampling(prompts, target, OtherTokenizerDrafter(draft, translation), 20, 3, sampling)


# The translation.

SAMPLES = (
    "The harbour was dark,\nand   café 1987 “old” naïve 漢字 🙂 end",
    " a space, ",
    "a",
    "\n\ttabs  and\r\n\r\nlines ",
)
PAIRS = list(itertools.permutations(KINDS, 2))


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_a_text_is_written_as_the_drafts_tokenizer_writes_it(kinds, ours, theirs):
    translation = Translation(kinds[ours], kinds[theirs])
    for text in SAMPLES:
        assert translation.row(kinds[ours](text)["input_ids"]) == kinds[theirs](text)["input_ids"]


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_tokens_in_common_stand_for_the_same_text(kinds, ours, theirs):
    """Read by the tokenizers themselves, after a letter, because SentencePiece drops a space at the beginning."""
    translation = Translation(kinds[ours], kinds[theirs])
    pairs = list(zip(translation.target.tolist(), translation.draft.tolist()))
    assert len({a for a, _ in pairs}) == len({b for _, b in pairs}) == len(pairs) > 250
    assert translation.share == len(pairs) / len(kinds[ours])
    texts = []
    for ids, tokenizer in zip(zip(*pairs), (kinds[ours], kinds[theirs])):
        letter = tokenizer("a", add_special_tokens=False)["input_ids"]
        texts.append([tokenizer.decode([*letter, i], skip_special_tokens=True) for i in ids])
    assert texts[0] == texts[1] and len(set(texts[0])) > 150
    ends = [kinds[each].eos_token_id for each in (ours, theirs)]
    assert tuple(ends) in pairs


def test_a_token_that_ends_the_drafts_texts_stands_for_one_token_alone():
    """It is plain text in the draft's tokenizer, and in the target's, where another ends a text."""
    draft = few(["a", "b", "<e>"])
    draft.eos_token = "b"
    translation = Translation(few(["a", "b", "<e>"]), draft)
    assert dict(zip(translation.target.tolist(), translation.draft.tolist())) == {0: 0, 2: 1}


def test_every_token_of_the_same_text_is_found_and_no_other(kinds):
    """A tokenizer beside itself has all tokens in common, beside one without some of them all but these."""
    whole = Translation(kinds["gpt2"], kinds["gpt2"])
    assert whole.target.tolist() == whole.draft.tolist() == list(range(len(kinds["gpt2"]))) and whole.share == 1
    larger = byte_level(340)
    more = Translation(larger, kinds["gpt2"])
    assert len(more.target) == 320 and more.share == 320 / 340
    new = sorted(set(range(340)) - set(more.target.tolist()))
    assert more.coverage([new]) == 0 and more.coverage([new, more.target.tolist()]) == 320 / 340


@pytest.mark.parametrize("theirs", ["qwen2", "llama"])
def test_a_character_that_is_not_whole_yet_is_written_in_bytes(kinds, theirs):
    translation, draft = Translation(kinds["gpt2"], kinds[theirs]), kinds[theirs]
    ids = kinds["gpt2"]("so 🙂")["input_ids"]
    assert len(ids) > len(kinds["gpt2"]("so ")["input_ids"]) + 2
    part = translation.row(ids[:-1])
    start = draft("so ")["input_ids"]
    assert len(part) == len(start) + 3 and part[: len(start)] == start  # three of the four bytes
    assert draft.decode(translation.row(ids), skip_special_tokens=True) == "so 🙂"


def test_special_tokens_that_both_have_stay_what_they_are(kinds):
    gpt2, llama = kinds["gpt2"], kinds["llama"]
    ids = [*gpt2("one")["input_ids"], gpt2.eos_token_id, *gpt2("two")["input_ids"]]
    one, two = (llama(text, add_special_tokens=False)["input_ids"] for text in ("one", "two"))
    assert Translation(gpt2, llama).row(ids) == [1, *one, 2, *two]  # <s> in front, as the draft was trained
    assert Translation(llama, gpt2).row([1, *one, 2]) == [*gpt2("one")["input_ids"], gpt2.eos_token_id]
    assert Translation(llama, gpt2).row([1]) != []


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_a_text_that_grows_is_written_as_a_whole_one(kinds, ours, theirs):
    """However much of it is kept; and also where it goes back, as in a cascade."""
    translation = Translation(kinds[ours], kinds[theirs])
    text = (DATASETS / "sample" / "articles.raw").read_text()[:900].replace(" the ", "  the ")  # Spaces may be joined.
    ids = kinds[ours](text)["input_ids"]
    ends, encode, lengths = [*range(1, len(ids) + 1, 3), 5, 90, 150, 149, len(ids)], translation.encode, []
    wanted = [translation.row(ids[:end]) for end in ends]
    translation.encode = lambda tokens, *rest: lengths.append(len(tokens)) or encode(tokens, *rest)
    growing = GrowingText(translation)
    assert [growing.row(ids[:end]) for end in ends] == wanted
    assert len(ids) > 5 * TAIL and sum(length > 2 * TAIL for length in lengths) < 9


def test_tokenizers_that_cannot_be_compared_are_refused(kinds):
    plain = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    with refused("words", "share one tokenizer"):
        Translation(kinds["gpt2"], PreTrainedTokenizerFast(tokenizer_object=plain), ("t", "words"))
    plain.decoder = decoders.WordPiece()
    with refused("words", "not known"):
        Translation(PreTrainedTokenizerFast(tokenizer_object=plain), kinds["gpt2"], ("words", "d"))
    with refused("t and d", "no token in common", "another draft"):
        Translation(few(["x", "<e>"]), few(["y", "<end>"]), ("t", "d"))
