"""Where the reference data made by outside implementations lies."""

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def golden_dir() -> Path:
    """The folder of golden data, `../shared/golden` beside this clone.

    Skips the calling test where the folder is absent; with `CI` set in the environment its absence
    is a failure, so that CI cannot pass by skipping what it exists to check.
    """
    folder = REPOSITORY.parent / "shared" / "golden"
    if folder.is_dir():
        return folder
    reason = "golden data not beside this clone: ../shared/golden"
    if os.environ.get("CI"):
        pytest.fail(f"{reason}; CI must have it")
    pytest.skip(reason)
