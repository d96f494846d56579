"""Hangs and stragglers: found on a node, judged for the job, explained by stacks."""
