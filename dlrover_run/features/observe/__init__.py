"""What the workers do, as figures: the progress page of each worker, and the rhythm of its steps."""
