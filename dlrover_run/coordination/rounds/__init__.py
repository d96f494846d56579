"""Rounds of workers: gathered, formed, changed as planned, and ended by what fails. Pure."""
