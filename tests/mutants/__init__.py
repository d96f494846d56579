"""Mutants of the modules that decide: which tests find a small change of them. Run by `make mutants`."""
