"""What one run took more than the run beside it."""

from __future__ import annotations

from collections.abc import Sequence

from comparison.ratios import Sample


def subtract(title: str, more: str, less: str, samples: Sequence[Sample]) -> list[Sample]:
    """For each turn what `more` took longer than `less`, as the runs of a rival `title`.

    A turn in which either was lost or did not end is lost: what it says of the difference is no figure.
    """
    by_turn = {sample.repetition: sample for sample in samples if sample.rival == less}
    found = []
    for sample in samples:
        if sample.rival != more:
            continue
        other = by_turn.get(sample.repetition)
        if other is None:
            continue
        values = None
        if sample.values is not None and other.values is not None and not sample.unended | other.unended:
            values = {"": sample.values[""] - other.values[""]}
        found.append(Sample(title, sample.repetition, values))
    return found
