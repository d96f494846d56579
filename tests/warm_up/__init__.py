"""A gate for tests: the nodes of a round warm up together before it."""
