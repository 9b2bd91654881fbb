"""`quantization_config` of a `config.json`, and ModelOpt's `hf_quant_config.json`: both ways."""

import re
from typing import Any

from ..errors import ConfigError
from .keys import as_object, refuse_unknown, same, show
from .quantization import BF16, EXPERT_MATRICES, Layout, Quantization, matcher_of, strip

MOE_QUANT_FORMAT = "nvfp4-pack-quantized"

_MXFP8_KEYS = {
    "quant_method",
    "moe_quant_algo",
    "moe_quant_format",
    "weight_block_size",
    "activation_scheme",
    "ignored_layers",
    "modules_to_not_convert",
    "group_size",
    "kv_cache_quant_algo",
    "attention_quant_algo",
    "index_k_quant_type",
    "fmt",
    "scale_fmt",
}
# `producer` says who wrote the file and `config_groups` repeats `quantized_layers`.
_MODELOPT_KEYS = {
    "quant_method",
    "quant_algo",
    "quantized_layers",
    "ignore",
    "exclude_modules",
    "group_size",
    "kv_cache_quant_algo",
    "kv_cache_scheme",
    "config_groups",
    "producer",
}
_GROUP_SIZE = {"NVFP4": 16, "MXFP8": 32}
_EXPERT = re.compile(r"layers\.(\d+)\.block_sparse_moe\.experts(?:\.(\d+)\.(w[123]))?")


def parse(raw: dict[str, Any] | None, layout: Layout) -> Quantization:
    """Reads a `quantization_config` object; None means BF16 weights.

    Raises `ConfigError` for methods, schemes, group sizes and keys that this module does not list.
    """
    if raw is None:
        return BF16
    raw = as_object(raw, "quantization_config")
    method = raw.get("quant_method")
    if method == "mxfp8":
        return _parse_mxfp8(raw, layout)
    if method == "modelopt":
        return _parse_modelopt(raw, layout)
    raise ConfigError(
        f"quantization_config.quant_method={show(method)} is not supported; use a BF16, mxfp8 or "
        "modelopt checkpoint"
    )


def parse_hf_quant(raw: dict[str, Any], layout: Layout) -> Quantization:
    """Reads a whole `hf_quant_config.json`, ModelOpt's own file."""
    raw = as_object(raw, "the file")
    refuse_unknown(raw, {"producer", "quantization"}, "the file")
    inner = as_object(raw.get("quantization"), "quantization")
    if "quant_method" in inner:
        raise ConfigError("unknown key 'quant_method' in quantization; delete it from the file")
    if inner.get("quant_algo") is None:
        return BF16
    return _parse_modelopt({"quant_method": "modelopt", **inner}, layout)


def _expect(raw: dict[str, Any], key: str, allowed: tuple[Any, ...], any_case: bool = False):
    """Raises unless `key` is absent, null or one of `allowed`."""
    value = raw.get(key)
    seen = value
    if any_case and isinstance(value, str):
        seen = next((choice for choice in allowed if choice.lower() == value.lower()), value)
    if value is not None and not any(same(seen, choice) for choice in allowed):
        raise ConfigError(
            f"quantization_config.{key}={show(value)} is not supported, only "
            f"{' or '.join(map(show, allowed))} is; re-export the checkpoint in that form"
        )


def _names(raw: dict[str, Any], *keys: str) -> tuple[str, ...]:
    """The union, in order, of the name lists under `keys`."""
    names: dict[str, None] = {}
    for key in keys:
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, list) or not all(isinstance(n, str) and n for n in value):
            raise ConfigError(
                f"quantization_config.{key}={show(value)} must be a list of module names"
            )
        names |= dict.fromkeys(value)
    return tuple(names)


