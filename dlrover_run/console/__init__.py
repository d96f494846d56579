"""The console: the texts that a person reads."""
