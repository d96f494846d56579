"""A job with a master."""
