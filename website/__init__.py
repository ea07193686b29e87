"""The generator of the documentation site; `hooks.py` is what mkdocs calls."""
