"""Where each file of the repository is on the site, and pages of files that are no Markdown."""

import json
import posixpath
import re
from pathlib import Path

from website.text import FENCED, LINK, code, fenced

ROOT = Path(__file__).parents[1]
# Markdown outside of docs/, by its address on the site.
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "configs/README.md": "configs.md",
    "examples/plugin/README.md": "plugin.md",
}
LANGUAGES = {".py": "python", ".toml": "toml", ".cff": "yaml", ".yml": "yaml", ".json": "json"}
OUTSIDE = re.compile(r"[a-z]+:")
PIPE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")  # a code span in a table, with a pipe as GitHub wants it


def address(path: str) -> str:
    """Return where a file or folder of the repository is on the site."""
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return f"files/{path}.md"


def rewritten(markdown: str, origin: str) -> tuple[str, set[str]]:
    """Return a page with its links as the site has them, and the files it links to."""
    linked: set[str] = set()
    here = posixpath.dirname(address(origin))

    def moved(link: re.Match[str]) -> str:
        target, _, anchor = link[2].partition("#")
        if OUTSIDE.match(link[2]) or not target:
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(origin), target))
        linked.add(path)
        site = posixpath.relpath(address(path), here or ".")
        return f"{link[1]}{site}{'#' + anchor if anchor else ''}{link[3]}"

    parts = FENCED.split(markdown)
    for number in range(0, len(parts), 2):
        parts[number] = PIPE.sub(_with_pipes, LINK.sub(moved, parts[number]))
    return "".join(parts), linked


def _with_pipes(span: re.Match[str]) -> str:
    """Return a code span whose pipes end no cell; Python-Markdown would show the backslashes."""
    return code(span[0][1:-1].replace("\\|", "|"))


def file_page(path: str) -> str:
    """Return the page of a file, a folder or a notebook of the repository."""
    found = ROOT / path
    if found.is_dir():
        inside = sorted(p for p in found.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        files = [p.relative_to(ROOT).as_posix() for p in inside if p.suffix != ".pyc"]
        return f"# {path}\n\n" + "\n\n".join(f"## {name}\n\n{_content(name)}" for name in files)
    if found.suffix == ".ipynb":
        return _notebook(path)
    return f"# {path}\n\n{_content(path)}\n"


def _content(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return fenced(LANGUAGES.get(Path(path).suffix, "text"), text)


def _notebook(path: str) -> str:
    """Return a notebook's cells; it has no outputs."""
    parts = []
    for one in json.loads((ROOT / path).read_text(encoding="utf-8"))["cells"]:
        text = "".join(one["source"])
        parts.append(text if one["cell_type"] == "markdown" else fenced("python", text))
    parts.append(f"This page is the notebook `{path}`, without its results: run it to see them.")
    return "\n\n".join(parts) + "\n"
