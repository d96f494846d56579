"""Failures: how a worker exited, why, which worker failed first, and the text that describes it."""
