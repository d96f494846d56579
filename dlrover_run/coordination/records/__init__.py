"""The records that the processes of a job exchange, and the base classes of what features add to them."""
