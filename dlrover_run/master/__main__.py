"""`python -m dlrover_run.master`."""

from __future__ import annotations

import gc
import sys

from dlrover_run.processes.asyncio_import import import_asyncio_without_tls

# The nodes wait for the master, and the collector would go through all modules again and again while they are imported;
# the event loop turns it on again.
gc.disable()
if not any(argument.startswith("--web") for argument in sys.argv):
    import_asyncio_without_tls()

from dlrover_run.master.command import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