def _parse_mxfp8(raw: dict[str, Any], layout: Layout) -> Quantization:
    refuse_unknown(raw, _MXFP8_KEYS, "quantization_config")
    _expect(raw, "activation_scheme", ("dynamic",))
    _expect(raw, "weight_block_size", ([1, 32],))
    _expect(raw, "group_size", (16,))
    _expect(raw, "fmt", ("e4m3", "float8_e4m3fn"))
    _expect(raw, "scale_fmt", ("ue8m0", "e8m0"))
    _expect(raw, "kv_cache_quant_algo", ("FP8",), any_case=True)
    _expect(raw, "attention_quant_algo", ("FP8",), any_case=True)
    _expect(raw, "index_k_quant_type", ("nvfp4",), any_case=True)
    if raw.get("index_k_quant_type") is not None and not layout.all_sparse:
        raise ConfigError(
            "quantization_config.index_k_quant_type is set but not every layer is sparse; a 4-bit "
            "index cache needs sparse attention in every layer, so mark every layer sparse or drop "
            "the key"
        )
    _expect(raw, "moe_quant_algo", ("NVFP4",), any_case=True)
    _expect(raw, "moe_quant_format", (MOE_QUANT_FORMAT,), any_case=True)
    given = [key for key in ("moe_quant_algo", "moe_quant_format") if raw.get(key) is not None]
    if len(given) == 1:
        missing = "moe_quant_format" if given[0] == "moe_quant_algo" else "moe_quant_algo"
        raise ConfigError(
            f"quantization_config.{given[0]} is set but {missing} is missing; NVFP4 experts need "
            "both, MXFP8 experts neither"
        )
    ignored = _names(raw, "ignored_layers", "modules_to_not_convert")
    experts = "nvfp4" if given else "mxfp8"
    if _experts_ignored(ignored, layout):
        if given:
            raise ConfigError(
                "quantization_config ignores every routed expert but moe_quant_algo says NVFP4; "
                "drop one"
            )
        experts = "bf16"
    return Quantization("mxfp8", experts, ignored)


def _experts_ignored(ignored: tuple[str, ...], layout: Layout) -> bool:
    """Whether the routed experts are all ignored. A part of them is an error: they are one array.

    Looks at the first and last expert and at those that an entry names, not at every one.
    """
    matcher = matcher_of(ignored)
    num = layout.num_experts
    sample = {0, num - 1} | {e for e in matcher.experts if e < num}
    modules = [m for layer in layout.moe_layers for m in layout.expert_modules(layer, sample)]
    hits = [m for m in modules if matcher.matches(m)]
    if hits and len(hits) < len(modules):
        kept = next(m for m in modules if m not in set(hits))
        raise ConfigError(
            f"quantization_config ignores {hits[0]} but not {kept}; routed experts must all be "
            "quantised or all ignored"
        )
    return bool(hits)


def _parse_modelopt(raw: dict[str, Any], layout: Layout) -> Quantization:
    refuse_unknown(raw, _MODELOPT_KEYS, "quantization_config")
    _expect(raw, "kv_cache_quant_algo", ("FP8",), any_case=True)
    _expect(raw, "kv_cache_scheme", ({"dynamic": False, "num_bits": 8, "type": "float"},))
    ignored = _names(raw, "ignore", "exclude_modules")
    algo = raw.get("quant_algo")
    if algo == "MIXED_PRECISION":
        return _parse_layer_map(raw, ignored, layout)
    if not isinstance(algo, str) or algo not in _GROUP_SIZE:
        raise ConfigError(
            f"quantization_config.quant_algo={show(algo)} is not supported; use NVFP4, MXFP8 or "
            "MIXED_PRECISION"
        )
    _expect(raw, "group_size", (_GROUP_SIZE[algo],))
    if raw.get("quantized_layers") is not None:
        raise ConfigError(
            f"quantization_config has quantized_layers but quant_algo={algo!r}; the map belongs to "
            "MIXED_PRECISION"
        )
    matcher = matcher_of(ignored)
    kept = [module for module in layout.linears if not matcher.matches(module)]
    experts_ignored = _experts_ignored(ignored, layout)
    if algo == "MXFP8":
        return Quantization("mxfp8", "bf16" if experts_ignored else "mxfp8", ignored)
    if kept:
        raise ConfigError(
            f"quantization_config quantises {kept[0]} to NVFP4; only routed experts may be NVFP4, "
            "so list the projections under ignore and leave them in BF16"
        )
    return Quantization("bf16", "bf16" if experts_ignored else "nvfp4_modelopt", ignored)


