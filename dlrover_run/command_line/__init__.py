"""The command line: cut into flags, read, checked against the disk, explained."""
