"""Small changes of a function, each of which some test should find.

A change is found by its place in the syntax tree, so it can be made again in another process from the text of the
module. Changes that only alter a text for people (docstrings, annotations, f-strings, calls of a logger) are not made.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_OPPOSITES = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LOGGERS = frozenset({"log", "logger", "_log", "_logger", "LOG"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Mutant(NamedTuple):
    """One change of one function. `function` is the qualified name of the function at the top of the module or of a
    class, `digest` that of its text; `index` is the place of the changed node in it, `variant` which change of the
    node. `lines` are those of the node, `statement` the first line of its statement."""

    module: str
    function: str
    digest: str
    index: int
    variant: int
    operator: str
    change: str
    lines: tuple[int, int]
    statement: int

    @property
    def key(self) -> str:
        """The same as long as the text of the function is."""
        return f"{self.module}::{self.function}#{self.digest}.{self.index}.{self.variant}"

    @property
    def name(self) -> str:
        """How a list of equivalent mutants names it: without a line, which changes with the text above it."""
        return f"{self.module}::{self.function}: {self.change}"


def mutants_of(module: str, source: str) -> list[Mutant]:
    """All mutants of the functions of one module, in the order of the text."""
    found = []
    for name, function in functions(ast.parse(source)):
        digest = hashlib.sha256(ast.dump(function).encode()).hexdigest()[:12]
        for index, node, statement in _places(function):
            for variant, (operator, changed) in enumerate(_variants(node, function)):
                if operator == "arguments swapped" and _is_symmetric(node):
                    continue
                change = f"{operator}: {_text(node)}" + (f" -> {_text(changed)}" if changed is not None else "")
                lines = (node.lineno, node.end_lineno or node.lineno)
                found.append(Mutant(module, name, digest, index, variant, operator, change, lines, statement.lineno))
    return found


def _is_symmetric(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max")


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The syntax tree of the module with the change."""
    tree = ast.parse(source)
    function = dict(functions(tree))[mutant.function]
    node = next(node for index, node, _ in _places(function) if index == mutant.index)
    changed = list(_variants(node, function))[mutant.variant][1]
    new = changed if changed is not None else ast.Pass()
    _Replace(node, ast.copy_location(new, node)).visit(function)
    return ast.fix_missing_locations(tree)


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The functions at the top of a module and of its classes. Of two with one name, as a property and its setter have,
    the last."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in tree.body:
        if isinstance(node, _FUNCTIONS):
            found[node.name] = node
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{inner.name}": inner for inner in node.body if isinstance(inner, _FUNCTIONS)}
    return iter(found.items())


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _places(function: ast.AST) -> Iterator[tuple[int, ast.expr | ast.stmt, ast.stmt]]:
    """The expressions and statements of a function's body that may be changed, numbered, each with its statement."""
    number = 0

    def walk(node: ast.AST, statement: ast.stmt) -> Iterator[tuple[int, ast.expr | ast.stmt, ast.stmt]]:
        nonlocal number
        if isinstance(node, ast.stmt):
            statement = node
        if _is_text(node):
            return
        if isinstance(node, (ast.expr, ast.stmt)):
            number += 1
            yield number, node, statement
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "decorator_list", "type_comment", "pattern", "args") and not (
                field == "args" and isinstance(node, ast.Call)
            ):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, statement)

    assert isinstance(function, _FUNCTIONS)
    for child in function.body:
        yield from walk(child, child)


def _is_text(node: ast.AST) -> bool:
    """Whether it is only for people, or for the type checker."""
    match node:
        case ast.JoinedStr() | ast.Assert() | ast.Import() | ast.ImportFrom():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in _LOGGERS:
            return True
        case ast.Raise(exc=ast.Name(id="NotImplementedError")):
            return True
    return False


