"""The user's input, read and checked: flags, models, texts, and files of a hub. What is invalid raises `UserError`."""
