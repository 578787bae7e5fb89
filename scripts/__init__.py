"""Tools for maintainers (`python -m scripts.NAME`): they train models, keep records, and render the documentation."""
