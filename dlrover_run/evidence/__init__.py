"""What the kernel knows of the workers: bytes on their connections, processor time, input and output, children."""
