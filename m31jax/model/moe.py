"""Feed-forward part of a layer: dense MLP, or routed experts with a shared one."""

from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float32

from sharding import collectives

from ..config import ModelConfig
from ..ops.mlp import SwiGLU, mlp
from ..ops.moe_experts import moe_experts
from ..ops.moe_route import Routes, moe_route
from ..target import Numerics, Target
from .params import Linear, Scope, value


class FeedForward(NamedTuple):
    """This rank's part of the down projections' sum; the routes of the rows, None without experts."""

    total: Float32[Array, "T D"]
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

    def __call__(self, x: Array, is_real: Bool[Array, " T"]) -> FeedForward:
        """This rank's part for T rows; padding rows are computed like any other."""
        parts = mlp(
            x,
            self.gate_proj.stored,
            self.up_proj.stored,
            self.down_proj.stored,
            swiglu=_swiglu(self.config),
            slices=self.target.slices(self.gate_proj.stored.data.shape[0]),
            quantize_input=self.numerics.quantize_activations,
            impl=self.target.impl("mlp"),
        )
        return FeedForward(collectives.sum_own_slices(parts), None)


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
        """This rank's part for T rows. Padding rows choose no expert, so they wake none."""
        routes = self.router(x)
        parts = moe_experts(
            x,
            jnp.where(is_real[:, None], routes.ids, -1),
            routes.weights * self.config.routed_scaling_factor,
            self.gate_up_proj.stored,
            self.down_proj.stored,
            swiglu=_swiglu(self.config),
            slices=self.target.slices(self.gate_up_proj.stored.data.shape[-2]),
            quantize_input=self.numerics.quantize_activations,
            impl=self.target.impl("moe_experts"),
        )
        total = collectives.sum_own_slices(parts)
        if self.shared_expert is not None:
            total = total + self.shared_expert(x, is_real).total
        return FeedForward(total, routes)
