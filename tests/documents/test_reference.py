"""The pages that scripts/reference_pages.py writes are those of this code, and have every key and public name."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
from support.doc_pages import DOCS, ROOT
from support.golden import assert_golden

from dlrover_run.command_line import rdzv_keys

_FILE = ROOT / "scripts" / "reference_pages.py"
_SPEC = importlib.util.spec_from_file_location("reference_pages", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
reference_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference_pages)


@pytest.mark.parametrize("name", ["rdzv-conf.md", "python.md"])
def test_a_page_is_fresh(name: str) -> None:
    assert_golden(DOCS / name, reference_pages.pages()[name])


def test_every_key_is_on_the_page() -> None:
    page = (DOCS / "rdzv-conf.md").read_text()
    assert [key.name for key in rdzv_keys.TABLE if f"`{key.name}`" not in page] == []


@pytest.mark.parametrize("module", reference_pages.MODULES)
def test_every_public_name_is_on_the_page_with_a_text(module: str) -> None:
    part = (DOCS / "python.md").read_text().partition(f"\n## `{module}`\n")[2].partition("\n## ")[0]
    for name in importlib.import_module(module).__all__:
        section = part.partition(f"\n### `{name}`\n")[2].partition("\n### ")[0]
        without_code = "".join(section.split("```")[::2])
        assert without_code.strip(), name
