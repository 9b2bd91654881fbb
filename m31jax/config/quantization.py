"""How the weights of a checkpoint are stored: `quantization_config` of `config.json`.

| `quant_method`                     | projections (`linear`) | routed experts (`experts`) |
|------------------------------------|------------------------|----------------------------|
| absent                             | bf16                   | bf16                       |
| mxfp8                              | mxfp8                  | mxfp8                      |
| mxfp8 with the two `moe_quant_*`   | mxfp8                  | nvfp4                      |
| modelopt, NVFP4 or mixed precision | bf16 or mxfp8          | nvfp4_modelopt             |

`nvfp4` and `nvfp4_modelopt` hold the same codes under different tensor names, and their outer
scales are each other's reciprocals. Embeddings, `lm_head`, norms and router are never quantised.
"""

import fnmatch
import re
from dataclasses import dataclass
from functools import lru_cache

from ..errors import ConfigError
from .keys import show

LINEAR_FORMATS = ("bf16", "mxfp8")
EXPERT_FORMATS = ("bf16", "mxfp8", "nvfp4", "nvfp4_modelopt")
EXPERT_MATRICES = ("w1", "w2", "w3")

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")


@dataclass(frozen=True)
class Quantization:
    """Number formats of the stored weights.

    Attributes:
      linear: format of the q/k/v/o, index q/k, dense MLP and shared expert projections, one of
        `LINEAR_FORMATS`.
      experts: format of the routed experts, one of `EXPERT_FORMATS`.
      ignored: module names or patterns left in BF16, as the checkpoint spells them; `is_ignored`.
    Raises:
      ConfigError: a format outside the lists, or BF16 projections with compressed-tensors NVFP4
        experts, which no `quantization_config` can say.
    """

    linear: str = "bf16"
    experts: str = "bf16"
    ignored: tuple[str, ...] = ()

    def __post_init__(self):
        if self.linear not in LINEAR_FORMATS:
            raise ConfigError(f"linear={self.linear!r} must be one of {', '.join(LINEAR_FORMATS)}")
        if self.experts not in EXPERT_FORMATS:
            raise ConfigError(
                f"experts={self.experts!r} must be one of {', '.join(EXPERT_FORMATS)}"
            )
        if (self.linear, self.experts) == ("bf16", "nvfp4"):
            raise ConfigError(
                "linear='bf16' with experts='nvfp4' has no spelling in config.json; use "
                "linear='mxfp8', or experts='nvfp4_modelopt'"
            )
        if not isinstance(self.ignored, tuple):
            raise ConfigError(f"ignored={show(self.ignored)} must be a tuple of module names")
        matcher_of(self.ignored)

    def is_ignored(self, module: str) -> bool:
        """Whether `module` (such as `model.layers.0.self_attn.q_proj`) is listed as not quantised.

        A plain entry matches whole dotted components anywhere in the name, so `gate` is the router
        and never `gate_proj`, and `model.layers.1` never layer 10. Entries with `*`, `?` or `[` are
        shell patterns and `re:` starts a regular expression; both match the name with or without
        the wrapper's prefix (`model.`, `language_model.`).
        """
        return matcher_of(self.ignored).matches(module)

    def linear_format(self, module: str) -> str:
        """Format of one projection: `linear`, or `bf16` when it is ignored."""
        return "bf16" if self.is_ignored(module) else self.linear


@dataclass(frozen=True)
class Layout:
    """The quantisable modules of a model, named as in the checkpoint after the wrapper's prefix.

    Attributes:
      linears: every projection outside the routed experts.
      moe_layers: ids of layers with routed experts.
      num_experts: experts in each of them.
      all_sparse: whether every layer uses sparse attention.
    """

    linears: tuple[str, ...]
    moe_layers: tuple[int, ...]
    num_experts: int
    all_sparse: bool

    def expert_modules(self, layer: int, experts: set[int]) -> list[str]:
        """Names of the matrices of some experts of a layer."""
        return [
            f"model.layers.{layer}.block_sparse_moe.experts.{e}.{w}"
            for e in sorted(experts)
            for w in EXPERT_MATRICES
        ]


class _Matcher:
    """Compiled `ignored` entries."""

    def __init__(self, entries: tuple[str, ...]):
        self.literals: set[tuple[str, ...]] = set()
        self.patterns: list[re.Pattern[str]] = []
        self.experts: set[int] = set()  # experts that some entry names
        for entry in entries:
            if not isinstance(entry, str) or not entry:
                raise ConfigError(f"ignored layers has the entry {show(entry)}; use module names")
            self.experts |= {int(n) for n in re.findall(r"experts\\?\.(\d{1,9})(?!\d)", entry)}
            if entry.startswith("re:"):
                try:
                    self.patterns.append(re.compile(entry[3:]))
                except re.error as error:
                    raise ConfigError(
                        f"ignored layers has the entry {show(entry)}, no regular expression: "
                        f"{error}"
                    ) from error
            elif any(c in entry for c in "*?["):
                self.patterns.append(re.compile(fnmatch.translate(entry)))
            else:
                self.literals.add(tuple(strip(entry).split(".")))

    def matches(self, module: str) -> bool:
        name = strip(module)
        parts = name.split(".")
        if self.literals and any(
            tuple(parts[i:j]) in self.literals
            for i in range(len(parts))
            for j in range(i + 1, len(parts) + 1)
        ):
            return True
        spellings = (name, *(prefix + name for prefix in _PREFIXES))
        return any(p.match(spelling) for p in self.patterns for spelling in spellings)


@lru_cache(maxsize=64)
def matcher_of(entries: tuple[str, ...]) -> _Matcher:
    return _Matcher(entries)


BF16 = Quantization()


def strip(module: str) -> str:
    """A module name without the prefix of its wrapper: `layers.0.self_attn.q_proj`, `lm_head`."""
    for prefix in _PREFIXES:
        if module.startswith(prefix):
            return module[len(prefix) :]
    return module
