"""Records what the command line of one torchrun takes, as a table for `tests/torchrun/test_torchrun_tables.py`.

    python scripts/record_torchrun.py torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl
    python scripts/record_torchrun.py .venv/lib/python3.11/site-packages

Writes `tests/torchrun/VERSION.json`. The sources are parsed and never imported, so a wheel of any platform will do.
What the parser's source says in a way that is not understood here ends in an error: a table must not be incomplete.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parents[1] / "tests" / "torchrun"
RUN = "torch/distributed/run.py"
SOURCES = (RUN, "torch/distributed/elastic/", "torch/distributed/launcher/")
VARIABLE = re.compile(r"(TORCHELASTIC|TORCH_ELASTIC)_[A-Z_]+")

Sources = Mapping[str, ast.Module]


def sources(place: Path) -> tuple[str, dict[str, ast.Module]]:
    """The version of a torch, and the modules of its launcher by their paths, from a wheel or from site-packages."""
    if place.is_dir():
        version = (place / "torch/version.py").read_text()
        found = {str(path.relative_to(place)): path for path in place.glob("torch/**/*.py")}
        texts = {name: path.read_text() for name, path in found.items() if _is_wanted(name)}
    else:
        with zipfile.ZipFile(place) as wheel:
            version = wheel.read("torch/version.py").decode()
            texts = {name: wheel.read(name).decode() for name in wheel.namelist() if _is_wanted(name)}
    number = re.search(r"__version__ = '([\d.]+)", version)
    if number is None:
        raise SystemExit(f"{place} does not say in torch/version.py which version it is.")
    return number[1], {name: ast.parse(text) for name, text in texts.items()}


def _is_wanted(name: str) -> bool:
    return name.endswith(".py") and name.startswith((*SOURCES, "torch/numa/"))


def flags(modules: Sources) -> list[dict[str, Any]]:
    """The arguments that `get_args_parser` adds, in its order, after the `-h` that argparse adds."""
    function = next(
        node for node in modules[RUN].body if isinstance(node, ast.FunctionDef) and node.name == "get_args_parser"
    )
    table = [{"spellings": ["-h", "--help"], "dest": "help", "action": "help", "variable": None}]
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    added = (call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument")
    return [*table, *(_flag(call, function, modules) for call in added)]


def _flag(call: ast.Call, function: ast.FunctionDef, modules: Sources) -> dict[str, Any]:
    spellings = [ast.literal_eval(word) for word in call.args]
    row: dict[str, Any] = {"spellings": spellings}
    for keyword in call.keywords:
        if keyword.arg in ("action", "type", "nargs") and isinstance(keyword.value, ast.Name):
            row[keyword.arg] = keyword.value.id
        elif keyword.arg == "choices":
            row[keyword.arg] = _choices(keyword.value, function, modules)
        elif keyword.arg not in (None, "help"):
            row[keyword.arg] = ast.literal_eval(keyword.value)
    long = next((word for word in spellings if word.startswith("--")), spellings[0])
    row.setdefault("dest", long.lstrip("-").replace("-", "_"))
    row.setdefault("action", "store")
    row["variable"] = f"PET_{row['dest'].upper()}" if row["action"] in ("env", "check_env") else None
    return row


def _choices(value: ast.expr, function: ast.FunctionDef, modules: Sources) -> list[str]:
    if isinstance(value, ast.Name):
        # `choices` is a variable that is a list in one branch, and what an optional package says in the other.
        lists = (
            node.value
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.List)
            and ast.unparse(node.targets[0]) == value.id
        )
        value = next(lists)
    if isinstance(value, ast.ListComp):
        # [mode.value for mode in AnEnum]
        alias = ast.unparse(value.generators[0].iter)
        return list(_members(alias, modules))
    return list(ast.literal_eval(value))


def _members(alias: str, modules: Sources) -> Iterator[str]:
    for statement in ast.walk(modules[RUN]):
        for name in statement.names if isinstance(statement, ast.ImportFrom) else ():
            if alias == (name.asname or name.name):
                path = f"{statement.module}".replace(".", "/") + ".py"
                enum = next(
                    node for node in modules[path].body if isinstance(node, ast.ClassDef) and node.name == name.name
                )
                members = (node.value for node in enum.body if isinstance(node, ast.Assign))
                yield from (ast.literal_eval(member) for member in members)


def variables(modules: Sources) -> list[str]:
    """The environment variables that the launcher reads, and those of torchelastic that it sets."""
    found: set[str] = set()
    for node in (node for module in modules.values() for node in ast.walk(module)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
            found.add(node.value)
        # os.getenv("NAME"), os.environ.get("NAME"), os.environ["NAME"], "NAME" in os.environ
        asked: list[ast.expr] = []
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.getenv", "os.environ.get"):
            asked = node.args[:1]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "os.environ":
            asked = [node.slice]
        elif isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "os.environ":
            asked = [node.left]
        found.update(word.value for word in asked if isinstance(word, ast.Constant) and isinstance(word.value, str))
    return sorted(found)


def worker_variables(modules: Sources) -> list[str]:
    """The variables that the agent sets for a worker."""
    found: set[str] = set()
    module = modules["torch/distributed/elastic/agent/server/local_elastic_agent.py"]
    named = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def text(word: ast.expr) -> str:
        return text(named[word.id]) if isinstance(word, ast.Name) else str(ast.literal_eval(word))

    for node in ast.walk(module):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(node.value, ast.Dict) and ast.unparse(target) == "worker_env":
                found.update(text(key) for key in node.value.keys if key is not None)
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "worker_env":
                found.add(text(target.slice))
    return sorted(found)


def rendezvous_keys(modules: Sources) -> list[str]:
    """The keys of `--rdzv-conf` that a backend reads."""
    found: set[str] = set()
    for name, module in modules.items():
        for call in (node for node in ast.walk(module) if isinstance(node, ast.Call) and "/rendezvous/" in name):
            asked = ast.unparse(call.func)
            words = [word.value for word in call.args if isinstance(word, ast.Constant) and isinstance(word.value, str)]
            if re.fullmatch(r"(rdzv_)?params\.(config\.)?get(_as_\w+)?", asked):
                found.update(words[:1])
            elif asked == "_get_timeout":
                found.update(f"{word}_timeout" for word in words)
    return sorted(found)


def launch_config(modules: Sources) -> dict[str, str | None]:
    """The fields of `LaunchConfig`, with the source of their defaults."""
    module = modules["torch/distributed/launcher/api.py"]
    record = next(node for node in module.body if isinstance(node, ast.ClassDef) and node.name == "LaunchConfig")
    fields = (node for node in record.body if isinstance(node, ast.AnnAssign))
    return {ast.unparse(field.target): field.value and ast.unparse(field.value) for field in fields}


def main() -> None:
    """Write the table of each place that is named."""
    for place in sys.argv[1:]:
        version, modules = sources(Path(place))
        table = {
            "torch": version,
            "flags": flags(modules),
            "variables": variables(modules),
            "worker_variables": worker_variables(modules),
            "rendezvous_keys": rendezvous_keys(modules),
            "launch_config": launch_config(modules),
        }
        TABLES.mkdir(exist_ok=True)
        (TABLES / f"{version}.json").write_text(json.dumps(table, indent=1) + "\n")
        print(f"tests/torchrun/{version}.json: {len(table['flags'])} flags, {len(table['variables'])} variables")


if __name__ == "__main__":
    main()
