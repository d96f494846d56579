"""Reason codes, and how they are said."""
