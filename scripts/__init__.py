"""Tools for maintainers, run as `python -m scripts.NAME`: they train the bundled models, draw figures, and try
everything at full size."""
