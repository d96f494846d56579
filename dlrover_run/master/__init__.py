"""The built-in master: a process that coordinates any number of jobs, one two-way stream of messages a node."""
