"""Speculative sampling for `generate` of transformers, loaded by name:

    model.generate(**inputs, custom_generate=FOLDER, trust_remote_code=True, assistant_model=draft, gamma=4)

FOLDER is the folder that holds `custom_generate/`, or its id on the hub. transformers copies this file elsewhere, with
the files beside it that it imports. The project's own folder has none, so there the project must be on Python's path.
`python -m scripts.packGenerate FOLDER` writes a folder that needs nothing else.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

try:  # transformers takes an import outside of `try` for a package to be installed.
    from methods.customGenerate import speculative
except ModuleNotFoundError as error:
    raise ImportError(
        f"{error}: run Python in the project's folder, or load a folder that `python -m scripts.packGenerate` wrote"
    ) from None

OPTIONS = ("gamma", "verify", "vocabulary", "bits")  # of `speculative` in methods/customGenerate.py


def generate(
    inputs: Any = None, *, model: PreTrainedModel, assistant_model: PreTrainedModel | None = None, **arguments: Any
) -> Any:
    """`model.generate` with speculative sampling.

    assistant_model: the draft; None: the model's own copy in few bits. arguments: those of `model.generate`, and
        OPTIONS. Raises ValueError for what cannot be honoured.
    """
    if arguments.pop("assistant_tokenizer", None) is not None:
        raise ValueError("speculative sampling does not support assistant_tokenizer: both models need one tokenizer")
    options = {name: arguments.pop(name) for name in OPTIONS if name in arguments}
    # Of the class: `from_pretrained` replaces `generate` of a model whose folder holds `custom_generate/` by this one.
    decode = speculative(assistant_model, **options)
    return type(model).generate(model, inputs, custom_generate=decode, **arguments)
