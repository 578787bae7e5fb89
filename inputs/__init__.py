"""The user's input, read and checked: command lines, models, tokenizers, texts, prompts, and files of a hub. Invalid
input raises a `UserError` of one line."""
