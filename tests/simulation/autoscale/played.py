"""What came of many worlds: a record of each, kept in a file as it is played, and the tables of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from simulation.autoscale.job import Ours, Published, run
from simulation.autoscale.worlds import HOUR, KINDS, TROUBLES, draw, stationary

GOOD = 0.95
"""The share of the best utility from which the size of a job counts as found."""

STATIONARY_HOURS = 24.0


class Played(msgspec.Struct, frozen=True):
    """One world by both rules. `share` is the utility of the best one, `outside` whether a size was not allowed.

    `changes` are those of the longest search, and `max_changes` how many it may need. A world without trouble is also
    played for a day without drift: `settled` is whether the only search of that day ended in its first half and nothing
    was changed afterwards, and `settled_changes` what it needed. They are None in other worlds.
    """

    seed: int
    kind: str
    trouble: str
    noise: float
    pause: float
    share: float
    outside: bool
    changes: int
    max_changes: int
    published_share: float
    published_outside: bool
    settled: bool | None = None
    settled_changes: int | None = None

    @property
    def found(self) -> bool:
        return self.share >= GOOD and not self.outside

    @property
    def is_within_limit(self) -> bool:
        """Whether no search has made more changes than one may."""
        return max(self.changes, self.settled_changes or 0) <= self.max_changes

    @property
    def found_by_published(self) -> bool:
        return self.published_share >= GOOD and not self.published_outside


def play(seed: int) -> Played:
    """Play the world of that seed."""
    world = draw(seed)
    ours, published = run(world), run(world, Published)
    assert isinstance(ours.chooser, Ours)
    settled, settled_changes = None, None
    if world.trouble == "none":
        day = run(stationary(world, STATIONARY_HOURS))
        assert isinstance(day.chooser, Ours)
        # The first change is to the size with which the job begins.
        settled_changes = len(day.changes) - 1
        settled = day.chooser.has_settled and all(at < STATIONARY_HOURS / 2 * HOUR for at, _ in day.changes)
    return Played(
        seed=seed,
        kind=world.kind,
        trouble=world.trouble,
        noise=round(world.noise, 4),
        pause=round(world.pause, 1),
        share=round(ours.share, 4),
        outside=ours.outside is not None,
        changes=ours.chooser.most_changes,
        max_changes=world.sizes.max_changes,
        published_share=round(published.share, 4),
        published_outside=published.outside is not None,
        settled=settled,
        settled_changes=settled_changes,
    )


def kept(path: Path) -> dict[int, Played]:
    """The worlds of a file, by their seeds. A last line that was cut off does not count."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return {one.seed: one for one in (msgspec.json.decode(line, type=Played) for line in lines)}


def play_all(seeds: Iterable[int], path: Path | None, processes: int) -> Iterator[Played]:
    """Play these worlds, but those of the file, to which the others are added."""
    known = {} if path is None else kept(path)
    missing = []
    for seed in seeds:
        if seed in known:
            yield known[seed]
        else:
            missing.append(seed)
    with ProcessPoolExecutor(processes) as pool:
        for future in as_completed([pool.submit(play, seed) for seed in missing]):
            one = future.result()
            if path is not None:
                with path.open("ab") as file:
                    file.write(msgspec.json.encode(one) + b"\n")
            yield one


def share_of(worlds: Sequence[Played]) -> float:
    """The share of worlds whose size was found."""
    return sum(one.found for one in worlds) / len(worlds)


def percent(some: int, of: int) -> str:
    """A share as text."""
    return f"{100 * some / of:.2f} %" if of else "-"


def row(name: str, worlds: Sequence[Played]) -> str:
    """The row of a table."""
    stationary_ones = [one for one in worlds if one.settled is not None]
    settled = sum(bool(one.settled) for one in stationary_ones)
    within = sum(one.is_within_limit for one in worlds)
    cells = (
        name,
        str(len(worlds)),
        percent(sum(one.found for one in worlds), len(worlds)),
        percent(sum(one.found_by_published for one in worlds), len(worlds)),
        f"{min(one.share for one in worlds):.2f}",
        percent(within, len(worlds)),
        f"{settled} of {len(stationary_ones)}" if stationary_ones else "-",
        str(sum(one.outside for one in worlds)),
        str(sum(one.published_outside for one in worlds)),
    )
    return f"| {' | '.join(cells)} |"


HEAD = (
    "worlds",
    "number",
    "best size found",
    "by the published rule",
    "worst share",
    "searches within the limit",
    "settled for a day",
    "outside",
    "outside, published rule",
)


def noise_class(one: Played) -> str:
    """The noise of a world, as one of four classes."""
    limits = (0.02, 0.05, 0.1)
    text = ["noise up to 2 %", "noise 2 to 5 %", "noise 5 to 10 %", "noise above 10 %"]
    return text[sum(one.noise > limit for limit in limits)]


def pause_class(one: Played) -> str:
    """The pause of a change, as one of three classes."""
    return ["pause 1 to 7 s", "pause 7 to 45 s", "pause 45 to 300 s"][
        min(2, int(3 * math.log(max(1.0, one.pause)) / math.log(300)))
    ]


def table(worlds: Sequence[Played]) -> list[str]:
    """The lines of a table in Markdown: all worlds, and each kind of them."""
    classes: list[tuple[str, Callable[[Played], bool]]] = [("all", lambda one: True)]
    classes += [(kind, lambda one, kind=kind: one.kind == kind) for kind in KINDS]  # type: ignore[misc]
    classes += [
        (f"trouble: {name}", lambda one, name=name: one.trouble == name)  # type: ignore[misc]
        for name in dict.fromkeys(TROUBLES)
    ]
    for classify in (noise_class, pause_class):
        names = sorted({classify(one) for one in worlds})
        classes += [(name, lambda one, f=classify, name=name: f(one) == name) for name in names]  # type: ignore[misc]
    lines = [f"| {' | '.join(HEAD)} |", f"| --- |{' ---: |' * (len(HEAD) - 1)}"]
    for name, belongs in classes:
        own = [one for one in worlds if belongs(one)]
        lines += [row(name, own)] if own else []
    return lines
