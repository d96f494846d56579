"""Finds out that the workers of a round make no progress, and which of them does not wait. Pure."""
