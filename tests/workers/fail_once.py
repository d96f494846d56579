"""In the first round rank 1 fails, once rank 0 has reported too; rank 0 then waits to be stopped."""

import os
import signal

from post import post

post(port=os.environ["MASTER_PORT"])
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    # Opening a FIFO waits for the other end, so both ranks are known to have reported.
    if os.environ["RANK"] == "1":
        open("turn").close()
        raise SystemExit(11)
    open("turn", "w").close()
    signal.pause()
