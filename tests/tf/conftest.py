"""Tests with real TensorFlow processes.

They share what lies in `tests/` (`harness`, `cluster` and the others), which the conftest there puts on the path.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from interpreters import python_215, python_221


@pytest.fixture
def tf221() -> Path:
    """An interpreter with TensorFlow 2.21 and tf-keras."""
    return python_221()


@pytest.fixture
def tf215() -> Path:
    """An interpreter with TensorFlow 2.15 and its estimator."""
    return python_215()
