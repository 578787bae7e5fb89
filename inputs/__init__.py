"""What the user gives, read and checked: command lines, models, tokenizers, texts, prompts, and files of a hub. What
cannot be used raises a `UserError` of one line."""
