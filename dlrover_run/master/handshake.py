"""The opening of a stream: who comes, for which job, and whether he may. Pure; one for each stream."""

from __future__ import annotations

from dlrover_run.transport import auth
from dlrover_run.transport.messages import PROTOCOL, Challenge, Hello, Join, NodeMessage, Proof, Refused

JOIN_TIMEOUT = 10.0
"""Seconds from the opening of a stream until its `Join`; one that takes longer is ended.

A node needs two round trips. This bounds how long a stranger can hold a place.
"""

MAX_HANDSHAKE_MESSAGE = 16 * 1024
"""Bytes of a message of one who has not proved himself: several times the longest that there can be."""

MAX_ERROR_TEXT = 500
"""Characters of what is told of a defect of the master's own, so that the rest of the sentence is told as well."""

TOKEN_REMEDY = (
    "give every node and the master the same token in DLROVER_RDZV_TOKEN, in the file that DLROVER_RDZV_TOKEN_FILE "
    "names, or by --rdzv-conf token_file=PATH"
)


class RequestRefused(Exception):
    """A stream that has to end; `last_word` is what the node is told."""

    def __init__(self, reason: str, retry: bool = False) -> None:
        super().__init__(reason)
        self.last_word = Refused(reason[:2000], retry)


def internal_error(defect: Exception) -> str:
    """A sentence about a defect of the master's own. Nodes are told it too: a hosted master has no other reader."""
    return f"internal error of the master: {repr(defect)[:MAX_ERROR_TEXT]}; please report it"


class Handshake:
    """Judges a stream's first three messages. `nonce` is random and new with each stream."""

    def __init__(self, token: str, nonce: str) -> None:
        self._token = token
        self._nonce = nonce

    def greet(self, message: NodeMessage) -> Hello:
        """Take the first message. Raises RequestRefused."""
        if not isinstance(message, Hello):
            raise _out_of_order(message, "hello")
        if message.protocol != PROTOCOL:
            raise RequestRefused(
                f"this master speaks protocol {PROTOCOL} and the node {str(message.protocol)[:20]}: install one "
                "version of dlrover-run on all nodes"
            )
        return message

    def challenge(self) -> Challenge:
        """The answer to the first message."""
        return Challenge(self._nonce)

    def admit(self, hello: Hello, message: NodeMessage) -> Proof:
        """Check the node's proof; the master's own in return. Raises RequestRefused when the node's is none."""
        if not isinstance(message, Proof):
            raise _out_of_order(message, "proof")
        if not auth.macs_equal(message.mac, auth.node_mac(self._token, hello, self._nonce)):
            raise RequestRefused(self._wrong_token(message))
        return Proof(auth.master_mac(self._token, hello, self._nonce))

    def join(self, hello: Hello, message: NodeMessage) -> Join:
        """Take the node's first status. Raises RequestRefused."""
        if not isinstance(message, Join):
            raise _out_of_order(message, "join")
        if message.status.key != (hello.node_id, hello.incarnation):
            raise RequestRefused("a node may only speak of itself, and this one said hello under another name")
        return message

    def _wrong_token(self, message: Proof) -> str:
        if not self._token:
            return f"this node has a token and the master has none: {TOKEN_REMEDY}"
        if not message.mac:
            return f"the master asks for the job's token and this node has none: {TOKEN_REMEDY}"
        return f"this node's token is not the master's: {TOKEN_REMEDY}"


def _out_of_order(message: NodeMessage, wanted: str) -> RequestRefused:
    return RequestRefused(f"the node sent {type(message).__name__.lower()} where {wanted} was expected")
