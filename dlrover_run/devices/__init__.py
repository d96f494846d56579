"""Devices: how many a node has, and which processors are near to each."""
