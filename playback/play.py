"""`play`: continue one prompt on the screen, and write the page that plays it back."""

from __future__ import annotations

import torch

from decoding.interfaces import Drafter
from experiments.prepare import Prepared
from inputs.escape import visible
from methods.selection import build
from playback.page import write_page
from playback.screen import Screen
from playback.trace import Trace, Watched

TITLE = "Speculative decoding, round by round"


def play(prepared: Prepared) -> None:
    """Continue the first prompt by the method that the settings name, as they say: on the screen, or as a page, or
    both. Loads the models."""
    settings, tokenizer = prepared.settings, prepared.tokenizer
    models, name = prepared.load_first(), settings.measuring.played
    assert name is not None, "the settings ask for it"
    watched = []

    def watch(drafter: Drafter) -> Watched:
        watched.append(Watched(drafter))
        return watched[0]

    sampler = build([name], dict(models), settings.decoding, watch)[name]
    screen = Screen(tokenizer) if settings.output.show else None
    trace = Trace(watched[0], screen.round if screen else None)
    prompt = next(iter(prepared.prompts.values()))[0]
    text = tokenizer.decode(prompt)
    generator = torch.Generator(prepared.device).manual_seed(settings.measuring.seed)
    if screen:
        screen.begin(text)
    try:
        max_len, sampling = settings.sampling.max_len_of("show"), settings.sampling.of("show")
        sampler([prompt], max_len, sampling, tokenizer.eos_token_id, generator, trace.callback)
    finally:
        if screen:
            screen.end()
    if settings.output.html:
        names = {role: model.name for role, model in models.items()}
        write_page(settings.output.html, text, trace.rounds, tokenizer, TITLE, names)
        print(visible(f"Written to {settings.output.html}", ""))
