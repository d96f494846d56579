"""The content of the pages: the figures are those of the benchmarks, each page is in the index, and links work."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.doc_pages import DOCS, EXAMPLES, PAGES, README, ROOT, anchors, links

from dlrover_run.command_line.flags import TABLE


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def rows_of(case: str) -> dict[str, Any]:
    """The rows of a benchmark's newest result, by their title."""
    results = ROOT / "benchmarks" / "results"
    files = [file for name in ("launch", "recovery", "tf_recovery") for file in results.rglob(f"{name}.json")]
    cases = [found for file in files for found in json.loads(file.read_text())["cases"] if found["name"] == case]
    (found,) = cases
    return {row["title"]: row for row in found["rows"]}


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("a worker dies", "worker-death"),
        ("a machine is lost", "node-death"),
        ("the network of a machine", "network-cut"),
    ],
)
def test_the_seconds_in_the_readme_are_those_of_the_benchmark(fault: str, case: str) -> None:
    """Within 50 %: repeating the benchmark needs no change of the README while the figures stay similar."""
    rows = rows_of(case)
    (row,) = [line for line in README.read_text().splitlines() if line.startswith(f"| {fault}")]
    _, _, ours, theirs, _ = (cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:])
    forked, spawned = (float(text.split()[0]) for text in ours.split(" / "))
    assert forked == pytest.approx(rows["dlrover-run forkserver"]["median"], rel=0.5)
    assert spawned == pytest.approx(rows["dlrover-run spawn"]["median"], rel=0.5)
    rival = rows["torchrun, own store"]
    if "no step" in theirs:
        assert rival["lost"] == len(rival["samples"])
    else:
        assert float(theirs.split()[0]) == pytest.approx(rival["median"], rel=0.5)


@pytest.mark.parametrize(
    ("fault", "case"),
    [
        ("a server killed, graph mode", "server-death"),
        ("a server killed, `ParameterServerStrategy`", "strategy-server-death"),
        ("from one server to two, graph mode", "planned-change"),
        ("the chief killed, graph mode", "chief-death"),
        ("the chief killed, `ParameterServerStrategy`", "strategy-chief-death"),
    ],
)
def test_the_seconds_of_tf_ps_run_are_those_of_the_benchmark(fault: str, case: str) -> None:
    rows = rows_of(case)
    (line,) = [line for line in (DOCS / "tf-users.md").read_text().splitlines() if line.startswith(f"| {fault} |")]
    titles = ("tf-ps-run forkserver", "tf-ps-run spawn", "plain processes", "TensorFlow by itself")
    for title, cell in zip(titles, line.strip("| ").split("|")[1:], strict=False):
        if cell.strip():
            assert float(re.split("[ ,]", cell.strip())[0]) == pytest.approx(rows[title]["median"], rel=0.5)


def test_the_figures_of_a_start_in_the_readme_are_those_of_the_benchmark() -> None:
    text = " ".join(README.read_text().split())
    found = re.search(
        r"starts a script in (.*?) s \(torchrun: (.*?) s\) and takes (\d+) MiB of memory \(PSS; torchrun: (\d+) MiB\)"
        r".* two workers (\d+) MiB \(torchrun: (\d+) MiB\) \(\[medians of (\d+) runs\]",
        text,
    )
    assert found is not None
    *figures, runs = map(float, found.groups())
    rows = [
        rows_of("first-line")["dlrover-run spawn"],
        rows_of("first-line")["torchrun"],
        rows_of("memory")["dlrover-run spawn"],
        rows_of("memory")["torchrun"],
        rows_of("torch-memory")["dlrover-run forkserver, with the workers"],
        rows_of("torch-memory")["torchrun, with the workers"],
    ]
    for figure, unit, row in zip(figures, [1, 1, *[2**20] * 4], rows, strict=True):
        assert figure == pytest.approx(row["median"] / unit, rel=0.25)
        assert len(row["samples"]) == runs
    joined = re.search(r"joins enlarges the world after (.*?) s / (.*?) s; with torchrun after (.*?) s\.", text)
    assert joined is not None
    growth = rows_of("growth")
    for figure, title in zip(
        joined.groups(), ("dlrover-run forkserver", "dlrover-run spawn", "torchrun, own store"), strict=True
    ):
        assert float(figure) == pytest.approx(growth[title]["median"], rel=0.5)
    assert "about 0.1 s on one machine" in text
    assert rows_of("kill")["dlrover-run forkserver"]["median"] < 0.15


def test_the_libraries_of_forkserver_are_those_of_the_benchmark() -> None:
    (table,) = json.loads((ROOT / "benchmarks/results/forkserver/imports.json").read_text())["tables"]
    results = [(module, version, workers, float(time.split()[0])) for module, version, workers, time in table["rows"]]
    times = {
        how: [seconds for *_, workers, seconds in results if (workers == "forked") is how] for how in (True, False)
    }
    left_out = [f"`{module}`" for module, _, workers, _ in results if workers.startswith("forked without")]
    assert len(left_out) == len(times[False]) == 7, "the page says seven"
    page = " ".join((DOCS / "forkserver.md").read_text().split())
    assert f"Of the {len(results)} modules that" in page
    whole, rest = times[True], times[False]
    assert f"{len(whole)} are in the template: after a kill both workers ran again after" in page
    assert f"after {min(whole):.2f} to {max(whole):.2f} s, {median(whole):.2f} s in the median" in page
    assert f"left out: {', '.join(left_out)}." in page
    assert f"ran again after {min(rest):.1f} to {max(rest):.1f} s, because" in page


