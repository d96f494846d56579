"""Finds the jobs of this machine: those that run, by their agents, and those that have ended, by their event logs."""
