"""The data of a job: which part of the input is whose, and what of it has been used. Pure."""
