"""A gRPC server that answers `GetStatus` as TensorFlow's does, or refuses it: `python pretend_server.py HOW`.

It prints its port, and ends with its standard input.
"""

from __future__ import annotations

import sys
from concurrent import futures
from typing import Any

import grpc

METHOD = "/tensorflow.WorkerService/GetStatus"


class _Service(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        if details.method != METHOD or sys.argv[1] == "refuse":
            return None
        return grpc.unary_unary_rpc_method_handler(lambda request, context: b"")


server = grpc.server(futures.ThreadPoolExecutor(1), handlers=[_Service()])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
sys.stdin.read()
