"""Torch jobs in the simulation: workers that connect to the store of a round, and the node check."""