def _variants(
    node: ast.expr | ast.stmt, function: ast.FunctionDef | ast.AsyncFunctionDef
) -> Iterator[tuple[str, ast.expr | ast.stmt | None]]:
    """The changes of one node, each with the name of its operator; None for a statement that is removed."""
    match node:
        case ast.Compare():
            for place, operator in enumerate(node.ops):
                for other in _COMPARISONS[type(operator)]:
                    changed = copy.copy(node)
                    changed.ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                    yield "comparison", changed
        case ast.BoolOp():
            yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
            for place in range(len(node.values)):
                rest = node.values[:place] + node.values[place + 1 :]
                yield "operand removed", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield "operator removed", node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC:
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
        case ast.AugAssign():
            if type(node.op) in _ARITHMETIC:
                yield "arithmetic", ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
            yield "statement removed", None
        case ast.Constant():
            yield from (("constant", ast.Constant(value)) for value in _other_values(node.value))
        case ast.Call():
            yield from _other_calls(node)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "return value", ast.Return(ast.Constant(None))
        case ast.Continue():
            yield "continue/break", ast.Break()
        case ast.Break():
            yield "continue/break", ast.Continue()
        case ast.IfExp() if _is_plain(node.test):
            yield "condition", ast.IfExp(_not(node.test), node.body, node.orelse)
        case ast.If() if _is_plain(node.test):
            yield "condition", _with_test(node)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Raise() | ast.Delete():
            yield "statement removed", None
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "statement removed", None
        case ast.Assign(targets=[ast.Name(id=name)]) if _is_set_elsewhere(name, node, function):
            yield "statement removed", None
    if isinstance(node, (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp)):
        for place, generator in enumerate(node.generators):
            if generator.ifs:
                changed_comprehension = copy.copy(node)
                every = ast.comprehension(generator.target, generator.iter, [], generator.is_async)
                changed_comprehension.generators = [
                    *node.generators[:place],
                    every,
                    *node.generators[place + 1 :],
                ]
                yield "filter removed", changed_comprehension


def _other_values(value: object) -> Iterator[bool | int | float | str]:
    match value:
        case bool():
            yield not value
        case int() | float():
            yield value + 1
            if value == 1:
                yield 0
        case str():
            yield "" if value else "mutant"


def _other_calls(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node.func, ast.Name) and node.func.id in _OPPOSITES:
        other = ast.Name(_OPPOSITES[node.func.id], ast.Load())
        yield "opposite function", ast.Call(other, node.args, node.keywords)
    plain = [argument for argument in node.args if not isinstance(argument, ast.Starred)]
    is_same = len(plain) > 1 and ast.dump(plain[0]) == ast.dump(plain[1])
    if len(node.args) > 1 and plain[:2] == node.args[:2] and not is_same:
        swapped = [node.args[1], node.args[0], *node.args[2:]]
        yield "arguments swapped", ast.Call(node.func, swapped, node.keywords)
    for place, keyword in enumerate(node.keywords):
        if keyword.arg is not None:
            rest = node.keywords[:place] + node.keywords[place + 1 :]
            yield "argument removed", ast.Call(node.func, node.args, rest)


def _is_plain(test: ast.expr) -> bool:
    """Whether no other change of this condition negates it."""
    return not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant))


def _not(test: ast.expr) -> ast.expr:
    return ast.UnaryOp(ast.Not(), test)


def _with_test(node: ast.If) -> ast.If:
    return ast.If(_not(node.test), node.body, node.orelse)


def _is_set_elsewhere(name: str, node: ast.Assign, function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether the variable has a value without this statement, so that not each use of it fails."""
    arguments = function.args
    named = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    others = (
        target.id
        for other in ast.walk(function)
        if isinstance(other, (ast.Assign, ast.AnnAssign)) and other is not node
        for target in (other.targets if isinstance(other, ast.Assign) else [other.target])
        if isinstance(target, ast.Name)
    )
    return name in named or name in others


def _text(node: ast.AST) -> str:
    """The node in one short line."""
    shown = node
    if isinstance(node, ast.If):
        shown = node.test
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(shown))).split())
    return text if len(text) <= 140 else f"{text[:137]}..."
