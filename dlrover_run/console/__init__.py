"""The console: the text that the user reads."""
