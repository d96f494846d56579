"""The fixtures of the experiments: the digits, and the one cluster that each of them starts."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

if not all(map(importlib.util.find_spec, ("torch", "sklearn", "PIL"))):
    # They train with torch, on the digits of scikit-learn.
    collect_ignore_glob = ["test_*.py"]
else:
    from support.rendezvous_backends import EtcdBackend

    from experiments.experiment import Digits, Experiment

    TRAINING, VALIDATION = 250, 40
    """So many images that no world of the experiments shares them out evenly."""

    @pytest.fixture(scope="session")
    def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
        """Some of the digits, with equal numbers of each as far as possible."""
        directory = tmp_path_factory.mktemp("digits")
        script = Path(__file__).parents[2] / "examples" / "mnist" / "write_digits.py"
        subprocess.run([sys.executable, script, directory / "all"], check=True)
        for part, count in {"training": TRAINING, "testing": VALIDATION}.items():
            for digit in range(10):
                folder = directory / part / str(digit)
                folder.mkdir(parents=True)
                for image in islice(sorted((directory / "all" / part / str(digit)).iterdir()), count // 10):
                    (folder / image.name).symlink_to(image)
        return Digits(directory / "training", directory / "testing", TRAINING)

    @pytest.fixture
    def experiment(request: pytest.FixtureRequest, tmp_path: Path, digits: Digits) -> Iterator[Experiment]:
        """The experiment of one test. Its nodes rendezvous at a master, unless the test names etcd."""
        on_etcd = getattr(request, "param", "master") == "etcd"
        place = EtcdBackend(request.getfixturevalue("shared_etcd")) if on_etcd else None
        with contextlib.closing(Experiment(tmp_path, digits, place)) as one:
            yield one
