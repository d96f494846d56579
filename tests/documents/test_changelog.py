"""The fragments of the changelog have a kind that `make changelog` knows, and no bullets of their own."""

from __future__ import annotations

import re
import tomllib

from support.doc_pages import ROOT

FRAGMENTS = sorted(path for path in (ROOT / "changelog.d").iterdir() if path.name != "README.md")
KINDS = [
    kind["directory"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
]


def test_each_fragment_has_a_kind_and_a_text() -> None:
    for fragment in FRAGMENTS:
        assert re.fullmatch(rf"\+[\w-]+\.({'|'.join(KINDS)})\.md", fragment.name), fragment.name
        assert re.match(r"[^-*#\s]", fragment.read_text()), fragment.name


def test_a_version_has_the_parts_that_the_fragments_make() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    named = [kind["name"] for kind in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]]
    first = text.partition("\n## 0.1.0\n")[2].partition("\n## ")[0]
    assert re.findall(r"^### (.*)$", first, re.MULTILINE) == named
    assert "<!-- towncrier release notes start -->" in text.partition("\n## 0.1.0\n")[0]
