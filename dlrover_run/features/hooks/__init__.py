"""Hooks: commands of the user that a node runs before a round, after a failure and at the end of the job."""
