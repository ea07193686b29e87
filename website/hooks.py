"""Called by mkdocs: adds the generated pages, the pages outside of docs/, and the navigation."""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # mkdocs loads this file by its path

from website.api import api_page  # noqa: E402
from website.methods import method_pages  # noqa: E402
from website.nav import navigation  # noqa: E402
from website.sources import ELSEWHERE, address, file_page, rewritten  # noqa: E402
from website.text import slug  # noqa: E402


def site_pages() -> dict[str, str]:
    """Return every Markdown page of the site by its address."""
    origins = [path for path in ELSEWHERE if (ROOT / path).is_file()]
    origins += [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
    pages, linked = {}, set()
    for origin in origins:
        text = (ROOT / origin).read_text(encoding="utf-8")
        pages[address(origin)], named = rewritten(text, origin)
        linked |= named
    linked |= {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    for path in sorted(linked - set(origins)):
        if not path.startswith("docs/") and (ROOT / path).exists():
            page = file_page(path)
            pages[address(path)] = rewritten(page, path)[0] if path.endswith(".ipynb") else page
    return pages | method_pages() | {"api.md": api_page()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set what YAML cannot say: anchors as on GitHub, and the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages of docs/ by those with rewritten links, and add the others."""
    pages = site_pages()
    for uri, text in pages.items():
        if (known := files.get_file_from_path(uri)) is not None:
            files.remove(known)
        page = File.generated(config, uri, content=text)
        if uri.startswith("files/"):
            page.inclusion = InclusionLevel.NOT_IN_NAV
        files.append(page)
    style = (Path(__file__).parent / "site.css").read_text(encoding="utf-8")
    files.append(File.generated(config, "site.css", content=style))
    config.nav = navigation(set(pages))
    return files


def on_page_context(context: Any, page: Any, config: MkDocsConfig, nav: Any) -> Any:
    """No page can be edited from the site."""
    page.edit_url = None
    return context
