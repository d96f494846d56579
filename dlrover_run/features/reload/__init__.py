"""Restarts by a save (`--reload`): the workers start again when a file that they have imported changes."""
