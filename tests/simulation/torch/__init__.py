"""Torch jobs in the simulation: workers that meet at the store of a round, and the health check."""
