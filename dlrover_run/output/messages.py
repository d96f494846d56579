"""What agent and relay agree on about their messages, which `relay` describes."""

MAX_MESSAGE = 128 * 1024
"""Maximum bytes of a message between agent and relay, in either direction."""

OWN_MESSAGES = 0
"""The number of the source that has the launcher's own messages."""