def test_the_jobs_that_torchrun_lost_add_up() -> None:
    text = " ".join(README.read_text().split())
    counts = re.search(
        r"of (\d+) jobs with one killed worker, (\d+) continued at .*?, (\d+) at a later one, (\d+) used up .*?, "
        r"and (\d+) hung",
        text,
    )
    assert counts is not None
    jobs, *parts = map(int, counts.groups())
    assert sum(parts) == jobs
    details = (DOCS / "torchrun-differences.md").read_text().partition("### A store for each round")[2]
    assert [int(number) for number in re.findall(r"\b(\d+)\s+(?:jobs|continued|after|used|hung)", details)][:5] == [
        jobs,
        *parts,
    ]


def test_the_readme_is_short() -> None:
    assert len(README.read_text().split()) <= 1250


def test_the_index_has_every_page() -> None:
    assert {DOCS / link.partition("#")[0] for link in links(DOCS / "README.md")} >= set(DOCS.glob("*.md")) - {
        DOCS / "README.md"
    }


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if page.name != "README.md"], ids=name_of)
def test_each_page_begins_with_its_audience(page: Path) -> None:
    assert re.match(r"# .+\n\nFor ", page.read_text())


PEOPLE = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")]
LINKING = [*PAGES, *EXAMPLES, *PEOPLE, ROOT / "benchmarks" / "README.md"]


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_each_link_has_a_target(page: Path) -> None:
    for link in links(page):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_what_contributors_are_to_run_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text() + (ROOT / "SECURITY.md").read_text()
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)\b", text, re.MULTILINE))
    tests = set(re.findall(r"\btests/[\w/.]*\w", text)) | set(re.findall(r"`(test_\w+\.py)`", text))
    assert {"check", "test", "help"} <= targets
    assert len(tests) > 5
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in targets if not re.search(rf"^{name}:", makefile, re.MULTILINE)] == []
    assert [name for name in tests if not (ROOT / name).exists() and not list((ROOT / "tests").rglob(name))] == []


ROOM = re.compile(r"`([a-z_]+(?:/[a-z_]+)*)/`(?: \(((?:`[a-z_]+`(?:, )?)+)\))?")
MODULE = re.compile(r"`([a-z_]+(?:/[a-z_]+)+(?:\.py)?)`")


def exists(path: str) -> bool:
    """Whether that is a folder or a module of the repository, from its top or from that of a package."""
    found = [top / path for top in (ROOT, ROOT / "dlrover_run", ROOT / "tf_ps_runner")]
    return any(place.exists() or place.with_suffix(".py").exists() for place in found)


def test_each_flag_that_torchrun_lacks_is_described() -> None:
    text = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    ours = [flag.name for flag in TABLE if flag.extension]
    assert len(ours) > 30
    assert [name for name in ours if not re.search(rf"--{name}\b(?!-)", text)] == []


NAMED_PAGES = [DOCS / "architecture.md", DOCS / "design-notes.md"]

BARE_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")

NAMES_OF_OTHERS = frozenset({"EINTR", "SA_RESTART", "ld.so", "proctrack/cgroup", "sys.remote_exec"})
"""Names of the kernel, of Python and of Slurm that the product does not use."""


@pytest.fixture(scope="module")
def identifiers() -> set[str]:
    """Each identifier of the product, its tests and its tools, and the name of each of their files."""
    names: set[str] = set()
    for top in ("dlrover_run", "tf_ps_runner", "tests", "scripts", "benchmarks"):
        for file in (ROOT / top).rglob("*"):
            if file.suffix in (".py", ".sh") and file != Path(__file__):
                names |= {file.stem, *re.findall(r"[A-Za-z_]\w*", file.read_text())}
    return names


@pytest.mark.parametrize("page", NAMED_PAGES, ids=name_of)
def test_each_name_in_backticks_is_one_of_the_code(page: Path, identifiers: set[str]) -> None:
    named = set(BARE_NAME.findall(page.read_text())) - NAMES_OF_OTHERS
    assert len(named) > 50
    assert sorted(name for name in named if not set(name.split(".")) - {""} <= identifiers) == []


@pytest.mark.parametrize("page", NAMED_PAGES, ids=name_of)
def test_the_pages_of_the_code_name_folders_and_modules_that_exist(page: Path) -> None:
    text = page.read_text()
    named = {match[1] for match in MODULE.finditer(text)} - NAMES_OF_OTHERS
    for room, modules in ROOM.findall(text):
        named |= {room, *(f"{room}/{module}" for module in re.findall(r"[a-z_]+", modules))}
    assert len(named) > 30
    assert sorted(name for name in named if not exists(name)) == []
