"""In the first round rank 1 fails once rank 0 has reported too; in later rounds all report and wait to be stopped."""

import os
import signal

from post import post

post()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    open("turn").close()
    raise SystemExit(11)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open("turn", "w").close()
signal.pause()
