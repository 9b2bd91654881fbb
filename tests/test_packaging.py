"""What ships, who owns its names, and that every module imports without the extras."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("m31jax", "custom_calls", "pallas_kernels", "sharding", "serving")
PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text("utf-8"))
EXTRA_MODULES = (
    *("triton", "jax_triton", "jax_cuda13_plugin", "jax_cuda13_pjrt"),
    *("cutlass", "cuda", "fastapi", "uvicorn", "starlette", "grpc", "google.protobuf"),
    *("pytest", "hypothesis", "psutil", "xdist", "torch", "transformers"),
)
"""Import names of everything the extras bring, and of what other engines need."""

IMPORT_ALL = """
import importlib, importlib.abc, importlib.util, json, pkgutil, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in BLOCKED):
            raise ModuleNotFoundError(f"{name} is blocked by the test", name=name)
        return None

BLOCKED = json.loads(sys.argv[1])
sys.meta_path.insert(0, Blocker())
imported = []
for package in json.loads(sys.argv[2]):
    module = importlib.import_module(package)
    imported.append(package)
    for info in pkgutil.walk_packages(module.__path__, package + "."):
        last = info.name.rpartition(".")[2]
        if last.endswith("_triton") or info.name.startswith("custom_calls.cute"):
            continue
        if last != "__main__":
            importlib.import_module(info.name)
            imported.append(info.name)
print(json.dumps(imported))
"""


def import_all(blocked: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    """Import every module of every package in a new interpreter that cannot import `blocked`."""
    command = [sys.executable, "-W", "error", "-c", IMPORT_ALL]
    return subprocess.run(
        [*command, json.dumps(blocked), json.dumps(PACKAGES)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )


def test_every_module_imports_without_the_extras():
    done = import_all(EXTRA_MODULES)
    assert done.returncode == 0, done.stderr
    assert set(PACKAGES) <= set(json.loads(done.stdout))


def test_the_blocker_blocks():
    done = import_all((*EXTRA_MODULES, "numpy"))
    assert done.returncode != 0
    assert "numpy is blocked by the test" in done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_only_m31jax_owns_the_name(package):
    """Another distribution with a package of this name would shadow an editable install."""
    owners = importlib.metadata.packages_distributions().get(package, [])
    assert set(owners) == {"m31jax"}, f"{package} belongs to {owners}; install with `make test`"


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_imported_is_this_repository(package):
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).is_relative_to(REPOSITORY)


def test_exactly_the_five_packages_ship():
    find = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    assert sorted(find["include"]) == sorted(f"{package}*" for package in PACKAGES)
    top_level = importlib.metadata.distribution("m31jax").read_text("top_level.txt")
    assert top_level is not None
    assert sorted(top_level.split()) == sorted(PACKAGES)


def test_the_command_is_installed():
    (command,) = importlib.metadata.entry_points(group="console_scripts", name="m31jax")
    assert command.value == "serving.__main__:main"
    assert callable(command.load())


def constraints() -> dict[str, str]:
    """Distribution name to its exact version."""
    lines = (REPOSITORY / "constraints.txt").read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    malformed = [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][^\s/:]*", pin)]
    assert not malformed, "constraints.txt holds name==version lines only, no address and no path"
    return {
        canonicalize_name(name): version for name, _, version in (p.partition("==") for p in pins)
    }


def test_constraints_pin_what_pyproject_asks_for():
    pins = constraints()
    project = PYPROJECT["project"]
    for line in project["dependencies"] + project["optional-dependencies"]["test"]:
        wanted = Requirement(line)
        pin = pins.get(canonicalize_name(wanted.name))
        assert pin is not None, f"{wanted.name} has no pin in constraints.txt"
        assert wanted.specifier.contains(pin), f"{line} excludes its pin {pin}"


def test_constraints_pin_everything_the_tests_run_with():
    """A transitive dependency without a pin would change under us from one day to the next."""
    pins = constraints()
    todo, seen = [("m31jax", frozenset({"test"}))], set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        if name != "m31jax":
            assert pins.get(name) == importlib.metadata.version(name), name
        for line in importlib.metadata.requires(name) or []:
            needs = Requirement(line)
            environments = [{"extra": extra} for extra in extras] or [{"extra": ""}]
            if needs.marker is None or any(map(needs.marker.evaluate, environments)):
                todo.append((canonicalize_name(needs.name), frozenset(needs.extras)))
