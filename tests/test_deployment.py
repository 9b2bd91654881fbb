"""What is decided before weights are read, and that explaining it reads none."""

import dataclasses
import json

import pytest

from m31jax import Engine, target
from m31jax.deployment import Deployment
from m31jax.errors import TargetError
from m31jax.ops.op import Impl, Kind
from m31jax.presets import FORMATS, TINY
from m31jax.target import Target, load_data
from tests import engines

KERNELS = dataclasses.replace(
    load_data("cpu"),
    impls={"index_score": Impl(Kind.CUTE), "index_topk": Impl(Kind.TRITON)},
    pins=("triton==3.7.0",),
    objects={"index_score": ("a.cubin", "b.cubin"), "index_topk": ("c.cubin",)},
)


def test_no_weight_is_read(tmp_path):
    config = dataclasses.replace(TINY, quantization=FORMATS["nvfp4"])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()), encoding="utf-8")
    deployment = Deployment.resolve(tmp_path, max_slots=2, max_seq_len=300)
    explained = deployment.explain()
    assert json.loads(json.dumps(explained)) == explained
    assert explained["numerics"]["kv_dtype"] == "nvfp4"
    assert explained["memory"]["max_slots"] == 2
    assert deployment.config == config


def test_the_engine_is_what_was_resolved():
    options = {"max_seq_len": 256, "kv_dtype": "fp8", "prefill_chunk": 24}
    resolved = Deployment.resolve(engines.checkpoint("mini", "bf16"), **options)
    engine = engines.mini(**options)
    assert engine.deployment == resolved
    assert engine.explain() == resolved.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk=0 is below 1"),
        ({"draft_tokens": 3}, "draft_tokens=3 needs a drafter"),
        ({"drafter": "somewhere"}, "drafter='somewhere'.*--drafter none"),
        ({"max_seq_len": 4097}, "max_seq_len=4097"),
    ],
)
@pytest.mark.parametrize("call", [Deployment.resolve, Engine.load])
def test_both_refuse_the_same(call, options, message):
    with pytest.raises(TargetError, match=message):
        call(engines.checkpoint("tiny", "bf16"), **options)


def test_pins_and_kernel_objects_are_those_of_the_target(monkeypatch):
    monkeypatch.setattr(target, "load_data", lambda name: KERNELS)
    explained = Target.resolve(environ={}).explain()
    assert explained["pins"] == ["triton==3.7.0"]
    assert explained["kernel_objects"] == ["a.cubin", "b.cubin", "c.cubin"]
    off = {"M31JAX_DISABLE_INDEX_SCORE": "1"}
    assert Target.resolve(environ=off).explain()["kernel_objects"] == ["c.cubin"]
    forced = {"M31JAX_IMPL": "index_topk=pallas,index_score=reference"}
    assert Target.resolve(environ=forced).explain()["kernel_objects"] == []
    monkeypatch.undo()
    assert Target.resolve(environ={}).explain()["kernel_objects"] == []
