"""What runs in the process of the relay, and nowhere else."""
