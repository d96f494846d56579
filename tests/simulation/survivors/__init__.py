"""Torch jobs in the simulation whose workers outlive their round: processes, and the groups that they form in place."""
