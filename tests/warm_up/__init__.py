"""A policy for tests: the nodes of a round warm up together before it. It uses every method of the policy interface."""
