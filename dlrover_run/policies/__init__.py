"""Policies: what decides beside the rendezvous, each in a package of its own."""
