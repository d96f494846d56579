"""Output: where each worker's streams go, and the process that copies them to the console."""
