"""What the subcommands print or draw: the status of a job, its stacks, and the output of its workers."""
