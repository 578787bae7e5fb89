"""`play`: continue one prompt on the screen, and write the page that plays it back."""

import torch

from decoding.interfaces import Drafter
from experiments.prepare import Prepared
from inputs.escape import visible
from methods.selection import build
from report.playback import Screen, Trace, Watched, write_page


def play(prepared: Prepared) -> None:
    """Decode the first prompt by the method that the settings name; load the models for it."""
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
        title = "Speculative decoding, round by round"
        write_page(settings.output.html, text, trace.rounds, tokenizer, title, names)
        print(visible(f"Written to {settings.output.html}", ""))
