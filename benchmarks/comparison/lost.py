"""How a run can miss what was to be measured."""

from __future__ import annotations


class Lost(Exception):
    """The run did not do what the case asks for; the message says what happened instead."""


class Late(Lost):
    """The job is still at it, but its time is up."""
