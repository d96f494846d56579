"""A job whose records are in a key-value store with leases."""
