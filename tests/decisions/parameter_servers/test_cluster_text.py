"""Each code of a cluster's text is used, and gets the parameters that its template asks for."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tf_ps_runner import cluster as parameter_servers
from tf_ps_runner.cluster.text import ClusterCode

MODULES = sorted(Path(parameter_servers.__path__[0]).glob("*.py"))


def parameters(template: str) -> set[str]:
    """The parameters that a template asks for, also within the format of another one."""
    found = set()
    for _, name, spec, _ in string.Formatter().parse(template):
        if name is not None:
            found |= {name.split(".")[0]} | parameters(spec or "")
    return found


def codes_in(node: ast.expr) -> list[ClusterCode]:
    """The codes that an expression may come to."""
    if isinstance(node, ast.IfExp):
        return [*codes_in(node.body), *codes_in(node.orelse)]
    is_code = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ClusterCode"
    return [ClusterCode[node.attr]] if is_code and isinstance(node, ast.Attribute) else []


@cache
def calls() -> list[tuple[ClusterCode, set[str | None], str]]:
    """Every call of a code: the parameters that it gives, and where it stands."""
    return list(_calls())


def _calls() -> Iterator[tuple[ClusterCode, set[str | None], str]]:
    for path in MODULES:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            # A code may be chosen first, and be called under the name `code`.
            chosen = [
                code
                for node in ast.walk(function)
                if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "code"
                for code in codes_in(node.value)
            ]
            for node in ast.walk(function):
                if isinstance(node, ast.Call):
                    called = chosen if ast.unparse(node.func) == "code" else codes_in(node.func)
                    for code in called:
                        yield code, {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("code", ClusterCode)
def test_a_code_is_called_with_the_parameters_of_its_template(code: ClusterCode) -> None:
    places = [(given, place) for called, given, place in calls() if called is code]
    assert places, "no decision reports it"
    for given, place in places:
        assert parameters(code.value) <= given, place