def _parse_layer_map(raw: dict[str, Any], ignored: tuple[str, ...], layout: Layout) -> Quantization:
    """Mixed precision: `quantized_layers` maps each quantised module to its algorithm."""
    layers = as_object(raw.get("quantized_layers"), "quantization_config.quantized_layers")
    linears = {strip(module): module for module in layout.linears}
    matcher = matcher_of(ignored)
    mapped: set[str] = set()
    fused: set[int] = set()
    matrices: set[tuple[int, int, str]] = set()
    expert_algos: set[str] = set()
    for name, entry in layers.items():
        where = f"quantization_config.quantized_layers.{name}"
        entry = as_object(entry, where)
        refuse_unknown(entry, {"quant_algo", "group_size"}, where)
        algo, module = entry.get("quant_algo"), strip(name)
        if not isinstance(algo, str) or algo not in _GROUP_SIZE:
            raise ConfigError(f"{where}.quant_algo={show(algo)} must be NVFP4 or MXFP8")
        if not same(entry.get("group_size", _GROUP_SIZE[algo]), _GROUP_SIZE[algo]):
            raise ConfigError(
                f"{where}.group_size={show(entry['group_size'])} must be {_GROUP_SIZE[algo]} for "
                f"{algo}"
            )
        if matcher.matches(module):
            raise ConfigError(f"{where} is also listed under ignore; keep one of them")
        expert = _EXPERT.fullmatch(module)
        if module in linears:
            if algo != "MXFP8":
                raise ConfigError(
                    f"{where}.quant_algo={algo!r}: a projection may be MXFP8 or left out (BF16)"
                )
            mapped.add(module)
        elif expert and int(expert[1]) in layout.moe_layers:
            expert_algos.add(algo)
            if expert[2] is None:
                fused.add(int(expert[1]))
            elif int(expert[2]) < layout.num_experts:
                matrices.add((int(expert[1]), int(expert[2]), expert[3]))
            else:
                raise ConfigError(f"{where}: there are num_local_experts={layout.num_experts}")
        elif not name.startswith(("vision_tower.", "multi_modal_projector.", "mtp.")):
            raise ConfigError(
                f"{where} is no quantisable module of this model; delete the entry, or re-export "
                "the checkpoint with that module in BF16"
            )
    experts = _one_expert_format(expert_algos, fused, matrices, layout)
    if not mapped:
        return Quantization("bf16", experts, ignored)
    missing = [m for name, m in linears.items() if name not in mapped and not matcher.matches(m)]
    return Quantization("mxfp8", experts, (*ignored, *missing))


def _one_expert_format(
    algos: set[str], fused: set[int], matrices: set[tuple[int, int, str]], layout: Layout
) -> str:
    """The format of the experts, after checking that the map covers all of them with one."""
    if not algos:
        return "bf16"
    if len(algos) > 1:
        raise ConfigError(
            "quantization_config.quantized_layers gives routed experts both NVFP4 and MXFP8; all "
            "experts must share one"
        )
    whole = layout.num_experts * len(EXPERT_MATRICES)
    for layer in layout.moe_layers:
        count = sum(1 for key in matrices if key[0] == layer)
        if layer not in fused and count != whole:
            raise ConfigError(
                f"quantization_config.quantized_layers names {count} of {whole} expert matrices of "
                f"layer {layer}; routed experts must all be quantised or all left out"
            )
    return "nvfp4_modelopt" if algos == {"NVFP4"} else "mxfp8"


def to_dict(quantization: Quantization, layout: Layout) -> dict[str, Any] | None:
    """The `quantization_config` object that `parse` reads back to an equal value; None for BF16."""
    linear, experts, ignored = quantization.linear, quantization.experts, quantization.ignored
    if (linear, experts) == ("bf16", "bf16") and not ignored:
        return None
    bf16_by_name = experts == "bf16" and _experts_ignored(ignored, layout)
    if linear == "mxfp8" and (experts in ("mxfp8", "nvfp4") or bf16_by_name):
        raw: dict[str, Any] = {
            "quant_method": "mxfp8",
            "weight_block_size": [1, 32],
            "activation_scheme": "dynamic",
            "ignored_layers": list(ignored),
        }
        if experts == "nvfp4":
            raw |= {
                "moe_quant_algo": "NVFP4",
                "moe_quant_format": MOE_QUANT_FORMAT,
                "group_size": 16,
                "kv_cache_quant_algo": "FP8",
                "attention_quant_algo": "FP8",
            }
            if layout.all_sparse:
                raw["index_k_quant_type"] = "nvfp4"
        return raw
    layers: dict[str, Any] = {}
    if linear == "mxfp8":
        layers |= {
            module: {"quant_algo": "MXFP8", "group_size": 32}
            for module in layout.linears
            if not quantization.is_ignored(module)
        }
    if experts != "bf16":
        algo = "MXFP8" if experts == "mxfp8" else "NVFP4"
        layers |= {
            f"model.layers.{layer}.block_sparse_moe.experts": {
                "quant_algo": algo,
                "group_size": _GROUP_SIZE[algo],
            }
            for layer in layout.moe_layers
        }
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": list(ignored),
    }
