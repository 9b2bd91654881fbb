"""`tools/find-python`: the interpreter that `make` builds its environment with."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIND_PYTHON = Path(__file__).resolve().parent.parent / "tools" / "find-python"


@pytest.fixture
def folder(tmp_path):
    """A PATH with the few tools that the script uses, and no Python."""
    for name in ("bash", "cat", "grep", "sort"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    return tmp_path


def add(folder, name, line):
    (folder / name).write_text(f"#!{shutil.which('bash')}\n{line}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def find(folder):
    return subprocess.run(
        [folder / "bash", FIND_PYTHON],
        env={**os.environ, "PATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_without_python_it_says_what_to_install(folder):
    done = find(folder)
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: Python 3.12 with its venv module was not found" in done.stderr
    assert "make PYTHON=" in done.stderr


def test_a_shim_that_refuses_and_another_version_are_passed_over(folder):
    add(folder, "python3.12", "echo 'command not found' >&2; exit 127")
    add(folder, "python3", "echo 3.11 >&2; exit 1")
    assert find(folder).returncode == 1
    add(folder, "python", f'exec "{sys.executable}" "$@"')
    done = find(folder)
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable), done.stderr


def test_pyenvs_newest_is_found_behind_its_shim(folder):
    add(folder, "python3.12", "exit 127")
    (folder / "prefix" / "bin").mkdir(parents=True)
    add(folder / "prefix" / "bin", "python", f'exec "{sys.executable}" "$@"')
    listing = "printf '%s\\n' 3.11.7 3.12.1 3.12.10"
    add(
        folder,
        "pyenv",
        f'if [ "$1" = versions ]; then {listing}; '
        f'elif [ "$2" = 3.12.10 ]; then echo "{folder}/prefix"; fi',
    )
    done = find(folder)
    assert (done.returncode, done.stdout.strip()) == (0, sys.executable), done.stderr
