"""Finds the workers of a training round for which the others wait. Pure: samples and times in, ranks and codes out."""
