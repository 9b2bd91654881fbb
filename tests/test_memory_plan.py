"""Bytes and sizes of the cache: exact, in integers of any size, and refused with what would fit."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from m31jax import weights
from m31jax.checkpoint import plan
from m31jax.engine import device_mesh
from m31jax.errors import TargetError
from m31jax.kv_format import KVFormat
from m31jax.memory import MemoryPlan, cpu_budget_bytes, plan_memory
from m31jax.model.decoder import Decoder
from m31jax.model.state import LANES, StateSpec, abstract, lane_shapes, page_bytes
from m31jax.ops import pages
from m31jax.presets import FORMATS, FULL, TINY
from m31jax.steps import Steps, page_buckets
from m31jax.target import Numerics, Target
from sharding import rules
from tests.engines import MINI

M31 = replace(FULL, quantization=FORMATS["nvfp4"])
MILLION = 1 << 20
FORMATS_OF_CACHE = list(KVFormat)
PLENTY = 1 << 50


def plan_of(config=M31, *, tp: int = 1, slots: int = 8, **options) -> MemoryPlan:
    target = Target.resolve(tp, "cpu")
    numerics = Numerics.resolve(config, target.dtype)
    return plan_memory(config, target, numerics, slots=slots, **options)


def spec_of(config, tp: int, kv: KVFormat, index: KVFormat, *, slots=3, pages=5, columns=4):
    return StateSpec(config, tp, kv, index, slots, pages, columns)


# Bytes


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv", FORMATS_OF_CACHE)
def test_page_bytes_are_those_of_the_arrays(kv, tp):
    """What each device really holds, the heads that several ranks share included."""
    index = FORMATS_OF_CACHE[FORMATS_OF_CACHE.index(kv) - 1]
    spec = spec_of(MINI, tp, kv, index)
    steps = Steps(None, None, device_mesh(tp), spec)  # pyright: ignore[reportArgumentType]
    held = dict.fromkeys(range(tp), 0)
    for lane in steps.init_state().lanes.values():
        for shard in lane.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert held == dict.fromkeys(range(tp), spec.num_pages * page_bytes(spec))


def token_bytes(width: int, fmt: KVFormat) -> int:
    """One stored vector, by hand."""
    return {
        KVFormat.F32: 4 * width,
        KVFormat.BF16: 2 * width,
        KVFormat.FP8: width,
        KVFormat.NVFP4: width // 2 + width // 16,
    }[fmt]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("kv", FORMATS_OF_CACHE)
@pytest.mark.parametrize("index", FORMATS_OF_CACHE)
def test_full_page_bytes_by_hand(kv, index, tp):
    spec = spec_of(FULL, tp, kv, index)
    heads = max(1, 4 // tp)
    assert page_bytes(spec) == 128 * 60 * (
        2 * heads * token_bytes(128, kv) + token_bytes(128, index)
    )


@pytest.mark.parametrize(("tp", "per_token"), [(1, 38880), (8, 12960)])
def test_full_nvfp4_bytes_per_token(tp, per_token):
    made = plan_of(tp=tp, max_seq_len=MILLION, budget_bytes=PLENTY)
    assert made.page_bytes == 128 * per_token
    assert made.cache_bytes == made.spec.num_pages * 128 * per_token


def test_layers_of_full_attention_have_no_index_lane():
    dense = replace(MINI, sparse_layers=(False, False), moe_layers=(False, False))
    spec = spec_of(dense, 1, KVFormat.NVFP4, KVFormat.NVFP4)
    assert set(lane_shapes(spec)) == {"k", "k_scale", "v", "v_scale"}
    assert page_bytes(spec) == 16 * 2 * 2 * 2 * token_bytes(32, KVFormat.NVFP4)


def test_describe_adds_up():
    made = plan_of(TINY, max_seq_len=512)
    told = made.describe()
    assert set(told["lanes"]) == {"k", "v", "index_k"} < {lane.name for lane in LANES}
    total = sum(
        int(np.prod(lane["shape"])) * np.dtype(lane["dtype"]).itemsize
        for lane in told["lanes"].values()
    )
    assert total == told["cache_bytes"] == told["num_pages"] * told["page_bytes"]
    assert told["params_bytes"] == plan.plan(TINY, 1).bytes_per_rank
    assert (told["max_slots"], told["max_seq_len"]) == (8, 512)


# A million tokens


@pytest.mark.parametrize("tp", [1, 8])
def test_a_million_tokens_for_every_slot(tp):
    """Field report: slots x tokens x heads x width overflowed 32 bits at start-up."""
    made = plan_of(tp=tp, max_seq_len=MILLION, budget_bytes=PLENTY)
    assert made.spec.pages_per_slot == 8192
    assert made.spec.num_pages == 1 + 8 * 8192
    assert made.cache_bytes == 65537 * 128 * {1: 38880, 8: 12960}[tp]
    assert made.cache_bytes > 1 << 32
    steps = Steps(None, None, device_mesh(tp), made.spec)  # pyright: ignore[reportArgumentType]
    shapes = jax.eval_shape(steps.init_state)
    plain = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), shapes)
    assert plain == abstract(made.spec)[0]
    assert shapes.lanes["k"].shape == (60, 65537, max(4, tp), 128, 64)
    assert shapes.lanes["index_k_scale"].shape == (60, 65537, 128, 8)
    assert shapes.page_table.shape == (8, 8192)
    assert page_buckets(8192) == (32, 128, 512, 2048, 8192)


@pytest.mark.parametrize("tp", [1, 8])
def test_a_step_of_a_million_tokens_traces(tp):
    """One layer of full width over the whole page table, in abstract shapes."""
    config = replace(M31, num_layers=1, moe_layers=(True,), sparse_layers=(True,))
    target, mesh = Target.resolve(tp, "cpu"), device_mesh(tp)
    numerics = Numerics.resolve(config, "bfloat16")
    spec = plan_of(config, tp=tp, max_seq_len=MILLION, budget_bytes=PLENTY).spec
    leaves = {
        leaf.name: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, rules.spec(leaf.axes))
        )
        for leaf in weights.expand(config, tp, numerics.dtype, with_sources=False).parameters
    }
    graph, params = nnx.split(Decoder(config, target, numerics, leaves))
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    steps = Steps(graph, specs, mesh, spec)
    state, drawn = jax.eval_shape(
        functools.partial(steps.decode, pages=spec.pages_per_slot, is_greedy=True),
        params,
        abstract(spec)[0],
        jax.ShapeDtypeStruct((8,), np.int32),
    )
    assert drawn.token.shape == (8,)
    assert {name: (lane.shape, lane.dtype) for name, lane in state.lanes.items()} == {
        name: (lane.shape, lane.dtype) for name, lane in lane_shapes(spec).items()
    }


@pytest.mark.long
def test_rows_behind_the_two_gigabyte_mark():
    """Written and read where a 32-bit flat offset would wrap to page 0 and 15."""
    num_pages = (1 << 31) // (16 * 128) + 16
    last = num_pages - 1
    assert num_pages * 16 * 128 > 1 << 31
    pool = pages.Stored(jnp.zeros((1, num_pages, 1, 16, 128), jnp.uint8))
    values = pages.Stored(jnp.full((2, 1, 128), 7, jnp.uint8))
    write = jax.jit(pages.write, static_argnums=2, donate_argnums=0)
    pool = write(pool, values, 0, jnp.array([last, num_pages]), jnp.array([15, 3]))
    seen = jax.jit(pages.read, static_argnums=1)(pool, 0, jnp.array([last, 0, 15]))
    data = np.array(seen.data)
    assert (data[0, 0, 15] == 7).all()
    data[0, 0, 15] = 0
    assert not data.any()
    assert np.count_nonzero(np.asarray(pool.data)) == 128


def test_a_budget_too_small_names_the_longest_that_fits():
    budget = 4 << 30
    longest = (budget // (128 * 38880) - 1) * 128
    with pytest.raises(TargetError, match=rf"{MILLION} needs 8192 pages.*max_seq_len={longest}$"):
        plan_of(max_seq_len=MILLION, budget_bytes=budget)
    made = plan_of(max_seq_len=longest, budget_bytes=budget)
    assert made.cache_bytes <= budget
    with pytest.raises(TargetError, match=f"max_seq_len={longest}$"):
        plan_of(max_seq_len=longest + 1, budget_bytes=budget)
    assert plan_of(budget_bytes=budget).max_seq_len == longest  # what None takes


@pytest.mark.parametrize("kv", FORMATS_OF_CACHE)
def test_offsets_of_the_last_page_fit_their_integers(kv):
    """Page ids and every index of a lane are int32; only the product of them is larger.

    The pool is indexed axis by axis, so no flat offset is ever an int32.
    """
    page = page_bytes(spec_of(FULL, 1, kv, kv, pages=1))
    for count in (2**31 // page, 2**31 // page + 1, 2**31 // (128 * 64), PLENTY // page):
        spec = spec_of(FULL, 1, kv, kv, pages=count, columns=8192)
        for name, (shape, dtype, _) in lane_shapes(spec).items():
            assert max(shape) < 2**31, name
            strides = [int(np.prod(shape[axis + 1 :], dtype=object)) for axis in range(len(shape))]
            last = sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
            assert (last + 1) * dtype.itemsize == count * _page_bytes_of(spec, name)
    assert (last + 1) > 2**31  # the case was reached


def _page_bytes_of(spec: StateSpec, name: str) -> int:
    shape, dtype, _ = lane_shapes(spec, num_pages=1)[name]
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "max_slots=0 is below 1; use 1 or more"),
        ({"slots": -3}, "max_slots=-3 is below 1"),
        ({"num_pages": 0}, "num_pages=0 leaves no page beside the guard; pass num_pages=2 or more"),
        ({"num_pages": 1}, "num_pages=1 leaves no page"),
        ({"num_pages": -1}, "num_pages=-1 leaves no page"),
        ({"budget_bytes": 0}, "num_pages=0 leaves no page.*the budget is 0"),
        ({"max_seq_len": 0}, r"max_seq_len=0 is not in 1\.\.1024"),
        ({"max_seq_len": -1}, r"max_seq_len=-1 is not in 1\.\.1024"),
        ({"max_seq_len": 1025}, r"max_seq_len=1025 is not in 1\.\.1024, the model's max_position"),
        (
            {"max_seq_len": 100, "num_pages": 7},
            "max_seq_len=100 needs 7 pages .* 6 fit .*longest context that fits is max_seq_len=96",
        ),
        (
            {"num_pages": 11, "budget_bytes": 10 * 18432},
            "num_pages=11 of 18432 bytes .*budget is 184320; pass num_pages=10 or less",
        ),
    ],
)
def test_refusals_name_value_limit_and_way_out(options, message):
    with pytest.raises(TargetError, match=message):
        plan_of(MINI, **options)


@pytest.mark.parametrize(("tp", "way_out"), [(3, "1, 2, 4, 8"), (16, "1, 2, 4, 8")])
def test_widths(tp, way_out):
    with pytest.raises(TargetError, match=f"tp={tp}.*{way_out}"):
        plan_of(MINI, tp=tp)


# What is chosen


def test_the_smallest_pool_and_the_largest():
    smallest = plan_of(MINI, num_pages=2)
    assert (smallest.max_seq_len, smallest.spec.pages_per_slot) == (16, 1)
    assert plan_of(MINI).spec.num_pages == 1 + 8 * 64  # every slot at its longest
    shared = plan_of(MINI, budget_bytes=100 * 18432)
    assert (shared.spec.num_pages, shared.max_seq_len) == (100, 1024)  # slots share the pages


def test_a_slot_serves_what_was_asked_not_what_its_pages_hold():
    made = plan_of(MINI, max_seq_len=100)
    assert (made.max_seq_len, made.spec.pages_per_slot, made.spec.max_seq_len) == (100, 7, 112)
    odd = plan_of(replace(MINI, max_position_embeddings=1000))
    assert odd.max_seq_len == odd.describe()["max_seq_len"] == 1000


def test_the_cpu_budget_is_a_share_of_this_machine():
    assert 64 << 20 < cpu_budget_bytes() <= 4 << 30
