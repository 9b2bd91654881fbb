"""The target of a machine: what is refused, what is switched, which number formats follow."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from m31jax import Engine, target
from m31jax.errors import TargetError
from m31jax.kv_format import KVFormat
from m31jax.ops import STEMS
from m31jax.ops.op import Impl, Kind
from m31jax.presets import FORMATS, FULL, TINY
from m31jax.target import Numerics, Target, TargetData, load_data, names
from tests import engines
from tests.engines import MINI

NO_SWITCHES: dict[str, str] = {}
GPU = TargetData(
    arch="sm_90",
    platform="cuda",
    widths=(1, 2),
    dtype="bfloat16",
    impls={"index_score": Impl(Kind.TRITON, "sm_90", (64, 4))},
    row_buckets=(8,),
    prefill_chunk=512,
    is_exact=False,
)


@pytest.fixture
def gpu_target(monkeypatch):
    """A target for another back end, known by the name `gpu`."""
    monkeypatch.setattr(target, "load_data", lambda name: GPU if name == "gpu" else load_data(name))


# Choosing


def test_this_machine_takes_the_reference_openly():
    resolved = Target.resolve(environ=NO_SWITCHES)
    assert (resolved.name, resolved.arch, resolved.tp, resolved.dtype) == (
        "cpu",
        "cpu",
        1,
        "float32",
    )
    assert resolved.is_exact
    assert {impl for _, impl in resolved.impls} == {Impl(Kind.REFERENCE, "cpu")}
    assert [op for op, _ in resolved.impls] == list(STEMS)
    assert {why for _, why in resolved.reasons} == {"targets/cpu: no faster one"}


def test_unknown_targets_are_refused_with_the_known_ones():
    with pytest.raises(
        TargetError, match=f"unknown target 'tpu'; known targets: {', '.join(names())}"
    ):
        Target.resolve(1, "tpu", NO_SWITCHES)
    with pytest.raises(TargetError, match="unknown target 'h900'"):
        Target.resolve(environ={"M31JAX_TARGET": "h900"})


def test_the_argument_wins_over_the_variable():
    assert Target.resolve(1, "cpu", {"M31JAX_TARGET": "h900"}).name == "cpu"
    assert Target.resolve(environ={"M31JAX_TARGET": "cpu"}).settings.target == "cpu"


def test_a_gpu_target_never_falls_back(gpu_target):
    with pytest.raises(
        TargetError, match=r"gpu needs the cuda back end.*has cpu; use --target cpu"
    ):
        Target.resolve(1, "gpu", NO_SWITCHES)


@pytest.mark.parametrize(("name", "tp"), [("cpu", 0), ("cpu", 3), ("cpu", 16), ("gpu", 4)])
def test_widths_a_target_is_not_for(name, tp, gpu_target):
    allowed = ", ".join(map(str, target.load_data(name).widths))
    with pytest.raises(TargetError, match=rf"tp={tp}: target {name} is for tp in \({allowed}\)"):
        Target.resolve(tp, name, NO_SWITCHES)


def test_too_few_devices(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: ["one", "two"])
    with pytest.raises(TargetError, match=r"tp=4 needs 4 devices, 2 found.*device_count=4"):
        Engine.load(engines.checkpoint("mini", "bf16"), tp=4, progress=False)


def test_a_target_of_an_op_that_is_none(monkeypatch):
    wrong = replace(GPU, platform="cpu", impls={"index_scores": Impl(Kind.TRITON)})
    monkeypatch.setattr(target, "load_data", lambda _: wrong)
    with pytest.raises(TargetError, match="names no op of m31jax: index_scores"):
        Target.resolve(1, "gpu", NO_SWITCHES)


@pytest.mark.parametrize("name", names())
def test_target_files(name):
    data = load_data(name)
    assert set(data.impls) <= set(STEMS)
    assert set(data.widths) <= set(target.WIDTHS)
    assert list(data.row_buckets) == sorted(set(data.row_buckets))
    assert all(rows % 8 == 0 for rows in (*data.row_buckets, data.prefill_chunk))
    hash(Target._build(name, data, 1, Target.resolve(1, "cpu", NO_SWITCHES).settings))


def test_row_parallel_products_are_cut_into_eight_over_all_ranks():
    cut = {
        tp: Target.resolve(tp, "cpu", NO_SWITCHES).slices(2048 // tp) * tp for tp in (1, 2, 4, 8)
    }
    assert set(cut.values()) == {8}
    assert Target.resolve(1, "cpu", NO_SWITCHES).slices(48, 20) == 4


# Switches


@pytest.mark.parametrize("op", STEMS)
def test_every_op_has_a_kill_switch_that_explain_lists(op, monkeypatch):
    everything = replace(GPU, platform="cpu", impls={s: Impl(Kind.TRITON, "sm_90") for s in STEMS})
    monkeypatch.setattr(target, "load_data", lambda _: everything)
    switch = f"M31JAX_DISABLE_{op.upper()}"
    told = Target.resolve(1, "gpu", {switch: "1"}).explain()
    assert told["ops"].pop(op) == {"kind": "reference", "arch": "sm_90", "why": f"{switch}=1"}
    assert told["switches"].pop(op) == {"on": False, "source": f"{switch}=1"}
    fast = {"kind": "triton", "arch": "sm_90", "why": "targets/gpu"}
    assert told["ops"] == {other: fast for other in STEMS if other != op}
    default = {"on": True, "source": "default"}
    assert told["switches"] == {other: default for other in STEMS if other != op}


def test_forcing_an_implementation():
    resolved = Target.resolve(environ={"M31JAX_IMPL": "mlp=reference,linear=cute"})
    assert resolved.impl("linear") == Impl(Kind.CUTE, "cpu")
    told = resolved.explain()["ops"]
    assert told["linear"]["why"] == "M31JAX_IMPL=linear=cute"
    assert told["mlp"] == {"kind": "reference", "arch": "cpu", "why": "M31JAX_IMPL=mlp=reference"}
    assert told["rms_norm"]["why"] == "targets/cpu: no faster one"


@pytest.mark.parametrize("op", STEMS)
def test_an_implementation_that_an_op_lacks_is_named_not_replaced(op, monkeypatch):
    """The step refuses while it is traced; nothing runs with another implementation instead."""
    monkeypatch.setenv("M31JAX_IMPL", f"{op}=cute")
    engine = Engine.load(engines.checkpoint("mini", "bf16"), max_seq_len=128, progress=False)
    assert engine.explain()["ops"][op]["kind"] == "cute"
    with pytest.raises(NotImplementedError, match=rf"{op} has no cute implementation for cpu"):
        engine.generate([engines.prompt(3)])


@pytest.mark.parametrize("rest", ["DISABLE_INDEX_SCOER", "IMPLS", "X"])
def test_unknown_variables_stop_the_load(rest, monkeypatch):
    name = "M31JAX_" + rest
    monkeypatch.setenv(name, "1")
    with pytest.raises(TargetError, match=f"{name} is not a variable of m31jax"):
        Engine.load(engines.checkpoint("mini", "bf16"), progress=False)


def test_explain_is_data():
    told = engines.mini(max_seq_len=128).explain()
    assert told["target"] == "cpu"
    assert set(told["ops"]) == set(told["switches"]) == set(STEMS)
    assert told["memory"]["max_seq_len"] == 128
    assert told["page_buckets"] == [8]
    assert told["numerics"]["kv_dtype"] == "f32"


# Number formats

M31 = replace(TINY, quantization=FORMATS["nvfp4"])
M3_SHAPE = replace(M31, sparse_layers=(False, True, True, True))


@pytest.mark.parametrize(
    ("config", "dtype", "cache", "is_vendor"),
    [
        (M31, "float32", "nvfp4", True),
        (M31, "bfloat16", "nvfp4", True),
        (replace(FULL, quantization=FORMATS["nvfp4"]), "bfloat16", "nvfp4", True),
        (M3_SHAPE, "bfloat16", "bf16", True),  # NVFP4 experts, but no M3.1
        (replace(TINY, quantization=FORMATS["mxfp8"]), "bfloat16", "bf16", False),
        (TINY, "float32", "f32", False),
        (MINI, "bfloat16", "bf16", False),
    ],
)
def test_numbers_that_none_stands_for(config, dtype, cache, is_vendor):
    chosen = Numerics.resolve(config, dtype)
    assert chosen == Numerics(jnp.dtype(dtype), KVFormat(cache), KVFormat(cache), is_vendor)
    assert chosen.describe() == {
        "dtype": dtype,
        "kv_dtype": cache,
        "index_dtype": cache,
        "activation_quant": "vendor" if is_vendor else "none",
    }


def test_numbers_that_the_caller_names():
    chosen = Numerics.resolve(
        M31,
        "float32",
        dtype="bfloat16",
        kv_dtype="fp8",
        index_dtype="bf16",
        activation_quant="none",
    )
    assert chosen == Numerics(jnp.dtype("bfloat16"), KVFormat.FP8, KVFormat.BF16, False)
    assert Numerics.resolve(TINY, "float32", dtype="bfloat16").kv_format is KVFormat.BF16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype='float16': use one of float32, bfloat16"),
        ({"kv_dtype": "int8"}, "kv_dtype='int8': use one of f32, bf16, fp8, nvfp4"),
        ({"index_dtype": "float32"}, "index_dtype='float32': use one of f32"),
        ({"activation_quant": "fp8"}, "activation_quant='fp8': use one of vendor, none"),
        (
            {"kv_dtype": "nvfp4"},
            "kv_dtype=nvfp4 needs heads of a multiple of 16 .* has 24; use fp8",
        ),
        ({"index_dtype": "nvfp4"}, "index_dtype=nvfp4 needs .* has 8; use fp8 or bf16"),
    ],
)
def test_numbers_that_are_refused(options, message):
    odd = replace(MINI, head_dim=24, index_head_dim=8, rotary_dim=8)
    with pytest.raises(TargetError, match=message):
        Numerics.resolve(odd, "float32", **options)
