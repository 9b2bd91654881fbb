"""Feed-forward part of a layer: dense MLP, or routed experts with a shared one."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float32

from ..config import ModelConfig
from ..ops.mlp import SwiGLU, mlp
from ..ops.moe_experts import moe_experts
from ..ops.moe_route import Routes, moe_route
from ..target import Numerics, Target
from .params import Linear, Scope, value


class FeedForward(NamedTuple):
    """Partial sums [T S D] of the down projections, and the rows' routes, None without experts."""

    parts: Float32[Array, "T S D"]
    routes: Routes | None


def _swiglu(config: ModelConfig) -> SwiGLU:
    return SwiGLU(config.swiglu_alpha, config.swiglu_limit, config.swiglu_beta)


class MLP(nnx.Module):
    """Gated MLP: the dense layers and the shared expert."""

    def __init__(
        self, scope: Scope, config: ModelConfig, target: Target, numerics: Numerics
    ) -> None:
        self.gate_proj = Linear(scope.at("gate_proj"))
        self.up_proj = Linear(scope.at("up_proj"))
        self.down_proj = Linear(scope.at("down_proj"))
        self.config, self.target, self.numerics = config, target, numerics

    @property
    def width(self) -> int:
        """Intermediate channels of this rank."""
        return self.gate_proj.stored.data.shape[0]

    def __call__(
        self, x: Array, is_real: Bool[Array, " T"], slices: int | None = None
    ) -> FeedForward:
        """Partial sums for T rows; padding rows are computed like any other.

        Args:
          slices: to cut the intermediate axis into, where another product's parts are added to
            these.
        """
        parts = mlp(
            x,
            self.gate_proj.stored,
            self.up_proj.stored,
            self.down_proj.stored,
            swiglu=_swiglu(self.config),
            slices=slices or self.target.slices(self.width),
            quantize_input=self.numerics.quantize_activations,
            impl=self.target.impl("mlp"),
        )
        return FeedForward(parts, None)


class Router(nnx.Module):
    """Chooses the experts of each row. Replicated: every rank makes the same choice."""

    def __init__(self, scope: Scope, config: ModelConfig, target: Target) -> None:
        self.weight = scope.param("weight")
        self.e_score_correction_bias = nnx.data(scope.optional("e_score_correction_bias"))
        self.config, self.target = config, target

    def __call__(self, x: Array) -> Routes:
        """Expert ids, ascending, and weights that sum to 1."""
        return moe_route(
            x,
            value(self.weight),
            value(self.e_score_correction_bias),
            experts_per_token=self.config.experts_per_token,
            impl=self.target.impl("moe_route"),
        )


class SparseMoE(nnx.Module):
    """Routed experts plus the shared expert, which the routed scaling factor does not touch."""

    def __init__(
        self, scope: Scope, config: ModelConfig, target: Target, numerics: Numerics
    ) -> None:
        self.router = Router(scope.at("router"), config, target)
        self.gate_up_proj = Linear(scope.at("experts.gate_up_proj"))
        self.down_proj = Linear(scope.at("experts.down_proj"))
        shared = scope.at("shared_expert") if scope.has("shared_expert") else None
        self.shared_expert = nnx.data(shared and MLP(shared, config, target, numerics))
        self.config, self.target, self.numerics = config, target, numerics

    def __call__(self, x: Array, is_real: Bool[Array, " T"]) -> FeedForward:
        """Partial sums for T rows. Padding rows choose no expert, so they wake none."""
        routes, shared = self.router(x), self.shared_expert
        width = self.gate_up_proj.stored.data.shape[-2]
        slices = self.target.slices(width, width if shared is None else shared.width)
        parts = moe_experts(
            x,
            jnp.where(is_real[:, None], routes.ids, -1),
            routes.weights * self.config.routed_scaling_factor,
            self.gate_up_proj.stored,
            self.down_proj.stored,
            swiglu=_swiglu(self.config),
            slices=slices,
            quantize_input=self.numerics.quantize_activations,
            impl=self.target.impl("moe_experts"),
        )
        if shared is not None:
            # Slice by slice, before any sum: the same additions at every tensor-parallel width.
            parts = parts + shared(x, is_real, slices).parts
        return FeedForward(parts, routes)
