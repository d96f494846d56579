"""The agent: one node's tasks, from the port that is held for each to the report of its end."""
