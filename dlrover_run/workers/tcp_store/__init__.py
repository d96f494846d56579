"""The store of a round: a server of the protocol that the clients of torch's TCPStore speak.

An agent runs it as a process without site packages, so it imports nothing but the standard library. `parser` reads
commands, `state` answers them; both are pure. `server` has the sockets.
"""
