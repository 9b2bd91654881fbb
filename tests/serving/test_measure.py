"""What `bench step` computes from a profile and from shapes."""

import json

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from m31jax import Engine
from m31jax.ops import STEMS, rms_norm
from serving import measure
from serving.__main__ import cli

HLO = """
HloModule jit_step
%body (p: f32[8]) -> f32[8] {
  %dot.1 = f32[8]{0} dot(%p, %p), metadata={op_name="jit(step)/layer_0/moe_experts/mlp/dot" x=1}
  ROOT %add.2 = f32[8]{0} add(%dot.1, %p), metadata={op_name="jit(step)/layer_0/add"}
}
ENTRY %main {
  %while.3 = (f32[8], f32[2]) while(%t), metadata={op_name="jit(step)/layer_0/moe_experts/while"}
  copy.4 = f32[8]{0} copy(%while.3)
}
"""


def test_an_instruction_belongs_to_the_outermost_op_of_its_path():
    assert measure.instruction_scopes(HLO, ("mlp", "moe_experts")) == {
        "dot.1": "moe_experts",
        "add.2": "other",
        "while.3": "moe_experts",
        "copy.4": "other",
    }


def test_a_loops_own_time_is_without_its_bodys():
    scopes = {"while.3": "loop", "dot.1": "dot", "copy.4": "copy"}
    events = [
        ("dot.1", 10, 20),
        ("while.3", 0, 100),
        ("dot.1", 40, 50),
        ("copy.4", 100, 5),
    ]
    assert measure.self_times(events, scopes) == {"loop": 30, "dot": 70, "copy": 5}


def test_bytes_of_a_step_are_those_of_the_shapes(tmp_path, monkeypatch):
    monkeypatch.setenv("M31JAX_CACHE_DIR", str(tmp_path))
    engine = Engine.load("tiny", progress=False, kv_dtype="bf16", index_dtype="bf16")
    config = engine.config
    whole = sum(array.nbytes for array in jax.tree.leaves(engine.params))
    # Codes two a byte, a scale a byte per 16, and three outer scales of 4 bytes.
    expert = 3 * config.intermediate_size * config.hidden_size * 9 // 16 + 12
    experts = sum(config.moe_layers) * config.num_experts * expert
    embedding = config.vocab_size * config.hidden_size * 4
    tokens = 1024  # 8 pages, of which topk_blocks are read
    page = config.page_size
    key_value = 2 * config.num_kv_heads * config.head_dim * 2 * page * config.topk_blocks
    index = config.index_head_dim * 2 * tokens
    cache = config.num_layers * (key_value + index)
    reached = config.experts_per_token / config.num_experts
    expected = whole - embedding * (1 - 1 / config.vocab_size) - experts * (1 - reached) + cache
    assert measure.bytes_read(engine, live=1, context=tokens) == pytest.approx(expected, rel=1e-9)
    assert measure.bytes_read(engine, live=8, context=tokens) > expected + 7 * cache


@pytest.mark.long
def test_bench_step_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("M31JAX_CACHE_DIR", str(tmp_path))
    args = "bench step --preset tiny --slots 2 --context 16 --repeats 3 --json --output"
    result = CliRunner().invoke(cli, [*args.split(), str(tmp_path / "rows.json")])
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert rows == json.loads((tmp_path / "rows.json").read_text("utf-8"))
    assert [(row["phase"], row["live_slots"]) for row in rows] == [
        ("prefill", 1),
        ("decode", 1),
        ("decode", 2),
    ]
    for row in rows:
        assert row["op"] == "step"
        assert row["ok"]
        assert row["min_us"] <= row["median_us"] <= row["max_us"]
        assert row["device"]
        assert row["versions"]["jax"]
        assert row["command"].startswith("m31jax")
    for row in rows[1:]:
        assert row["ratio"] == pytest.approx(row["median_us"] / row["floor_us"])
        assert sum(row["where"].values()) == pytest.approx(1)
        assert row["where"]["other"] < 0.5
        assert len(row["where"]) > 5


def test_an_op_is_found_by_its_name_in_what_it_compiles_to():
    def layer(x, weight):
        return 2 * rms_norm.rms_norm(x + 1, weight, eps=1e-6, offset=1.0)

    hlo = jax.jit(layer).lower(jnp.ones((9, 64)), jnp.ones(64)).compile().as_text()
    scopes = list(measure.instruction_scopes(hlo, STEMS).values())
    assert set(scopes) == {"rms_norm", "other"}
    assert scopes.count("rms_norm") > 5
