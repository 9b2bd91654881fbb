"""Who may import whom, who may ask the environment, and what every op module exports.

The checks read sources with `ast`, so they need no GPU and no optional package. Each is a function
of one `Source`; `BAD` holds a small source per rule that must be reported.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("m31jax", "custom_calls", "pallas_kernels", "sharding", "serving")

MAY_IMPORT = {
    "serving": {"m31jax"},
    "m31jax": {"pallas_kernels", "custom_calls", "sharding"},
    "pallas_kernels": set(),
    "custom_calls": set(),
    "sharding": set(),
}
"""Package to the other packages that it may import."""

_FORMATS = {"errors", "nvfp4", "mxfp8", "kv_format", "config"}
_TARGET = _FORMATS | {"ops", "switches", "targets", "target"}
_STEPS = _TARGET | {"model", "request", "sampling"}
_LOADING = _TARGET | {"weights", "checkpoint", "presets"}
_HOST = {"errors", "config", "request", "text", "finish", "scheduler"}

MAY_IMPORT_INSIDE = {
    "errors": set(),
    "nvfp4": {"errors"},
    "mxfp8": {"errors", "nvfp4"},
    "kv_format": {"errors", "nvfp4", "mxfp8"},
    "config": {"errors"},
    "ops": _FORMATS,
    "switches": {"errors", "ops"},
    "targets": _FORMATS | {"ops", "target"},
    "target": _TARGET,
    "model": _TARGET,
    "sampling": _TARGET | {"model", "request"},
    "steps": _STEPS,
    "weights": _TARGET,
    "checkpoint": _LOADING,
    "request": {"errors", "config"},
    "text": {"errors", "config"},
    "finish": {"errors", "config", "request", "text"},
    "scheduler": {"errors", "config", "request", "text", "finish"},
    "presets": {"errors", "config"},
    "bundled": {"errors", "config", "presets", "checkpoint"},
    "memory": _LOADING | {"model"},
    "compiles": {"errors"},
    "deployment": _STEPS | _LOADING | {"steps", "bundled", "memory"},
    "runner": _STEPS | _HOST | {"steps"},
    "observe": _STEPS | _HOST | {"steps", "runner"},
    "engine": _STEPS
    | _LOADING
    | _HOST
    | {"steps", "bundled", "memory", "compiles", "deployment", "runner", "observe"},
}
"""Module or folder of m31jax to the others that it may import. The arrows, which are transitive:
engine -> steps -> sampling, model -> target -> ops -> number formats and config;
engine -> checkpoint, weights -> target; engine -> scheduler, text.
`__init__.py`, the public face, may import all of it."""

KERNEL_PACKAGES = {"pallas_kernels", "custom_calls"}
KERNEL_IMPORTERS = {"ops", "target"}
ENVIRONMENT_READERS = {"m31jax/target.py", "m31jax/switches.py"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.putenv"}
DEVICE_READERS = {"m31jax/target.py", "m31jax/engine.py"}
DEVICE_QUERIES = {
    f"jax.{name}"
    for name in (
        "default_backend",
        "devices",
        "local_devices",
        "device_count",
        "local_device_count",
        "process_index",
        "process_count",
    )
}
OPTIONAL = {
    "triton",
    "jax_triton",
    "cutlass",
    "cuda",
    "fastapi",
    "uvicorn",
    "starlette",
    "grpc",
    "google",
    "torch",
    "transformers",
    "pytest",
    "hypothesis",
    "psutil",
}
OP_FACE = ("CELLS", "reference", "make_inputs", "compare", "bytes_moved")


@dataclass(frozen=True)
class Source:
    """One Python file: its path from the repository's root, and its text."""

    path: str
    text: str = field(repr=False)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        return Path(self.path).with_suffix("").parts

    @property
    def package(self) -> str:
        return self.parts[0]

    @property
    def component(self) -> str:
        """The module or folder right below the package."""
        return self.parts[1] if len(self.parts) > 1 else "__init__"

    @cached_property
    def imports(self) -> tuple[tuple[str, bool, int], ...]:
        """(dotted name, is it at module level, line) of everything imported, relative resolved.

        What only a type checker imports is left out.
        """
        types_only = {
            id(node)
            for block in ast.walk(self.tree)
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for node in ast.walk(block)
        }
        inside = {
            id(node)
            for function in ast.walk(self.tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for node in ast.walk(function)
        }
        found = []
        for node in ast.walk(self.tree):
            at_top = id(node) not in inside
            if id(node) in types_only:
                continue
            if isinstance(node, ast.Import):
                found += [(alias.name, at_top, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    above = self.parts[: len(self.parts) - node.level]
                    base = ".".join((*above, *filter(None, [node.module])))
                found += [(f"{base}.{alias.name}", at_top, node.lineno) for alias in node.names]
        return tuple(found)

    @cached_property
    def uses(self) -> tuple[tuple[str, int], ...]:
        """(dotted name, line) of every attribute chain and import, import aliases undone."""
        aliases = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    aliases[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        found = [(name, line) for name, _, line in self.imports]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Attribute):
                chain, value = [node.attr], node.value
                while isinstance(value, ast.Attribute):
                    chain.append(value.attr)
                    value = value.value
                if isinstance(value, ast.Name) and value.id in aliases:
                    found.append((".".join([aliases[value.id], *reversed(chain)]), node.lineno))
        return tuple(found)

    @cached_property
    def definitions(self) -> set[str]:
        """Names bound at module level."""
        names: set[str] = set()
        for node in self.tree.body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Assign(targets=targets):
                    names |= {t.id for t in targets if isinstance(t, ast.Name)}
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.ImportFrom(names=aliases):
                    names |= {alias.asname or alias.name for alias in aliases}
        return names


def package_imports(source: Source) -> Iterator[str]:
    """Packages are imported along the arrows only, and absolutely."""
    allowed = {source.package} | MAY_IMPORT[source.package]
    for name, _, line in source.imports:
        parts = name.split(".")
        if parts[0] in PACKAGES and parts[0] not in allowed:
            yield f"{source.path}:{line}: {source.package} may not import {parts[0]}"
        if parts[0] == "tests":
            yield f"{source.path}:{line}: the packages may not import tests"
        if (
            source.package == "m31jax"
            and parts[0] in KERNEL_PACKAGES
            and source.component not in KERNEL_IMPORTERS
        ):
            yield f"{source.path}:{line}: only {sorted(KERNEL_IMPORTERS)} import {parts[0]}"


def relative_imports(source: Source) -> Iterator[str]:
    """Inside a package imports are relative."""
    for node in ast.walk(source.tree):
        names = []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == source.package:
                yield f"{source.path}:{node.lineno}: import {name} relatively"


def inner_layers(source: Source) -> Iterator[str]:
    """Inside m31jax imports point down."""
    if source.package != "m31jax" or source.component == "__init__":
        return
    if source.component not in MAY_IMPORT_INSIDE:
        yield f"{source.path}: {source.component} has no row in MAY_IMPORT_INSIDE"
        return
    allowed = MAY_IMPORT_INSIDE[source.component] | {source.component}
    for name, _, line in source.imports:
        parts = name.split(".")
        if parts[0] != "m31jax":
            continue
        if len(parts) == 1 or parts[1] not in MAY_IMPORT_INSIDE:
            yield f"{source.path}:{line}: {name} is no module that it may import"
        elif parts[1] not in allowed:
            yield f"{source.path}:{line}: {source.component} may not import {parts[1]}"


def environment(source: Source) -> Iterator[str]:
    """Only target.py, switches.py and serving read the environment."""
    if source.package == "serving" or source.path in ENVIRONMENT_READERS:
        return
    for name, line in source.uses:
        if any(name == read or name.startswith(f"{read}.") for read in ENVIRONMENT):
            yield f"{source.path}:{line}: reads {name}; only target.py and serving may"


def devices(source: Source) -> Iterator[str]:
    """Nothing below the engine and the target asks what machine this is."""
    if source.package == "serving" or source.path in DEVICE_READERS:
        return
    for name, line in source.uses:
        if name in DEVICE_QUERIES:
            yield f"{source.path}:{line}: asks {name}; take it as an argument"


def optional_packages(source: Source) -> Iterator[str]:
    """Optional packages are imported inside functions, but for the files that are nothing else."""
    for name, at_top, line in source.imports:
        root = name.split(".")[0]
        if root not in OPTIONAL or not at_top:
            continue
        is_cute = root in {"cutlass", "cuda"} and source.parts[:2] == ("custom_calls", "cute")
        is_triton = root in {"triton", "jax_triton"} and source.package == "pallas_kernels"
        if is_cute or (is_triton and source.parts[-1].endswith("_triton")):
            continue
        yield f"{source.path}:{line}: imports {root} at module level; it is an extra"


def jax_sharding(source: Source) -> Iterator[str]:
    """`from jax import sharding` would hide our own package of that name."""
    for name, _, line in source.imports:
        if name == "jax.sharding":
            yield f"{source.path}:{line}: write `from jax.sharding import ...`"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname in PACKAGES:
                    yield f"{source.path}:{node.lineno}: {alias.asname} is a package of ours"


def names_of_packages(source: Source) -> Iterator[str]:
    """No module takes a top-level package's name: two names are two module states."""
    for part in source.parts[1:]:
        if part in PACKAGES:
            yield f"{source.path}: {part} is the name of a top-level package"


def lengths(source: Source) -> Iterator[str]:
    """A file past 500 lines is split; a kernel may reach 700."""
    limit = 700 if source.package in KERNEL_PACKAGES else 500
    count = len(source.text.splitlines())
    if count > limit:
        yield f"{source.path}: {count} lines; split it at {limit}"


def stems() -> tuple[str, ...]:
    """`STEMS` of m31jax/ops/__init__.py, the list of ops."""
    path = REPOSITORY / "m31jax" / "ops" / "__init__.py"
    for node in ast.parse(path.read_text("utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="STEMS")], value=value):
                return ast.literal_eval(value)
    raise AssertionError(f"{path} does not define STEMS")


def op_stem(source: Source) -> str | None:
    """The stem that m31jax/ops/<stem>.py or m31jax/ops/<stem>/__init__.py could be the op of."""
    is_face = len(source.parts) == 3 or source.parts[3:] == ("__init__",)
    if source.parts[:2] == ("m31jax", "ops") and is_face and source.parts[2] != "__init__":
        return source.parts[2]
    return None


def op_face(source: Source) -> Iterator[str]:
    """Every op has the same names: its own, and those of OP_FACE; what has cells is a listed op."""
    stem = op_stem(source)
    if stem in stems():
        for name in (stem, *OP_FACE):
            if name not in source.definitions:
                yield f"{source.path}: an op module defines {name}"
    elif stem and "CELLS" in source.definitions:
        yield f"{source.path}: defines CELLS, but STEMS does not list {stem}"


RULES = (
    package_imports,
    relative_imports,
    inner_layers,
    environment,
    devices,
    optional_packages,
    jax_sharding,
    names_of_packages,
    lengths,
    op_face,
)


def shipped() -> list[Source]:
    """Every Python file of the five packages."""
    return [
        Source(path.relative_to(REPOSITORY).as_posix(), path.read_text("utf-8"))
        for package in PACKAGES
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule):
    problems = [problem for source in shipped() for problem in rule(source)]
    assert not problems, "\n" + "\n".join(problems)


def test_all_packages_are_read():
    assert {source.package for source in shipped()} == set(PACKAGES)


def test_every_row_is_of_a_module():
    there = {source.component for source in shipped() if source.package == "m31jax"}
    assert there - {"__init__"} == set(MAY_IMPORT_INSIDE)


def test_layers_have_no_cycle_but_target_and_its_files():
    for name, below in MAY_IMPORT_INSIDE.items():
        for other in below - {name}:
            back = name in MAY_IMPORT_INSIDE.get(other, set())
            assert not back or {name, other} == {"target", "targets"}, (name, other)


def test_test_folders_are_no_packages():
    """A tests/serving/__init__.py could itself become the package `serving`."""
    assert not list((REPOSITORY / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("stem", stems())
def test_each_op_has_a_module_and_a_test_that_drives_its_cells(stem):
    assert stem in {op_stem(source) for source in shipped()}
    test = REPOSITORY / "tests" / "ops" / f"test_{stem}.py"
    assert test.is_file(), f"m31jax/ops/{stem} has no {test.relative_to(REPOSITORY)}"
    assert "CELLS" in test.read_text("utf-8"), f"{test.name} does not drive {stem}.CELLS"


FACE = "CELLS = ()\ndef reference(): ...\ndef make_inputs(): ...\ndef compare(): ...\n"
BAD = [
    (package_imports, "sharding/mesh.py", "from m31jax import config"),
    (package_imports, "pallas_kernels/a.py", "def f():\n    import custom_calls.a"),
    (package_imports, "m31jax/engine.py", "import serving.loop as loop"),
    (package_imports, "serving/demo.py", "from sharding import mesh"),
    (package_imports, "m31jax/engine.py", "from tests.golden import golden_dir"),
    (package_imports, "m31jax/model/moe.py", "from pallas_kernels.moe import moe"),
    (relative_imports, "m31jax/engine.py", "from m31jax.steps import prefill"),
    (relative_imports, "sharding/mesh.py", "import sharding.rules"),
    (inner_layers, "m31jax/ops/a.py", "from ..target import Target"),
    (inner_layers, "m31jax/nvfp4.py", "from .ops import op"),
    (inner_layers, "m31jax/scheduler.py", "def f():\n    from . import engine"),
    (inner_layers, "m31jax/model/moe.py", "from ..weights import MANIFEST"),
    (inner_layers, "m31jax/ops/a.py", "from .. import Engine"),
    (inner_layers, "m31jax/novelty.py", ""),
    (environment, "m31jax/ops/a.py", "import os\nx = os.environ['HOME']"),
    (environment, "m31jax/ops/a.py", "import os as o\nx = o.getenv('HOME')"),
    (environment, "sharding/mesh.py", "from os import environ"),
    (environment, "custom_calls/ffi.py", "import os\nx = os.environ.get('HOME')"),
    (devices, "m31jax/ops/a.py", "import jax\nx = jax.default_backend()"),
    (devices, "sharding/mesh.py", "from jax import devices"),
    (devices, "m31jax/steps.py", "import jax as j\nx = len(j.devices())"),
    (optional_packages, "m31jax/ops/a.py", "import triton"),
    (optional_packages, "pallas_kernels/a.py", "import triton.language as tl"),
    (optional_packages, "custom_calls/a.py", "import cutlass.cute as cute"),
    (optional_packages, "serving/openai.py", "from fastapi import FastAPI"),
    (
        optional_packages,
        "serving/openai.py",
        "try:\n    import grpc\nexcept ImportError:\n    pass",
    ),
    (jax_sharding, "m31jax/steps.py", "from jax import numpy as jnp, sharding"),
    (jax_sharding, "m31jax/steps.py", "import jax.sharding as sharding"),
    (names_of_packages, "m31jax/sharding.py", ""),
    (names_of_packages, "serving/serving/loop.py", ""),
    (lengths, "m31jax/engine.py", "x = 1\n" * 501),
    (lengths, "pallas_kernels/a.py", "x = 1\n" * 701),
    (op_face, "m31jax/ops/mlp.py", FACE + "def mlp(): ..."),
    (op_face, "m31jax/ops/mlp.py", FACE + "def bytes_moved(): ...\ndef b(): ..."),
    (op_face, "m31jax/ops/mlp/__init__.py", FACE + "def bytes_moved(): ..."),
    (op_face, "m31jax/ops/unlisted.py", FACE),
]
GOOD = [
    ("m31jax/ops/mlp.py", FACE + "from ..nvfp4 import pack\ndef bytes_moved(): ...\nmlp = None"),
    ("m31jax/ops/shared.py", "def f():\n    from pallas_kernels import mlp"),
    ("m31jax/target.py", "import os\nimport jax\nx = os.environ, jax.devices()"),
    ("m31jax/engine.py", "from sharding import rules\nfrom .checkpoint.reader import Reader"),
    ("m31jax/__init__.py", "from .engine import Engine"),
    ("m31jax/model/moe.py", "import jax\nx = jax.jit, jax.numpy.devices"),
    ("custom_calls/a.py", "def f():\n    import cutlass"),
    ("custom_calls/cute/a.py", "import cutlass.cute as cute"),
    ("pallas_kernels/a/b_triton.py", "import triton\n" * 700),
    ("serving/openai.py", "import os\nfrom m31jax import Engine\nx = os.environ"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_bad_source_is_reported(rule, path, text):
    assert list(rule(Source(path, text)))


@pytest.mark.parametrize(("path", "text"), GOOD)
def test_good_source_is_not_reported(path, text):
    problems = [problem for rule in RULES for problem in rule(Source(path, text))]
    assert problems == []


def test_every_rule_has_a_bad_source():
    assert {rule for rule, _, _ in BAD} == set(RULES)
