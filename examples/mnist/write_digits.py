"""Write the real handwritten digits that ship inside scikit-learn as directories of PNG files, one folder a digit.

    python write_digits.py mnist_digits

makes `mnist_digits/training/<digit>/*.png` and `mnist_digits/testing/<digit>/*.png`: 1797 images of 8 x 8 pixels,
bright strokes on black as in MNIST, every fifth image of each digit for testing. The directory appears whole or not at
all, whatever happens in between, and one that is there already is left alone.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BRIGHTEST = 16
"""The value of a white pixel in scikit-learn's digits."""

TESTING_SHARE = 5
"""One image in this many is for testing."""


def write_digits(directory: Path) -> None:
    """Make `directory` with the digits in it, unless it exists."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _only_writer_in(directory.parent):
        if directory.exists():
            return
        unfinished = directory.with_name(f".{directory.name}.unfinished")
        # A writer that was killed left this behind; no other process writes it while this one holds the lock.
        shutil.rmtree(unfinished, ignore_errors=True)
        _write_images(unfinished)
        unfinished.rename(directory)


@contextmanager
def _only_writer_in(directory: Path) -> Iterator[None]:
    """Wait until no other process writes digits below `directory`; the kernel frees the lock of a process that dies."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_images(directory: Path) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    seen: Counter[int] = Counter()
    for pixels, label in zip(digits.images, digits.target.tolist(), strict=True):
        part = "testing" if seen[label] % TESTING_SHARE == 0 else "training"
        folder = directory / part / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        rows, columns = pixels.shape
        grey = bytes(round(value * 255 / BRIGHTEST) for value in pixels.flatten().tolist())
        Image.frombytes("L", (columns, rows), grey).save(folder / f"{seen[label]:04d}.png")
        seen[label] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path, help="the directory to make")
    write_digits(parser.parse_args().directory)


if __name__ == "__main__":
    main()
