"""The subcommands, how they find and ask the job that a command line means, and what the shell completes."""
