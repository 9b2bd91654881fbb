"""Attention of one layer: to the whole context, or, with an indexer, to chosen sparse blocks."""

from typing import NamedTuple

from flax import nnx
from jax import Array
from jaxtyping import Int32

from ..config import ModelConfig
from ..kv_format import KVFormat
from ..ops.dense_attn import dense_attn
from ..ops.index_score import index_score
from ..ops.index_topk import index_topk
from ..ops.linear import linear
from ..ops.qk_norm_rope_append import HeadGeometry, NormWeights, Projected, qk_norm_rope_append
from ..ops.row_linear import row_linear
from ..ops.sparse_attn import sparse_attn
from ..target import Numerics, Target
from .params import Linear, Scope, value
from .state import pool, with_pool


class Rows(NamedTuple):
    """What a step computes: T rows, each a (slot, position) pair; a request's rows are neighbours.

    Decode is one row a slot, verify 1 + K, prefill a chunk. Position -1 marks padding, with slot 0.
    """

    token: Int32[Array, " T"]
    slot: Int32[Array, " T"]
    position: Int32[Array, " T"]


class Indexer(nnx.Module):
    """Scores the sparse blocks of a layer and chooses some for each row and KV head."""

    def __init__(self, scope: Scope, config: ModelConfig, target: Target) -> None:
        self.q_proj = Linear(scope.at("index_q_proj"))
        self.k_proj = Linear(scope.at("index_k_proj"))
        self.q_norm = scope.param("index_q_norm.weight")
        self.k_norm = scope.param("index_k_norm.weight")
        self.config, self.target = config, target

    def select(
        self, index_q: Array, lanes: dict[str, Array], page_table: Array, rows: Rows, layer: int
    ) -> Int32[Array, "T I U"]:
        """Chosen block ids, ascending, then -1."""
        config = self.config
        scores = index_score(
            index_q,
            pool(lanes, "index_k"),
            page_table,
            rows.slot,
            rows.position,
            layer=layer,
            impl=self.target.impl("index_score"),
        )
        return index_topk(
            scores,
            rows.position,
            page=config.page_size,
            topk=config.topk_blocks,
            init_blocks=config.init_blocks,
            local_blocks=config.local_blocks,
            impl=self.target.impl("index_topk"),
        )


class Attention(nnx.Module):
    """Projections, cache append and attention of one layer, for the heads of one shard.

    Args:
      scope: parameters of `self_attn`.
      layer: of the K and V lanes.
      index_layer: of the index lane, None in a layer of full attention.
    """

    def __init__(
        self,
        scope: Scope,
        config: ModelConfig,
        target: Target,
        numerics: Numerics,
        layer: int,
        index_layer: int | None,
    ) -> None:
        self.q_proj = Linear(scope.at("q_proj"))
        self.k_proj = Linear(scope.at("k_proj"))
        self.v_proj = Linear(scope.at("v_proj"))
        self.o_proj = Linear(scope.at("o_proj"))
        self.q_norm = scope.param("q_norm.weight")
        self.k_norm = scope.param("k_norm.weight")
        self.indexer = nnx.data(None if index_layer is None else Indexer(scope, config, target))
        self.config, self.target, self.numerics = config, target, numerics
        self.layer, self.index_layer = layer, index_layer
        quantised = (KVFormat.FP8, KVFormat.NVFP4)
        vendor = numerics.quantize_activations
        self.geometry = HeadGeometry(
            eps=config.rms_norm_eps,
            offset=1.0 if config.use_gemma_norm else 0.0,
            rotary_dim=config.rotary_dim,
            rope_theta=config.rope_theta,
            kv_format=numerics.kv_format,
            index_format=numerics.index_format,
            e4m3_q=vendor and numerics.kv_format in quantised,
            e4m3_index_q=vendor and numerics.index_format in quantised,
        )

    def project(self, x: Array) -> Projected:
        """q, k, v and, in a sparse layer, index q and k, each cut into this shard's heads."""

        def heads(layer: Linear, width: int) -> Array:
            out = linear(
                x,
                layer.stored,
                quantize_input=self.numerics.quantize_activations,
                impl=self.target.impl("linear"),
            )
            return out.reshape(out.shape[0], -1, width)

        width = self.config.head_dim
        q, k, v = (heads(proj, width) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.indexer is None:
            return Projected(q, k, v)
        index_width = self.config.index_head_dim
        index_q = heads(self.indexer.q_proj, index_width)
        index_k = heads(self.indexer.k_proj, index_width)[:, 0]
        return Projected(q, k, v, index_q, index_k)

    def __call__(
        self, x: Array, lanes: dict[str, Array], page_table: Array, rows: Rows
    ) -> tuple[Array, dict[str, Array], Array | None]:
        """Attend with T normalised rows.

        Returns:
          (partial sums [T S D] of o_proj, the lanes with these rows appended, the block table
          [T I U] or None in a layer of full attention).
        """
        indexer = self.indexer
        norms = NormWeights(
            value(self.q_norm),
            value(self.k_norm),
            *(() if indexer is None else (value(indexer.q_norm), value(indexer.k_norm))),
        )
        done = qk_norm_rope_append(
            self.project(x),
            norms,
            pool(lanes, "k"),
            pool(lanes, "v"),
            None if indexer is None else pool(lanes, "index_k"),
            page_table,
            rows.slot,
            rows.position,
            layer=self.layer,
            index_layer=self.index_layer or 0,
            heads=self.geometry,
            impl=self.target.impl("qk_norm_rope_append"),
        )
        lanes = with_pool(with_pool(lanes, "k", done.k_pool), "v", done.v_pool)
        if indexer is None:
            table = None
        else:
            assert self.index_layer is not None
            assert done.index_pool is not None
            lanes = with_pool(lanes, "index_k", done.index_pool)
            assert done.index_q is not None
            table = indexer.select(done.index_q, lanes, page_table, rows, self.index_layer)
        out = self._attend(done.q, lanes, page_table, rows, table)
        parts = row_linear(
            out.reshape(out.shape[0], -1),
            self.o_proj.stored,
            slices=self.target.slices(out.shape[1] * out.shape[2]),
            quantize_input=self.numerics.quantize_activations,
            impl=self.target.impl("row_linear"),
        )
        return parts, lanes, table

    def _attend(
        self,
        q: Array,
        lanes: dict[str, Array],
        page_table: Array,
        rows: Rows,
        table: Array | None,
    ) -> Array:
        where = (q, pool(lanes, "k"), pool(lanes, "v"), page_table, rows.slot, rows.position)
        scale = self.config.head_dim**-0.5
        if table is None:
            impl = self.target.impl("dense_attn")
            return dense_attn(*where, layer=self.layer, scale=scale, impl=impl)
        impl = self.target.impl("sparse_attn")
        return sparse_attn(*where, table, layer=self.layer, scale=scale, impl=impl)
