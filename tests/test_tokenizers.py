"""Tokenizers: the broken ones are refused, and the most frequent tokens are the most frequent."""

import json

import pytest
from conftest import END_OF_TEXT, VOCABULARY, refused
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from inputs.models import check_tokenizers, end_tokens, load_tokenizer, most_frequent
from inputs.texts import encode, load_corpora


def test_a_lost_or_garbled_tokenizer_is_refused(model_folder):
    """With no files at all the library makes up an empty tokenizer."""
    for file in model_folder.glob("tokenizer*"):
        file.unlink()
    for content in None, b"{", b'{"model": 3}', b"\xff":
        if content is not None:
            (model_folder / "tokenizer.json").write_bytes(content)
        with refused(str(model_folder), "download its tokenizer.json"):
            load_tokenizer(model_folder)


def test_tokenizers_that_differ_are_refused_with_how(pair_folder, model_folder):
    ours, theirs = load_tokenizer(pair_folder / "target"), load_tokenizer(pair_folder / "draft")
    check_tokenizers(ours, theirs)
    theirs.add_tokens(["zebra\n"])
    with refused("big (300 tokens)", "small (301)", f"id {VOCABULARY} ('zebra\\n')", "share one tokenizer"):
        check_tokenizers(ours, theirs, ("big", "small"))
    # As many tokens, the same ones, but two of them exchanged.
    file = model_folder / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content))
    with refused("(300 tokens)", "(300)", f"id {min(vocabulary['a'], vocabulary['b'])} ("):
        check_tokenizers(ours, PreTrainedTokenizerFast(tokenizer_file=str(file)))


def test_every_token_that_the_model_or_its_tokenizer_names_ends_a_text(model_folder):
    file, other = model_folder / "generation_config.json", model_folder / "config.json"
    tokenizer, about = load_tokenizer(model_folder), json.loads(other.read_text())
    for generation, config, ends in (
        ([5, 7], 3, {0, 5, 7}),
        (9, [3, 4], {0, 9}),
        ({}, 3, {0, 3}),
        (None, [3, 4], {0, 3, 4}),  # as transformers does where there is no generation_config.json
        (None, None, {0}),
    ):
        file.write_text(json.dumps(generation if generation == {} else {"eos_token_id": generation}))
        if generation is None:
            file.unlink()
        other.write_text(json.dumps(about | {"eos_token_id": config}))
        assert end_tokens(model_folder, tokenizer) == ends
    for content in '{"eos_token_id": ["5"]}', '{"eos_token_id": true}', "[]x", "[1.5]":
        file.write_text(content)
        with refused("generation_config.json", "download it again"):
            end_tokens(model_folder, tokenizer)


def test_the_most_frequent_tokens_of_the_sample_texts(pair_folder):
    tokenizer = load_tokenizer(pair_folder / "target")
    ids = [i for corpus in load_corpora("sample") for text in corpus.documents for i in tokenizer(text)["input_ids"]]
    counts = [ids.count(i) for i in range(len(tokenizer))]
    ranked = sorted(range(len(tokenizer)), key=lambda i: (i != tokenizer.eos_token_id, -counts[i], i))
    assert counts.count(0) > 1  # the order of the unseen shows
    for count in 1, 2, 50, len(tokenizer) - 1, len(tokenizer):
        assert most_frequent(count, tokenizer, VOCABULARY, [tokenizer.eos_token_id]).tolist() == sorted(ranked[:count])
    rare = ranked[-1]
    assert most_frequent(3, tokenizer, VOCABULARY, [rare, 0, VOCABULARY + 5]).tolist() == sorted([0, ranked[1], rare])
    with refused("--draftVocab 301", "300"):
        most_frequent(301, tokenizer, VOCABULARY, [])


@pytest.mark.parametrize("before", [[], [END_OF_TEXT]])
def test_a_token_added_after_a_text_is_left_out(model_folder, before):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(model_folder)
    plain = tokenizer("The lamp")["input_ids"]
    end = (END_OF_TEXT, tokenizer.eos_token_id)
    single = [*before, "$A", END_OF_TEXT]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=[end])
    tokenizer.save_pretrained(model_folder)
    assert PreTrainedTokenizerFast.from_pretrained(model_folder)("The lamp")["input_ids"][-1] == end[1]
    assert encode(["The lamp"], load_tokenizer(model_folder)) == [[end[1]] * len(before) + plain]
