"""Run the folder as a program, whose modules find each other under a private name."""

import os
import sys

PACKAGE = "_dlrover_node_check"


def run() -> None:
    """Take orders until there are no more."""
    global __package__
    if not __package__:
        # The folder leads sys.path here, where its modules would take the place of a library's of the same name.
        folder = os.path.dirname(os.path.abspath(__file__))
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != folder]
        package = type(sys)(PACKAGE)
        package.__path__ = [folder]
        sys.modules[PACKAGE] = package
        __package__ = PACKAGE
    from .serving import serve

    serve()


run()
