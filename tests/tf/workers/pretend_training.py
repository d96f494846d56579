"""A training that is none, for `benchmarks/tf_recovery.py`: a session, steps, and a checkpoint at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "workers"))

from tf_reporting import report

stated = json.loads(os.environ["TF_CONFIG"])
role, rank = stated["task"]["type"], stated["task"]["index"]
report(f"{role}-begun", rank)
report(f"{role}-servers", len(stated["cluster"]["ps"]))
if role == "ps":
    signal.pause()
model = Path(os.environ["MODEL_DIR"])
step = int(model.read_text()) if model.exists() else 0
report(f"{role}-session", rank)
while not Path(os.environ["STOP_FILE"]).exists():
    report(f"{role}-step", rank, step + 1)
    step += role == "chief"
    time.sleep(0.01)
if role == "chief":
    model.write_text(str(step))
