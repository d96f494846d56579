"""One thing that is wrong with a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ailment:
    """One thing that is wrong: `text` is one sentence with the figure and what to do, without a full stop.

    `severe` says that training on this machine would fail, hang or come to a wrong result, as its driver says itself;
    then the node is at fault, and leaves. Whatever might only be a nuisance is not, for no healthy node may be sent
    away.
    """

    text: str
    severe: bool = False
