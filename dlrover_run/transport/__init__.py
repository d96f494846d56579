"""Connections and messages between a node and the master: encoding, authentication, addresses, gRPC setup."""
