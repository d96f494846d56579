"""The node's part of the check: it inspects its machine, runs the check processes, and shows what came of it."""
