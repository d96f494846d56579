"""The pages that are written by their code: docs/rdzv-conf.md and docs/python.md.

    python scripts/reference_pages.py

writes both. Nothing of torch or TensorFlow is imported: the Python API is read as text. The pages are compared with
what this returns by tests/documents/test_reference.py.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import NamedTuple

from dlrover_run.command_line import rdzv_keys
from dlrover_run.command_line.rdzv_conf import Key, Scope

ROOT = Path(__file__).parents[1]

SCOPES: dict[Scope, str] = {
    "any": "any job",
    "coordinated": "a master or etcd",
    "hosted": "a master",
    "leased": "etcd",
}
"""Where a key has an effect, as the page says it."""

MODULES = ("dlrover_run", "dlrover_run.training", "tf_ps_runner.hooks")
"""The modules whose public names a script or a program may use."""

WIDTH = 120
"""Columns of a line of prose."""

MADE_ON_DEMAND = {
    "ElasticHook": "A `tf.compat.v1.train.SessionRunHook` that does nothing, for scripts that name the hook that they "
    "rely on: `tf-ps-run` adds its own one to each `MonitoredSession`.",
}
"""The public names that a module makes when they are read, which have no docstring."""

Definition = ast.ClassDef | ast.FunctionDef
_KEYS = """# Keys of `--rdzv-conf`

For users who look up a key. `--rdzv-conf=key=value,key=value` sets them, for both programs, and
`PET_RDZV_CONF` does for all jobs of a shell. Times are in seconds. *Has an effect with* says in which jobs a key is
read: in any, in those whose nodes meet in a master or in etcd, or only in one of the two; elsewhere it is ignored, with
a warning. A key that no program knows is a warning too.

This page is written by `python scripts/reference_pages.py`, out of the table that the programs read.
"""
_PYTHON = """# Python

For scripts and programs that import something of this package. Every public name is here, with its text from the code;
what is not here may change in any version.

This page is written by `python scripts/reference_pages.py`.
"""


class Public(NamedTuple):
    """A public name, and its definition: None for a name that is made on demand."""

    name: str
    definition: Definition | None


def pages() -> dict[str, str]:
    """The pages, by their names in docs/."""
    return {"rdzv-conf.md": keys_page(), "python.md": python_page()}


def keys_page() -> str:
    defaults = rdzv_keys.defaults()
    table = [key for key in rdzv_keys.TABLE if key.help]
    parts = {
        "Times and limits": [key for key in table if key.name in defaults and not key.needs],
        "For features": [key for key in table if key.needs],
        "Where the nodes meet, and who may join": [key for key in table if key.name not in defaults],
    }
    lines = [_KEYS]
    for title, keys in parts.items():
        lines += [f"## {title}", "", "| key | default | has an effect with | meaning |", "|---|---|---|---|"]
        lines += [_key_row(key, defaults.get(key.name)) for key in keys]
        lines.append("")
    aliases = [f"`{key.name}` is `{key.alias}`" for key in rdzv_keys.TABLE if not key.help and key.alias]
    without = [f"`{key.name}`" for key in rdzv_keys.TABLE if not key.help and not key.alias]
    lines += [
        "## Keys of torchrun",
        "",
        _filled(f"Other names: {', '.join(aliases)}."),
        "",
        _filled(
            f"Checked and then ignored, because existing command lines have them: {', '.join(without)} "
            "([differences to torchrun](torchrun-differences.md))."
        ),
    ]
    return "\n".join(lines) + "\n"


def _key_row(key: Key, default: float | None) -> str:
    shown = "" if default is None else f"{default:g}"
    scope = SCOPES[key.scope] + (f", and `--{key.needs}`" if key.needs else "")
    return f"| `{key.name}` | {shown} | {scope} | {key.help.replace('|', chr(92) + '|')} |"


def python_page() -> str:
    lines = [_PYTHON]
    for module in MODULES:
        tree = _parsed(module)
        lines += [f"## `{module}`", "", _text(tree), ""]
        for public in public_names(module):
            lines += [f"### `{public.name}`", "", *_described(public), ""]
    return "\n".join(lines).rstrip() + "\n"


def public_names(module: str) -> list[Public]:
    """The names in `__all__` of a module, in alphabetical order, and where each is defined."""
    tree = _parsed(module)
    (names,) = (
        [ast.literal_eval(item) for item in node.value.elts]
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.List)
        and ast.unparse(node.targets[0]) == "__all__"
    )
    return [Public(name, _find(tree, name)) for name in sorted(names, key=str.lower)]


def _find(tree: ast.Module, name: str) -> Definition | None:
    """The definition of a name in a module, or in that from which the module imports it."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node
    for part in ast.walk(tree):
        if isinstance(part, ast.ImportFrom) and part.module and name in {alias.name for alias in part.names}:
            return _find(_parsed(part.module), name)
    return None


def _parsed(module: str) -> ast.Module:
    path = ROOT / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text())


def _described(public: Public) -> list[str]:
    node = public.definition
    if node is None:
        return [_filled(MADE_ON_DEMAND[public.name])]
    if isinstance(node, ast.FunctionDef):
        return [_code(_signature(node)), "", _text(node)]
    methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    constructor = next((method for method in methods if method.name == "__init__"), None)
    fields = [ast.unparse(part) for part in node.body if isinstance(part, ast.AnnAssign) and not _is_private(part)]
    made = f"class {node.name}"
    if constructor is not None:
        made = _signature(constructor).replace("__init__", node.name, 1)
    elif fields:
        made = "\n".join([f"class {node.name}:", *(f"    {line}" for line in fields)])
    lines = [_code(made), "", _text(node)]
    for method in methods:
        if method.name.startswith("_") or not ast.get_docstring(method):
            continue
        is_property = any(ast.unparse(mark).endswith("property") for mark in method.decorator_list)
        signature = (
            f"{method.name}: {ast.unparse(method.returns)}" if is_property and method.returns else _signature(method)
        )
        lines += ["", _code(signature), "", _text(method)]
    return lines


def _is_private(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.target).startswith("_")


def _signature(node: ast.FunctionDef) -> str:
    """A function without its `self`, on several lines if it is long."""
    arguments = node.args
    if arguments.args and arguments.args[0].arg in ("self", "cls"):
        arguments = ast.arguments(
            posonlyargs=arguments.posonlyargs,
            args=arguments.args[1:],
            vararg=arguments.vararg,
            kwonlyargs=arguments.kwonlyargs,
            kw_defaults=arguments.kw_defaults,
            kwarg=arguments.kwarg,
            defaults=arguments.defaults,
        )
    returned = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    text = f"{node.name}({ast.unparse(arguments)}){returned}"
    return textwrap.fill(text, WIDTH, subsequent_indent="    ", break_long_words=False)


def _code(text: str) -> str:
    return f"```\n{text}\n```"


def _text(node: Definition | ast.Module) -> str:
    """A docstring as paragraphs; what it has indented is a block of code."""
    parts = inspect.cleandoc(ast.get_docstring(node) or "").split("\n\n")
    return "\n\n".join(_code(textwrap.dedent(part)) if part.startswith("    ") else _filled(part) for part in parts)


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def main() -> None:
    for name, text in pages().items():
        (ROOT / "docs" / name).write_text(text)


if __name__ == "__main__":
    main()
