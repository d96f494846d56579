"""The data of a job: which part of the input is whose, what of it has been used, and how it is asked for."""
