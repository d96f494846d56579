"""Stands for torch where a test needs only a store that listens."""
