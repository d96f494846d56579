import socket


class TCPStore:
    """Listens as the store of torch does, beside the socket that holds the port."""

    def __init__(self, host, port, is_master, wait_for_workers):
        assert is_master
        assert not wait_for_workers
        self._socket = socket.socket(socket.AF_INET6)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("::", port))
        self._socket.listen()
