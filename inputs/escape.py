"""Text of models, files and users, made fit to be shown: it cannot move the cursor, colour the screen or hide."""

import unicodedata


def visible(text: str, keep: str = "\n") -> str:
    """`text` with every character escaped that is not printable, not a kind of space and not in `keep`."""
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def one_line(error: BaseException) -> str:
    """An exception's text on one line of at most 200 characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:197] + "..."
