"""Small tokenizers of four kinds: as GPT-2's, as Qwen2's, as Pythia's (GPT-NeoX) and as Llama's (SentencePiece)."""

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from inputs.files import DATASETS

TEXTS = [str(DATASETS / "sample" / "articles.raw")]
# Qwen2's words: a letter's sign before it is part of it, and every digit is a word.
QWEN2 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def byte_level(size, words=None, end="<|endoftext|>"):
    """As GPT-2's tokenizer; words: another pattern of words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if words:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(words), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"vocab_size": size, "special_tokens": [end], "show_progress": False, "initial_alphabet": alphabet}
    tokenizer.train(TEXTS, trainers.BpeTrainer(**options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=end, eos_token=end)


def gpt_neox(size):
    """As Pythia's: byte-level, and beside the end of text a special token for padding, and runs of spaces, which are
    added tokens and so are found before the text is cut into words."""
    tokenizer = byte_level(size)
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens({"pad_token": "<|padding|>"})
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in (4, 3, 2)])
    return tokenizer


def sentence_piece(size):
    """As Llama's: a space is a letter of its own, one is added in front, and bytes stand for unknown characters."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    special = ["<unk>", "<s>", "</s>"]
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    options = {"vocab_size": size, "special_tokens": [*special, *fallback], "show_progress": False}
    tokenizer.train(TEXTS, trainers.BpeTrainer(**options))
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    tokenizer = Tokenizer.from_str(json.dumps(content | {"pre_tokenizer": None}))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


KINDS = {
    "gpt2": lambda: byte_level(320),
    "qwen2": lambda: byte_level(400, QWEN2, "<|im_end|>"),
    "llama": lambda: sentence_piece(520),
    "pythia": lambda: gpt_neox(360),
}
