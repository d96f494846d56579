"""Keeps the state of the data in a file system that only TensorFlow can access, and restores it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tf_ps_runner.worker import files, shard_state

DIRECTORY = "ram://models/ctr"


class Line:
    """Answers like an agent whose queues are at `place`."""

    def __init__(self) -> None:
        self.place = 0
        self.rolled_back: list[Any] = []

    def request(self, what: str, **fields: Any) -> dict[str, Any]:
        if what == "rollback":
            self.rolled_back.append(fields["state"])
            return {}
        return {"state": {"queues": {"train": {"place": self.place}}}}


line = Line()
shard_state.agent = lambda: line


def save(step: int) -> str:
    path = f"{DIRECTORY}/model.ckpt-{step}"
    shard_state.take(path)
    with tf.io.gfile.GFile(path + ".index", "wb") as index:
        index.write(b"index")
    shard_state.store(path, step)
    return path


tf.io.gfile.makedirs(DIRECTORY)
for line.place in (10, 20, 20, 30):
    newest = save(line.place)
assert sorted(files.list_names(DIRECTORY)) == sorted(
    f"model.ckpt-{step}{end}" for step in (10, 20, 30) for end in (".index", shard_state.SUFFIX)
)

shard_state.restore(newest, 30, "checkpoint")
assert line.rolled_back == [{"queues": {"train": {"place": 30}}}], line.rolled_back

# The saver has removed the oldest checkpoint, and the next save removes its state.
tf.io.gfile.remove(f"{DIRECTORY}/model.ckpt-10.index")
line.place = 40
newest = save(40)
assert not files.exists(f"{DIRECTORY}/model.ckpt-10{shard_state.SUFFIX}")

# A checkpoint without its own state uses that of the newest older one.
files.remove(newest + shard_state.SUFFIX)
shard_state.restore(newest, 40, "checkpoint")
assert line.rolled_back[-1] == {"queues": {"train": {"place": 30}}}
try:
    files.read(f"{DIRECTORY}/nothing")
except FileNotFoundError:
    print("kept and given back")
