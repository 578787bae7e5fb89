"""Tools for maintainers, run as `python -m scripts.NAME`: train the bundled models, draw figures, try everything at full
size."""
