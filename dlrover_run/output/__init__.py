"""Output: where each worker's streams go, and the relay process that copies them to the console."""
