"""Descent: whose child a process is, and that nothing a job started outlives its owner."""
