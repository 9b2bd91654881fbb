"""What the machine is: architecture, tensor-parallel width, one implementation per op, buckets.

Chosen once, before anything is traced, from facts fixed for the engine's life. Nothing below this
module reads the environment or asks which platform it runs on.
"""

import importlib
import math
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from . import switches, targets
from .config import ModelConfig
from .errors import TargetError
from .kv_format import KVFormat
from .ops import STEMS
from .ops.op import REFERENCE, Impl, Kind

WIDTHS = (1, 2, 4, 8)
SLICES = 8
"""Runs that the input of a row-parallel product is cut into over all ranks, whatever their number.

Fewer where the width is no multiple of 8; the same number over all ranks at every tp.
"""


@dataclass(frozen=True)
class TargetData:
    """What a file in `targets/` says. Ops that `impls` does not name use their reference.

    Attributes:
      arch: GPU architecture (`sm_90`), or `cpu`. platform: JAX's name of the back end it needs.
      widths: tensor-parallel widths it is for.
      dtype: of activations and unquantised weights, unless the caller names another.
      row_buckets: decode row counts to compile. prefill_chunk: rows of a prefill step.
      is_exact: whether a request's tokens do not depend on neighbours, chunking or row counts.
      pins: requirements (`name==version`) that its kernels were built and measured with.
      objects: op -> prebuilt kernel objects that its implementation here launches.
    """

    arch: str
    platform: str
    widths: tuple[int, ...]
    dtype: str
    impls: Mapping[str, Impl]
    row_buckets: tuple[int, ...]
    prefill_chunk: int
    is_exact: bool
    pins: tuple[str, ...] = ()
    objects: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Numerics:
    """Number formats of one engine.

    Attributes:
      dtype: of activations and unquantised weights.
      kv_format, index_format: of the cache lanes.
      quantize_activations: the vendor rule for the inputs of quantised products; with a quantised
        cache also queries in E4M3.
    """

    dtype: Any
    kv_format: KVFormat
    index_format: KVFormat
    quantize_activations: bool

    @classmethod
    def resolve(
        cls,
        config: ModelConfig,
        default_dtype: str,
        *,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        index_dtype: str | None = None,
        activation_quant: str | None = None,
    ) -> "Numerics":
        """Fill what the caller left open: NVFP4 cache and vendor rule for M3.1 NVFP4 checkpoints.

        Raises:
          TargetError: a value that is none of the allowed ones.
        """
        has_nvfp4 = config.quantization.experts in ("nvfp4", "nvfp4_modelopt")
        chosen = _one_of("dtype", dtype or default_dtype, ("float32", "bfloat16"))
        plain = "f32" if chosen == "float32" else "bf16"
        cache = "nvfp4" if has_nvfp4 and config.is_m31 else plain
        formats = tuple(str(f) for f in KVFormat)
        kv = _one_of("kv_dtype", kv_dtype or cache, formats)
        index = _one_of("index_dtype", index_dtype or cache, formats)
        rule = activation_quant or ("vendor" if has_nvfp4 else "none")
        rule = _one_of("activation_quant", rule, ("vendor", "none"))
        numerics = cls(jnp.dtype(chosen), KVFormat(kv), KVFormat(index), rule == "vendor")
        for name, fmt, width in (
            ("kv_dtype", numerics.kv_format, config.head_dim),
            ("index_dtype", numerics.index_format, config.index_head_dim),
        ):
            if fmt is KVFormat.NVFP4 and width % 16:
                raise TargetError(
                    f"{name}=nvfp4 needs heads of a multiple of 16 channels, this model has "
                    f"{width}; use fp8 or bf16"
                )
        return numerics

    def describe(self) -> dict[str, str]:
        """For `explain`."""
        return {
            "dtype": str(self.dtype),
            "kv_dtype": str(self.kv_format),
            "index_dtype": str(self.index_format),
            "activation_quant": "vendor" if self.quantize_activations else "none",
        }


