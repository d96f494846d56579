"""Hooks of MkDocs for `make docs`: the site also gets what docs/ links to outside of it.

On GitHub a page of docs/ links to the README, the benchmarks' results or an example by a relative path. MkDocs has only
the files below docs/, so each such file is added to the site below `repository/`, and the links are changed to it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
COPIES = "repository/"
"""The folder of the site for what is not below docs/."""

LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")


def _repository_path(source: str) -> str:
    """Return where a file of the site is in the repository."""
    return source.removeprefix(COPIES) if source.startswith(COPIES) else f"docs/{source}"


def _site_path(path: str) -> str:
    """Return where a file of the repository is in the site; a folder is represented by its page or its module."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        names = ("README.md", "__init__.py")
        path = next((f"{path}/{name}" for name in names if (ROOT / path / name).exists()), path)
    # A file without a suffix, such as LICENSE, and a source file are shown by a browser as text.
    return COPIES + path


def _links(text: str, source: str) -> list[tuple[str, str]]:
    """Return each relative link of a page that is not to a heading, with its target in the repository."""
    here = PurePosixPath(_repository_path(source)).parent
    found = []
    for link in LINK.findall(text):
        parts = urlsplit(link)
        if not parts.scheme and parts.path:
            found.append((link, posixpath.normpath(str(here / parts.path))))
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to outside of docs/, and what those link to in turn. MkDocs calls this once a build."""
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        for _, target in _links(page.content_string, page.src_uri):
            added = _site_path(target)
            inside = (ROOT / _repository_path(added)).is_file()
            if added.startswith(COPIES) and inside and files.get_file_from_path(added) is None:
                path = ROOT / _repository_path(added)
                file = File.generated(config, added, abs_src_path=str(path))
                files.append(file)
                if file.is_documentation_page():
                    waiting.append(file)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links that leave docs/, or lead into it, to the site's files. MkDocs calls this for each page."""
    source = page.file.src_uri
    here = posixpath.dirname(source)
    for link, target in _links(markdown, source):
        moved = posixpath.relpath(_site_path(target), here or ".")
        anchor = link.partition("#")[2]
        markdown = markdown.replace(f"]({link})", f"]({moved}{'#' + anchor if anchor else ''})")
    return markdown
