"""What changes in a run whose draft has another tokenizer than the target (methods/otherTokenizer.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from experiments.settings import Settings
from inputs.tokenizers import check_tokenizers, load_tokenizer
from methods.catalogue import METHODS
from methods.translation import Translation
from utils import UserError

LEAST = 0.5  # Where fewer of the text's tokens can be guessed, guessing hardly ever pays.


def with_translation(
    settings: Settings, folders: dict[str, Path], tokenizer: PreTrainedTokenizerBase
) -> tuple[Settings, Translation | None]:
    """The settings and None if all models share the target's `tokenizer`. If the draft has another one: the settings
    with its `Translation` and without perplexity, and the translation.

    Raises UserError for a model that must share it, and for what needs a draft that does.
    """
    own = None
    for role, folder in folders.items():
        theirs = load_tokenizer(folder)
        if role == "draft" and theirs.get_vocab() != tokenizer.get_vocab():
            own = theirs
        else:
            check_tokenizers(tokenizer, theirs, (folders["target"].name, folder.name))
    if own is None:
        return settings, None
    names, measuring = (folders["target"].name, folders["draft"].name), settings.measuring
    differ = f"{names[1]} has another tokenizer than {names[0]}"
    if settings.models.draft_vocab:
        raise UserError(f"{differ}, so it guesses only the tokens that both have; leave out --draftVocab")
    if any(METHODS[name].contrasts for name in measuring.names):
        raise UserError(
            f"{differ}, so they cannot be contrasted (in --contrastive, --diversity, --compare all); leave that out or "
            "name a draft that shares the target's"
        )
    if any(METHODS[name].guesses_tree(settings.decoding) for name in measuring.names):
        raise UserError(f"{differ}, so it grows no trees of guesses (tree, topDown, --tree); name other methods")
    if measuring.ppl and not measuring.modes:
        raise UserError(f"{differ}, so their perplexities cannot be compared; leave out --ppl")
    translation = Translation(tokenizer, own, names)
    decoding = replace(settings.decoding, translation=translation)
    return replace(settings, decoding=decoding, measuring=replace(measuring, ppl=False)), translation


def said_of(translation: Translation, settings: Settings, prompts: Sequence[Sequence[int]]) -> str:
    """One line: what is done, how much both tokenizers share, and whether that is too little to gain."""
    covered = translation.coverage(prompts)
    return (
        f"{translation.names[1]} has another tokenizer than {translation.names[0]}: it guesses the "
        f"{len(translation.draft)} tokens that both have, {translation.share:.1%} of the target's and {covered:.1%} of "
        "those in the prompts."
        + (" That is too few to gain anything." if covered < LEAST else "")
        + (" Perplexities cannot be compared and are left out." if settings.flags["ppl"] else "")
    )
