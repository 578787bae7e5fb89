"""`check_room`: whether models can read some prompts and the tokens that are to follow."""

from collections.abc import Sequence

from decoding.interfaces import Reader
from utils import UserError


def check_room(prefixes: Sequence[Sequence[int]], max_len: int, models: Sequence[Reader]) -> None:
    """Raise UserError unless `models` can read every prefix (token ids) and `max_len` tokens more."""
    if max_len < 1:
        raise UserError(f"maxLen must be 1 or more, not {max_len}")
    if not prefixes or not all(prefixes):
        raise UserError("the prompt is empty: give at least one token")
    vocabulary = min(model.vocabulary for model in models)
    if not all(0 <= token < vocabulary for prefix in prefixes for token in prefix):
        raise UserError(f"the prompt holds a token outside the models' vocabulary of {vocabulary}")
    longest, least = max(map(len, prefixes)), min(models, key=lambda model: model.context)
    if longest + max_len > least.context:
        raise UserError(
            f"the prompt's {longest} tokens and maxLen {max_len} exceed the context of {least.name} "
            f"({least.context} tokens): shorten the prompt or lower maxLen"
        )
