"""Between two tokenizers: the tokens both have, and texts in the draft's tokens as its own tokenizer writes them."""

import itertools

import pytest
from conftest import refused
from tokenizerKinds import KINDS, byte_level
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from inputs.files import DATASETS
from methods.otherTokenizer import TAIL, GrowingText, Translation

TEXTS = [
    "The harbour was dark,\nand   café 1987 “old” naïve 漢字 🙂 end",
    " a space, ",
    "a",
    "\n\ttabs  and\r\n\r\nlines ",
]
PAIRS = list(itertools.permutations(KINDS, 2))


@pytest.mark.parametrize("ours, theirs", PAIRS)
def test_a_text_is_written_as_the_drafts_tokenizer_writes_it(kinds, ours, theirs):
    translation = Translation(kinds[ours], kinds[theirs])
    for text in TEXTS:
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
    made = []
    for letter in "xy":
        tokenizer = Tokenizer(models.BPE({letter: 0}, []))
        tokenizer.decoder = decoders.ByteLevel()
        made.append(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    with refused("t and d", "no token in common", "another draft"):
        Translation(*made, ("t", "d"))
