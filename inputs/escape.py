"""Text of models, files and users as it is shown: nothing in it moves the cursor, colours the screen or hides."""

import unicodedata


def visible(text, keep="\n"):
    """`text`, escaped wherever it is neither printable nor a kind of space nor in `keep`."""
    return "".join(
        c if c in keep or c.isprintable() or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )
