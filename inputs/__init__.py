"""What the user gives, read and checked: command-line values, models, tokenizers, texts, prompts, and files of a hub.
Whatever cannot be used raises a `UserError` of one line."""
