"""The parts of `benchmarks/rendezvous.py`: crowds of nodes, what they meet at, one trial, and the picture."""
