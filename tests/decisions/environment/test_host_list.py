"""Lists of hosts: lists that a generator folds from known hosts are expanded to these hosts again."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest
from support.harness import WAIT

from dlrover_run.environment.host_list import Host, HostListError, expand, find_host, read_hosts

LISTS = 10_000

NAMES = ("n", "gpu", "node-", "rack1-n", "a.b-", "x_", "10.0.0.", "N")


def numbers(draw: random.Random, longest: int) -> tuple[str, list[str]]:
    """The inside of a pair of brackets, and the numbers that it stands for."""
    texts, values = [], []
    for _ in range(draw.randint(1, 4)):
        width = draw.choice((0, 0, 2, 3, 5))
        first = draw.choice((0, 1, 8, 9, 98, 99, 998, draw.randrange(20_000)))
        last = first + min(draw.choice((0, 0, 1, 2, 12, 101)), longest)
        own = [str(number).rjust(width, "0") for number in range(first, last + 1)]
        # Slurm takes the width of the first number for all, so a range begins with its narrowest number.
        texts.append(own[0] if first == last and draw.random() < 0.8 else f"{own[0]}-{own[-1]}")
        values += own
    return ",".join(texts), values


def drawn(draw: random.Random) -> tuple[str, list[str]]:
    """A list in Slurm's syntax, and its hosts."""
    texts, hosts = [], []
    for _ in range(draw.randint(1, 4)):
        text = draw.choice(NAMES)
        names = [text]
        levels = draw.choice((0, 1, 1, 1, 2))
        for level in range(levels):
            middle = draw.choice(("", "-", "-ib")) if level else ""
            inside, own = numbers(draw, 2 if levels > 1 else 101)
            text += f"{middle}[{inside}]"
            names = [f"{name}{middle}{number}" for name in names for number in own]
        if names == [text]:
            text += str(draw.randrange(100))
            names = [text]
        texts.append(text)
        hosts += names
    return ",".join(texts), hosts


def test_ten_thousand_lists_are_expanded() -> None:
    for seed in range(LISTS):
        text, hosts = drawn(random.Random(seed))
        assert expand(text) == hosts, f"seed {seed}: {text}"


@pytest.mark.long
def test_the_expansion_is_that_of_scontrol(tmp_path: Path) -> None:
    """`scontrol show hostnames` needs a configuration, and no controller."""
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        pytest.skip("no Slurm is installed")
    (tmp_path / "slurm.conf").write_text("ClusterName=test\nSlurmctldHost=localhost\n")
    for seed in range(200):
        text, hosts = drawn(random.Random(seed))
        done = subprocess.run(
            [scontrol, "show", "hostnames", text],
            env={"SLURM_CONF": str(tmp_path / "slurm.conf")},
            capture_output=True,
            text=True,
            timeout=WAIT,
            check=True,
        )
        assert done.stdout.split() == hosts == expand(text), f"seed {seed}: {text}"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[01-03,7],gpu[1-2]-ib[0,2]", "n01 n02 n03 n7 gpu1-ib0 gpu1-ib2 gpu2-ib0 gpu2-ib2"),
        ("n[9-11],n[09-11]", "n9 n10 n11 n09 n10 n11"),
        ("localhost", "localhost"),
        ("a,,b", "a b"),
        ("n[1-2]x", "n1x n2x"),
        ("[1-3]", "1 2 3"),
        ("n[001-003]", "n001 n002 n003"),
    ],
)
def test_a_list_in_slurms_syntax(text: str, hosts: str) -> None:
    assert expand(text) == hosts.split()


UNREADABLE = ("n[", "n[1", "n]", "n[]", "n[1-]", "n[-1]", "n[3-1]", "n[1-2", "n[[1]]", "n[a]", "n[1,,2]", "n[1-2-3]")
ALSO_UNREADABLE = ("n[\u0663]", "n[1,1,]", "n[1 - 2]")
TOO_MANY = ["n[0-999999999]", "n[0-999][0-999]", f"n[{'9' * 30}]"]


@pytest.mark.parametrize("text", ["", ",", " ", *UNREADABLE, *ALSO_UNREADABLE, *TOO_MANY])
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(HostListError):
        expand(text)


def test_no_text_makes_anything_but_hosts_or_an_error() -> None:
    for seed in range(5000):
        draw = random.Random(seed)
        text = "".join(draw.choice("n1-[],09 x\n[") for _ in range(draw.randrange(12)))
        try:
            hosts = expand(text)
        except HostListError:
            continue
        assert hosts, text
        assert not [host for host in hosts if not host or set(host) & set("[], \n")], text


def test_a_host_file_in_each_form() -> None:
    eight = [Host("n1", 8), Host("n2", 8)]
    assert read_hosts("# rack\n\nn1 slots=8\n n2  slots = 8 # spare\n") == eight
    assert read_hosts("n1:8\nn2:8\n") == eight
    assert read_hosts("n1\n" * 8 + "n2\n" * 8) == eight
    assert read_hosts("n1\nn2") == [Host("n1"), Host("n2")]
    assert read_hosts("n1 slots=2 max_slots=4\nn2 max-slots=4\n") == [Host("n1", 2), Host("n2", 4)]
    assert read_hosts("10.0.0.1\n[fd00::2]\nfd00::3\n") == [Host("10.0.0.1"), Host("fd00::2"), Host("fd00::3")]


@pytest.mark.parametrize("text", ["", "# nothing\n", "n1;rm\n", "a/b\n", "[x\n"])
def test_what_is_no_host_file_is_refused(text: str) -> None:
    with pytest.raises(HostListError):
        read_hosts(text)


def test_a_host_is_found_with_and_without_its_domain() -> None:
    hosts = ["n1.cluster", "n2.cluster", "N3", "10.0.0.1", "10.0.0.2"]
    found = [find_host(hosts, name) for name in ("n2", "n2.other", "n3.cluster", "10.0.0.2", "n4", "10.0.0.3")]
    assert found == [1, 1, 2, 4, None, None]
    assert find_host(["n1.east", "n1.west"], "n1") is None
