"""Backends: where the records of coordination live."""
