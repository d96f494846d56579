"""A policy for tests: the nodes of a round warm up together before it. It uses ten methods of the policy interface."""
