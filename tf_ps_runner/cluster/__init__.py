"""Jobs with parameter servers: the records of their cluster, and the pure function that decides on it."""
