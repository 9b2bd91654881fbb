"""The table of `M31JAX_*` variables: strict, pure, and complete."""

import re
from pathlib import Path

import pytest

from m31jax import switches
from m31jax.errors import TargetError
from m31jax.ops.op import Kind
from m31jax.switches import Switch, read

REPOSITORY = Path(__file__).resolve().parent.parent
OPS = ("index_score", "moe_route", "nvfp4_moe")


def test_nothing_set_gives_the_defaults():
    settings = read({}, OPS)
    assert [(state.name, state.is_on, state.source) for state in settings.states] == [
        (op, True, "default") for op in OPS
    ]
    assert settings.forced == ()
    assert settings.target is None
    assert settings.log_level == "info"
    assert settings.cache_dir == Path.home() / ".cache" / "m31jax"


def test_other_programs_variables_are_not_looked_at():
    assert read({"M31_JAX": "?", "PATH": "/bin", "m31jax_impl": "?"}, OPS) == read({}, OPS)


def test_disable_turns_one_item_off_and_says_where_that_came_from():
    settings = read({"M31JAX_DISABLE_MOE_ROUTE": "1"}, OPS)
    assert not settings.is_on("moe_route")
    assert settings.state("moe_route").source == "M31JAX_DISABLE_MOE_ROUTE=1"
    assert settings.is_on("index_score")


def test_enable_turns_an_opt_in_item_on():
    opt_in = Switch("nvfp4_moe", default=False, why="slower below 64 rows")
    assert not read({}, [opt_in]).is_on("nvfp4_moe")
    settings = read({"M31JAX_ENABLE_NVFP4_MOE": "1"}, [opt_in])
    assert settings.is_on("nvfp4_moe")
    assert settings.state("nvfp4_moe").source == "M31JAX_ENABLE_NVFP4_MOE=1"


def test_rows_of_the_table_are_switches_like_the_ops(monkeypatch):
    row = Switch("overlap_reduce", default=False, why="hides the sum behind the next product")
    monkeypatch.setattr(switches, "ITEMS", (row,))
    assert not read({}, OPS).is_on("overlap_reduce")
    assert read({"M31JAX_ENABLE_OVERLAP_REDUCE": "1"}, OPS).is_on("overlap_reduce")
    with pytest.raises(TargetError, match="there is no op 'overlap_reduce'"):
        read({"M31JAX_IMPL": "overlap_reduce=reference"}, OPS)


