"""Stalls of rounds with several nodes as an observer: a round is stalled if no node of it makes progress. Pure."""
