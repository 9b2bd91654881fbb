"""Per-head norm and rotation of queries and keys, and the cache append of the new rows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Float32, Int32

from .. import kv_format, nvfp4
from ..kv_format import KVFormat, Stored
from . import cells, pages
from .compare import assert_equal, assert_ulp
from .op import REFERENCE, Cell, Impl, Kind, checked, map_tiles, no_implementation
from .rms_norm import normalise

CELLS = (
    Cell("decode rows of two slots", dict(T=2, N=8, K=1, H=128, R=64, fmt="bf16", index=True)),
    Cell("a verify that crosses a page", dict(T=8, N=8, K=1, H=128, R=64, fmt="nvfp4", index=True)),
    Cell("a layer without indexer", dict(T=5, N=4, K=2, H=64, R=32, fmt="f32", index=False)),
    Cell("padding rows", dict(T=6, N=4, K=2, H=64, R=32, fmt="fp8", index=True, padding=3)),
)


class Projected(NamedTuple):
    """Projections of one layer, before norm; the index parts are None in a dense layer."""

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]
    index_q: Float[Array, "T I G"] | None = None
    index_k: Float[Array, "T G"] | None = None


class NormWeights(NamedTuple):
    """Per-head norm weights, one vector shared by all heads of a kind."""

    q: Float32[Array, " H"]
    k: Float32[Array, " H"]
    index_q: Float32[Array, " G"] | None = None
    index_k: Float32[Array, " G"] | None = None


class Appended(NamedTuple):
    """Rotated queries and the pools with the new rows in place."""

    q: Array
    index_q: Array | None
    k_pool: Stored
    v_pool: Stored
    index_pool: Stored | None


class HeadGeometry(NamedTuple):
    """Constants of the per-head work. `e4m3_*` cast queries to E4M3 (scale 1, saturating)."""

    eps: float
    offset: float
    rotary_dim: int
    rope_theta: float
    kv_format: KVFormat
    index_format: KVFormat
    e4m3_q: bool = False
    e4m3_index_q: bool = False


@checked
def qk_norm_rope_append(
    x: Projected,
    weights: NormWeights,
    k_pool: Stored,
    v_pool: Stored,
    index_pool: Stored | None,
    page_table: Int32[Array, "B J"],
    slot: Int32[Array, " T"],
    position: Int32[Array, " T"],
    *,
    layer: int,
    index_layer: int,
    heads: HeadGeometry,
    impl: Impl = REFERENCE,
) -> Appended:
    """Normalise each head, rotate its first `rotary_dim` channels, store K, V and index K.

    V is stored as projected. Later rows read the stored value, and so do the rows of this call.

    Args:
      x: projections of T rows.
      weights: norm weights as the checkpoint stores them (`heads.offset` + w is applied).
      k_pool, v_pool: [L P K 128 W] parts. index_pool: [Ls P 128 W] parts, None in a dense layer.
      page_table: pool page of each block of each slot.
      slot, position: of each row; position -1 marks padding, which is stored nowhere.
      layer, index_layer: which layer of the K/V pools and of the index pool.
      heads: constants.
      impl: the implementation, chosen by the Target.
    Raises:
      TypeCheckError: shapes or dtypes disagree.
    Source: MiniMax-M3 attention; partial NeoX rotation (half-split pairs).
    """
    match impl.kind:
        case Kind.REFERENCE:
            return reference(
                x,
                weights,
                k_pool,
                v_pool,
                index_pool,
                page_table,
                slot,
                position,
                layer=layer,
                index_layer=index_layer,
                heads=heads,
            )
        case _:
            raise no_implementation("qk_norm_rope_append", impl)


def rotate(x: Array, position: Array, rotary_dim: int, theta: float) -> Array:
    """NeoX rotation of the first `rotary_dim` channels of [T, heads, H]; the rest pass through.

    Angles are float32 products, as in the model's public implementations: by float32's spacing
    alone, an angle near position 2^20 is off by up to 0.031 rad.
    """
    half = rotary_dim // 2
    exponent = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inv_freq = (1.0 / np.float32(theta) ** exponent).astype(np.float32)
    angle = position.astype(jnp.float32)[:, None, None] * inv_freq  # T 1 R/2
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, [half, rotary_dim], axis=-1)
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def reference(
    x: Projected,
    weights: NormWeights,
    k_pool: Stored,
    v_pool: Stored,
    index_pool: Stored | None,
    page_table: Array,
    slot: Array,
    position: Array,
    *,
    layer: int,
    index_layer: int,
    heads: HeadGeometry,
) -> Appended:
    """The specification."""

    def turn(rows: Array, weight: Array, at: Array) -> Array:
        normed = normalise(rows, weight, heads.eps, heads.offset)
        return rotate(normed, jnp.maximum(at, 0), heads.rotary_dim, heads.rope_theta)

    def tile(q: Array, k: Array, iq: Array | None, ik: Array | None, at: Array) -> tuple:
        q, k = turn(q, weights.q, at), turn(k, weights.k, at)
        if iq is not None and ik is not None:
            iq = turn(iq, weights.index_q, at)  # pyright: ignore[reportArgumentType]
            ik = turn(ik[:, None], weights.index_k, at)[:, 0]  # pyright: ignore[reportArgumentType]
        if heads.e4m3_q:
            q = nvfp4.e4m3_cast(q).astype(q.dtype)
        if heads.e4m3_index_q and iq is not None:
            iq = nvfp4.e4m3_cast(iq).astype(iq.dtype)
        return q, k, iq, ik

    q, k, index_q, index_k = map_tiles(tile, x.q, x.k, x.index_q, x.index_k, position)
    at = pages.locate(page_table, slot, position, pages.page_size(k_pool), k_pool.data.shape[1])
    k_pool = pages.write(k_pool, kv_format.encode(k, heads.kv_format), layer, *at)
    v_pool = pages.write(v_pool, kv_format.encode(x.v, heads.kv_format), layer, *at)
    if index_pool is not None:
        stored = kv_format.encode(index_k, heads.index_format)
        index_pool = pages.write(index_pool, stored, index_layer, *at)
    return Appended(q, index_q, k_pool, v_pool, index_pool)


def make_inputs(spec: Mapping[str, Any], key: Array) -> dict[str, Any]:
    """Arguments of `qk_norm_rope_append` for one cell; rows start two before a page's end."""
    rng = cells.generator(key)
    rows, heads, kv, width = (spec[letter] for letter in "TNKH")
    fmt, index = KVFormat(spec["fmt"]), spec["index"]

    def normal(*shape: int) -> Array:
        return cells.normal(rng, shape)

    position = np.arange(126, 126 + rows, dtype=np.int32)
    position[rows - spec.get("padding", 0) :] = -1
    return dict(
        x=Projected(
            normal(rows, heads, width),
            normal(rows, kv, width),
            normal(rows, kv, width),
            normal(rows, kv, width) if index else None,
            normal(rows, width) if index else None,
        ),
        weights=NormWeights(
            *(0.3 * normal(width) for _ in range(2)),
            *(0.3 * normal(width) if index else None for _ in range(2)),
        ),
        k_pool=cells.empty_pool((2, 6, kv, 128, width), fmt),
        v_pool=cells.empty_pool((2, 6, kv, 128, width), fmt),
        index_pool=cells.empty_pool((1, 6, 128, width), fmt) if index else None,
        page_table=jnp.asarray([[3, 1, 0], [5, 2, 0]], jnp.int32),
        slot=jnp.asarray(np.arange(rows) // max(1, rows // 2) % 2, jnp.int32),
        position=jnp.asarray(position),
        layer=1,
        index_layer=0,
        heads=HeadGeometry(1e-6, 1.0, spec["R"], 5e6, fmt, fmt),
    )


def compare(out: Appended, ref: Appended) -> None:
    """Queries within 4 ulp (norm and rotation round in another order); V, only stored, is equal.

    Stored K and index K: within 4 ulp of their dtype where it is a plain one. A quantised value
    that sits on a boundary may move by one code, so the decoded ones differ by one step at most,
    and no more than 1% of those written. Rows that were not written are equal.
    """
    if jax.tree.structure(out) != jax.tree.structure(ref):
        raise AssertionError(f"parts {jax.tree.structure(out)}, not {jax.tree.structure(ref)}")
    assert_ulp(out.q, ref.q, 4, "q")
    if ref.index_q is not None and out.index_q is not None:
        assert_ulp(out.index_q, ref.index_q, 4, "index_q")
    jax.tree.map(lambda o, r: assert_equal(o, r, "v pool"), out.v_pool, ref.v_pool)
    _compare_pools(out.k_pool, ref.k_pool, "k pool")
    if ref.index_pool is not None and out.index_pool is not None:
        _compare_pools(out.index_pool, ref.index_pool, "index pool")


def _compare_pools(out: Stored, ref: Stored, what: str) -> None:
    """Stored vectors of two pools that were empty before."""
    if ref.data.dtype.itemsize > 1:
        assert_ulp(out.data, ref.data, 4, what)
        return
    # Largest step of a code, in terms of the vector's largest value: E2M1 from 6 to 4, E4M3 1/8.
    step = 1 / 8 if ref.scale is None else 1 / 3
    got, want = (np.asarray(jax.jit(kv_format.decode)(pool)) for pool in (out, ref))
    assert_ulp(got, want, step * 2**23, what)  # 2^23 ulp of float32 is the row's largest value
    written = (want != 0.0).any(axis=-1, keepdims=True)
    changed = (got != want).sum() / max(written.sum() * want.shape[-1], 1)
    if changed > 0.01:
        raise AssertionError(f"{what}: {changed:.1%} of stored values differ, limit 1%")
    for part_out, part_ref in zip(jax.tree.leaves(out), jax.tree.leaves(ref), strict=True):
        got, want = (np.asarray(part).view(np.uint8) for part in (part_out, part_ref))
        assert_equal(got * ~written, want * ~written, f"unwritten {what}")


def bytes_moved(spec: Mapping[str, Any]) -> int:
    """Rows in and out in bfloat16; stored bytes are a small part of it."""
    index = (spec["K"] + 1) if spec["index"] else 0
    return 2 * 2 * spec["T"] * spec["H"] * (spec["N"] + 2 * spec["K"] + index)
