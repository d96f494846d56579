"""Runs the folder as a program, whose modules are imported under a private name."""

import os
import sys

PACKAGE = "_dlrover_node_check"


def run() -> None:
    """Process requests until there are no more."""
    global __package__
    if not __package__:
        # Here the folder is the first entry of sys.path, where its modules would shadow a library's of the same name.
        folder = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
        package = type(sys)(PACKAGE)
        package.__path__ = [folder]
        sys.modules[PACKAGE] = package
        __package__ = PACKAGE
    from .protocol import serve

    serve()


run()
