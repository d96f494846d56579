"""Stalls of rounds with several nodes as a policy: a round is stalled if no node of it makes progress. Pure."""
