"""Stragglers of a round as an observer: for which of its workers the others wait, compared over all nodes. Pure."""
