"""The workers of a node that run torch: a round of them, their environment, how they start."""
