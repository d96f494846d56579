"""Write a click log in the format of the Criteo Display Advertising set, of which the best possible AUC is known.

    python generate.py criteo_data

makes `criteo_data/train.tsv` and `criteo_data/evaluation.tsv`. Whether a row is clicked is drawn with a probability
that comes from a linear model with factorised pairs of categories, which is what DeepFM can learn. The same seed gives
the same bytes. The directory appears whole or not at all, and one that is there is left alone.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from criteo import COUNTS, area_under_curve

TRAIN_ROWS, EVALUATION_ROWS = 200_000, 20_000
BEST_AUC, CLICKED = 0.806, 0.256
"""Of the truth: what the published models come to is a little below, and the share of clicks of the real set."""

SIZES = (
    *(1000, 580, 1000, 1000, 300, 24, 1000, 630, 3, 1000, 1000, 1000, 1000),
    *(27, 1000, 1000, 10, 1000, 1000, 4, 1000, 18, 15, 1000, 105, 1000),
)
"""Of the vocabularies of the categories: those of the real set, but none above 1000."""

ZIPF = 1.3
"""The k-th most frequent category is k to the power of this less frequent than the first."""

FACTORS = 4
DENSE, PAIRS = 0.42, 0.5
"""How far the counts and the pairs of categories spread the score, where the categories alone spread it by 1."""


@dataclass(frozen=True)
class Truth:
    """What can be known of a log: AUC on its evaluation rows of the probabilities that the labels were drawn from, of
    their linear part, of the counts alone and of labels by chance."""

    clicked: float
    best: float
    linear: float
    counts: float
    permuted: float

    def __str__(self) -> str:
        return (
            f"{self.clicked:.3f} of the rows are clicked. AUC on the evaluation rows: {self.best:.4f} at best, "
            f"{self.linear:.4f} without pairs of categories, {self.counts:.4f} without categories, "
            f"{self.permuted:.4f} with permuted labels"
        )


def generate(directory: Path, seed: int = 1, permute: bool = False) -> Truth:
    """Make `directory`, unless it exists, and say what is known of its rows. With `permute` the labels to train on are
    shuffled, so that there is nothing to learn."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer_in(directory.parent):
        if not directory.exists():
            unfinished = directory.with_name(f".{directory.name}.unfinished")
            # A writer that was killed left this behind; no other process writes it while this one holds the lock.
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            _write(unfinished, np.random.default_rng(seed), permute)
            unfinished.rename(directory)
    return Truth(**json.loads((directory / "truth.json").read_text()))


@contextmanager
def _only_writer_in(directory: Path) -> Iterator[None]:
    """Wait until no other process writes below `directory`; the kernel frees the lock of a process that dies."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write(directory: Path, chance: np.random.Generator, permute: bool) -> None:
    rows = TRAIN_ROWS + EVALUATION_ROWS
    counts, counts_score = _draw_counts(chance, rows)
    categories, linear_score, pairs_score = _draw_categories(chance, rows)
    scores = DENSE * counts_score + linear_score + PAIRS * pairs_score
    draws = chance.random(rows)
    scale, offset = _calibrate(scores[:EVALUATION_ROWS], draws[:EVALUATION_ROWS])
    clicked = draws < _probability(scale * scores + offset)
    evaluation, train = slice(0, EVALUATION_ROWS), slice(EVALUATION_ROWS, rows)
    truth = Truth(
        clicked=float(clicked.mean()),
        best=area_under_curve(scores[evaluation], clicked[evaluation]),
        linear=area_under_curve((DENSE * counts_score + linear_score)[evaluation], clicked[evaluation]),
        counts=area_under_curve(counts_score[evaluation], clicked[evaluation]),
        permuted=area_under_curve(scores[evaluation], chance.permutation(clicked[evaluation])),
    )
    if permute:
        clicked[train] = chance.permutation(clicked[train])
    columns = [np.where(clicked, b"1", b"0"), *counts, *categories]
    for name, part in {"train.tsv": train, "evaluation.tsv": evaluation}.items():
        (directory / name).write_bytes(_tsv([column[part] for column in columns]))
    (directory / "truth.json").write_text(json.dumps(asdict(truth)))


def _draw_counts(chance: np.random.Generator, rows: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The columns of counts as text, and what they add to the score; a missing one adds nothing."""
    columns, score = [], np.zeros(rows)
    for weight in chance.standard_normal(COUNTS):
        size = chance.standard_normal(rows)
        there = chance.random(rows) >= chance.choice([0.0, 0.05, 0.2, 0.45])
        # The score is of the count that is written, and no finer.
        count = np.expm1(np.maximum(1.5 + size, 0)).astype(int)
        score += weight * there * (np.log1p(count) - 1.5)
        columns.append(np.where(there, count.astype("S5"), b""))
    return columns, _spread_by_one(score)


def _draw_categories(chance: np.random.Generator, rows: int) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """The columns of categories as text, what each adds to the score, and what their pairs add."""
    columns, linear = [], np.zeros(rows)
    sums, squares = np.zeros((rows, FACTORS)), np.zeros(rows)
    for size in SIZES:
        share = np.arange(1, size + 1) ** -ZIPF
        category = np.searchsorted(np.cumsum(share / share.sum()), chance.random(rows)).clip(max=size - 1)
        # A category that is missing is one more, with an effect as all others have.
        category[chance.random(rows) < chance.choice([0.0, 0.0, 0.03, 0.4])] = size
        names = np.array([*(b"%08x" % name for name in chance.integers(1 << 32, size=size)), b""])
        linear += chance.standard_normal(size + 1)[category]
        factors = chance.standard_normal((size + 1, FACTORS))[category]
        sums += factors
        squares += (factors**2).sum(1)
        columns.append(names[category])
    # The sum over all pairs of the products of their factors.
    return columns, _spread_by_one(linear), _spread_by_one((sums**2).sum(1) - squares)


def _calibrate(scores: np.ndarray, draws: np.ndarray) -> tuple[float, float]:
    """What to multiply scores with, and what to add then, for the best AUC and the share of clicks that are wanted."""

    def offset_for(scale: float) -> float:
        return _bisect(lambda offset: _probability(scale * scores + offset).mean() - CLICKED, -20, 20)

    def surplus(scale: float) -> float:
        return area_under_curve(scores, draws < _probability(scale * scores + offset_for(scale))) - BEST_AUC

    scale = _bisect(surplus, 0.1, 10)
    return scale, offset_for(scale)


def _bisect(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that rises passes through 0."""
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2


def _probability(score: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-score))


def _spread_by_one(score: np.ndarray) -> np.ndarray:
    return (score - score.mean()) / score.std()


def _tsv(columns: Sequence[np.ndarray]) -> bytes:
    """The columns side by side with tabs between them, without the zeros that numpy fills texts up with."""
    cells = []
    for column in columns:
        cells.append(column.view(np.uint8).reshape(len(column), -1))
        cells.append(np.full((len(column), 1), ord("\t"), np.uint8))
    cells[-1][:] = ord("\n")
    table = np.concatenate(cells, axis=1)
    return table[table != 0].tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="the directory to make")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--permute", action="store_true", help="shuffle the labels to train on: nothing can be learned")
    args = parser.parse_args()
    print(generate(args.directory, args.seed, args.permute))


if __name__ == "__main__":
    main()
