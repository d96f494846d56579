"""Key-value stores with leases."""