@dataclass(frozen=True)
class Target:
    """A resolved target. Hashable; everything a step is traced with."""

    name: str
    arch: str
    tp: int
    dtype: str
    impls: tuple[tuple[str, Impl], ...]
    reasons: tuple[tuple[str, str], ...]
    row_buckets: tuple[int, ...]
    prefill_chunk: int
    is_exact: bool
    pins: tuple[str, ...]
    objects: tuple[str, ...]
    settings: switches.Settings

    def slices(self, *widths: int) -> int:
        """Runs that this rank's inputs of a row-parallel product are cut into.

        Products that are added slice by slice are cut alike: pass all their widths.
        """
        return math.gcd(*widths, SLICES // self.tp)

    def impl(self, op: str) -> Impl:
        """The implementation of `op`."""
        return dict(self.impls)[op]

    @classmethod
    def resolve(
        cls,
        tp: int = 1,
        name: str | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> "Target":
        """Choose the target of this machine, or check the one named.

        Raises:
          TargetError: an unknown name or switch, a width the target is not for, or a GPU target on
            a machine without that GPU. There is no fall-back from one target to another.
        """
        settings = switches.read(os.environ if environ is None else environ, STEMS)
        name = name or settings.target or default_name()
        data = load_data(name)
        if tp not in data.widths:
            raise TargetError(f"tp={tp}: target {name} is for tp in {data.widths}")
        if data.platform != jax.default_backend():
            raise TargetError(
                f"target {name} needs the {data.platform} back end, this machine has "
                f"{jax.default_backend()}; use --target {default_name()}"
            )
        return cls._build(name, data, tp, settings)

    @classmethod
    def _build(cls, name: str, data: TargetData, tp: int, settings: switches.Settings) -> "Target":
        unknown = sorted({*data.impls, *data.objects} - set(STEMS))
        if unknown:
            raise TargetError(f"target {name} names no op of m31jax: {', '.join(unknown)}")
        chosen: dict[str, Impl] = {}
        reasons: dict[str, str] = {}
        for op in STEMS:
            impl, why = data.impls.get(op, REFERENCE), f"targets/{name}"
            if op not in data.impls:
                why = f"targets/{name}: no faster one"
            if not settings.is_on(op):
                impl, why = REFERENCE, settings.state(op).source
            forced = settings.forced_kind(op)
            if forced is not None:
                impl, why = Impl(Kind(forced), data.arch), f"M31JAX_IMPL={op}={forced}"
            if impl.kind is Kind.REFERENCE:
                impl = Impl(Kind.REFERENCE, data.arch)
            chosen[op], reasons[op] = impl, why
        return cls(
            name=name,
            arch=data.arch,
            tp=tp,
            dtype=data.dtype,
            impls=tuple(chosen.items()),
            reasons=tuple(reasons.items()),
            row_buckets=data.row_buckets,
            prefill_chunk=data.prefill_chunk,
            is_exact=data.is_exact,
            pins=data.pins,
            objects=tuple(
                name
                for op, names in data.objects.items()
                if chosen[op] == data.impls.get(op)
                for name in names
            ),
            settings=settings,
        )

    def explain(self) -> dict[str, Any]:
        """Every op's implementation and why, every switch and its origin, pins and objects."""
        return {
            "target": self.name,
            "arch": self.arch,
            "tp": self.tp,
            "exact": self.is_exact,
            "row_buckets": list(self.row_buckets),
            "ops": {
                op: {"kind": str(impl.kind), "arch": impl.arch, "why": dict(self.reasons)[op]}
                for op, impl in self.impls
            },
            "switches": {
                state.name: {"on": state.is_on, "source": state.source}
                for state in self.settings.states
            },
            "pins": list(self.pins),
            "kernel_objects": list(self.objects),
        }


def names() -> tuple[str, ...]:
    """Every target that this build has."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(targets.__path__)))


def default_name() -> str:
    """The target of this machine: `cpu` where there is no GPU."""
    platform = jax.default_backend()
    fitting = [name for name in names() if load_data(name).platform == platform]
    if not fitting:
        raise TargetError(
            f"no target for the {platform} back end; known targets: {', '.join(names())}. "
            "Set JAX_PLATFORMS=cpu to run the reference"
        )
    return fitting[0]


def load_data(name: str) -> TargetData:
    """The data of one target file; TargetError for an unknown name."""
    if name not in names():
        raise TargetError(f"unknown target {name!r}; known targets: {', '.join(names())}")
    return importlib.import_module(f"{targets.__name__}.{name}").DATA


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise TargetError(f"{field}={value!r}: use one of {', '.join(allowed)}")
    return value
