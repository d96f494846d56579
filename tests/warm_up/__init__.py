"""A policy for tests: the nodes of a round warm up together before it. It uses each point of the seam of policies."""
