"""Stragglers of a round as a policy: for which of its workers the others wait, compared over all nodes. Pure."""
