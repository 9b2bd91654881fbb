"""The decoder, for one shard: embeds rows, runs the layers, gives logits. Start reading here.

Below `shard_map` every shape is per shard. The cache enters as `lanes` and leaves with the rows
appended.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32

from sharding import collectives
from sharding.mesh import TP

from ..config import ModelConfig
from ..ops.linear import linear
from ..ops.moe_route import Routes
from ..ops.rms_norm import rms_norm
from ..ops.weight import Weight
from ..target import Numerics, Target
from .attention import Attention, Rows
from .moe import MLP, SparseMoE
from .params import Scope, value


class LayerTrace(NamedTuple):
    """What one layer did, for `Engine.trace`."""

    attn_out: Float[Array, "T D"]
    mlp_out: Float[Array, "T D"]
    hidden: Float[Array, "T D"]
    block_table: Array | None
    routes: Routes | None


class Norm(nnx.Module):
    """A norm over the residual stream."""

    def __init__(self, scope: Scope, config: ModelConfig, target: Target) -> None:
        self.weight = scope.param("weight")
        self.config, self.target = config, target

    def __call__(self, x: Array) -> Array:
        """Normalised rows."""
        return rms_norm(
            x,
            value(self.weight),
            eps=self.config.rms_norm_eps,
            offset=1.0 if self.config.use_gemma_norm else 0.0,
            impl=self.target.impl("rms_norm"),
        )


class DecoderLayer(nnx.Module):
    """Norm, attention, norm, feed-forward, each added to the residual stream."""

    def __init__(
        self, scope: Scope, config: ModelConfig, target: Target, numerics: Numerics, layer: int
    ) -> None:
        sparse = config.sparse_layer_ids
        index_layer = sparse.index(layer) if layer in sparse else None
        self.input_layernorm = Norm(scope.at("input_layernorm"), config, target)
        self.post_attention_layernorm = Norm(scope.at("post_attention_layernorm"), config, target)
        self.self_attn = Attention(
            scope.at("self_attn"), config, target, numerics, layer, index_layer
        )
        is_moe = config.moe_layers[layer]
        self.ffn = (
            SparseMoE(scope.at("moe"), config, target, numerics)
            if is_moe
            else MLP(scope.at("mlp"), config, target, numerics)
        )

    def __call__(
        self,
        h: Array,
        lanes: dict[str, Array],
        page_table: Array,
        rows: Rows,
        is_real: Bool[Array, " T"],
    ) -> tuple[Array, dict[str, Array], LayerTrace]:
        """One layer over T rows of the residual stream; two sums over ranks."""
        parts, lanes, table = self.self_attn(self.input_layernorm(h), lanes, page_table, rows)
        attn_out = collectives.sum_slices(parts, TP).astype(h.dtype)
        h = h + attn_out
        parts, routes = self.ffn(self.post_attention_layernorm(h), is_real)
        mlp_out = collectives.sum_slices(parts, TP).astype(h.dtype)
        h = h + mlp_out
        return h, lanes, LayerTrace(attn_out, mlp_out, h, table, routes)


class Decoder(nnx.Module):
    """The whole model for one shard.

    Args:
      leaves: dot path -> array (or shape), as `weights.MANIFEST` lays them out.
    """

    def __init__(
        self, config: ModelConfig, target: Target, numerics: Numerics, leaves: Mapping[str, Any]
    ) -> None:
        scope = Scope(leaves)
        self.embed_tokens = scope.param("embed_tokens.weight")
        self.layers = nnx.List(
            [
                DecoderLayer(scope.at(f"layers.{layer}"), config, target, numerics, layer)
                for layer in range(config.num_layers)
            ]
        )
        self.norm = Norm(scope.at("norm"), config, target)
        self.lm_head = nnx.data(
            None if config.tie_word_embeddings else scope.param("lm_head.weight")
        )
        self.config, self.target, self.numerics = config, target, numerics

    def embed(self, token: Array) -> Float[Array, "T D"]:
        """Embedding rows, from whichever rank holds them; the other ranks add zeros."""
        table = value(self.embed_tokens)
        local = token - jax.lax.axis_index(TP) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        row = table[jnp.clip(local, 0, table.shape[0] - 1)].astype(self.numerics.dtype)
        return collectives.all_reduce(jnp.where(mine[:, None], row, 0), TP)

    def __call__(
        self, rows: Rows, lanes: dict[str, Array], page_table: Array
    ) -> tuple[Float[Array, "T D"], dict[str, Array], list[LayerTrace]]:
        """Run T rows through all layers.

        Returns:
          (residual stream before the final norm, lanes with the rows appended, what each layer did;
          the parts of it that nobody reads cost nothing).
        """
        is_real = rows.position >= 0
        h = self.embed(jnp.where(is_real, rows.token, 0))
        traces = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                h, lanes, trace = layer(h, lanes, page_table, rows, is_real)
            traces.append(trace)
        return h, lanes, traces

    def logits(self, h: Float[Array, "T D"]) -> Float32[Array, "T V"]:
        """This shard's slice of the vocabulary's logits, float32."""
        head = value(self.embed_tokens if self.lm_head is None else self.lm_head)
        return linear(
            self.norm(h),
            Weight(head),
            quantize_input=False,
            out_dtype=jnp.float32,
            impl=self.target.impl("linear"),
        )