def test_impl_forces_kinds_and_the_other_values_pass_through():
    environ = {
        "M31JAX_IMPL": "nvfp4_moe=reference, index_score=pallas",
        "M31JAX_TARGET": "cpu",
        "M31JAX_LOG": "debug",
        "M31JAX_CACHE_DIR": "cache",
    }
    settings = read(environ, OPS)
    assert settings.forced_kind("nvfp4_moe") is Kind.REFERENCE
    assert settings.forced_kind("index_score") is Kind.PALLAS
    assert settings.forced_kind("moe_route") is None
    assert settings.forced[1].source == "M31JAX_IMPL=index_score=pallas"
    assert (settings.target, settings.log_level) == ("cpu", "debug")
    assert settings.cache_dir == Path("cache")


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"M31JAX_DISABEL_MOE_ROUTE": "1"}, "nearest are M31JAX_DISABLE_MOE_ROUTE"),
        ({"M31JAX_DISABLE_MOE_ROUTER": "1"}, "nearest are M31JAX_DISABLE_MOE_ROUTE"),
        ({"M31JAX_IMPLS": "x"}, "nearest are M31JAX_IMPL"),
        ({"M31JAX_": "1"}, "nearest are M31JAX_"),
        ({"M31JAX_QQQQQQQQQQQQQQQQQQQQQ": "1"}, "M31JAX_IMPL, M31JAX_TARGET"),
        ({"M31JAX_DISABLE_MOE_ROUTE": "yes"}, "the only value is 1"),
        ({"M31JAX_DISABLE_MOE_ROUTE": "0"}, "the only value is 1"),
        ({"M31JAX_ENABLE_MOE_ROUTE": ""}, "the only value is 1"),
        (
            {"M31JAX_DISABLE_MOE_ROUTE": "1", "M31JAX_ENABLE_MOE_ROUTE": "1"},
            "contradict each other; unset one",
        ),
        ({"M31JAX_IMPL": "moe_rout=reference"}, "no op 'moe_rout'; the nearest are moe_route"),
        ({"M31JAX_IMPL": "moe_route=cuda"}, "use one of reference, composed, pallas, triton, cute"),
        ({"M31JAX_IMPL": "moe_route"}, "'moe_route' is not op=kind"),
        ({"M31JAX_IMPL": "moe_route=reference,"}, "'' is not op=kind"),
        ({"M31JAX_IMPL": ""}, "'' is not op=kind"),
        ({"M31JAX_IMPL": "moe_route=cute,moe_route=triton"}, "names moe_route twice"),
        (
            {"M31JAX_IMPL": "moe_route=cute", "M31JAX_DISABLE_MOE_ROUTE": "1"},
            "M31JAX_IMPL=moe_route=cute and M31JAX_DISABLE_MOE_ROUTE=1 contradict",
        ),
        (
            {"M31JAX_IMPL": "moe_route=reference", "M31JAX_ENABLE_MOE_ROUTE": "1"},
            "M31JAX_IMPL=moe_route=reference and M31JAX_ENABLE_MOE_ROUTE=1 contradict",
        ),
        ({"M31JAX_LOG": "loud"}, "use one of debug, info, warning, error"),
        ({"M31JAX_TARGET": " "}, "M31JAX_TARGET is set but empty"),
        ({"M31JAX_CACHE_DIR": ""}, "M31JAX_CACHE_DIR is set but empty"),
    ],
)
def test_what_cannot_be_meant_is_refused(environ, message):
    with pytest.raises(TargetError) as caught:
        read(environ, OPS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/var/x"}, Path("/var/x/m31jax")),
        ({"XDG_CACHE_HOME": "relative"}, Path.home() / ".cache" / "m31jax"),
        ({"XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "m31jax"),
        ({"XDG_CACHE_HOME": "/var/x", "M31JAX_CACHE_DIR": "/y"}, Path("/y")),
    ],
)
def test_the_cache_folder(environ, folder):
    assert switches.cache_dir(environ) == folder


def test_forcing_the_reference_of_a_disabled_op_is_no_contradiction():
    environ = {"M31JAX_IMPL": "moe_route=reference", "M31JAX_DISABLE_MOE_ROUTE": "1"}
    assert read(environ, OPS).forced_kind("moe_route") is Kind.REFERENCE


def undeclared(text: str) -> set[str]:
    """Names with our prefix in a text that no row of the table explains."""
    declared = {variable.name for variable in switches.VARIABLES}
    found = set(re.findall(r"\bM31JAX_[A-Z0-9_]*[A-Z0-9]\b", text))
    return {
        name
        for name in found - declared
        if not name.startswith((switches.DISABLE, switches.ENABLE))
    }


def test_every_variable_named_in_the_repository_is_in_the_table():
    names = {".py", ".md", ".toml", ".yaml", ""}
    folders = ("m31jax", "custom_calls", "pallas_kernels", "sharding", "serving", "tools", "tests")
    files = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    files += [*REPOSITORY.glob("*.md"), REPOSITORY / "Makefile", REPOSITORY / ".ci" / "run"]
    for path in files:
        if path.is_file() and path.suffix in names and path != Path(__file__).resolve():
            assert undeclared(path.read_text("utf-8")) == set(), path


def test_that_check_has_teeth():
    assert undeclared("os.environ['M31JAX_FAST'] and M31JAX_LOG") == {"M31JAX_FAST"}
    assert undeclared("M31JAX_DISABLE_MOE_ROUTE=1, M31JAX_DISABLE_<ITEM>, M31JAX_*") == set()
