"""How modules take their parameters from the loaded table."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from ..ops.weight import Weight


class Scope:
    """A view of the parameter table (dot path -> array) below one prefix.

    Shapes and dtypes are decided once, in `weights.MANIFEST`; a module names what it needs and
    never repeats a shape. The leaves may be arrays or `jax.ShapeDtypeStruct`s.
    """

    def __init__(self, leaves: Mapping[str, Any], prefix: str = "") -> None:
        self._leaves, self._prefix = leaves, prefix

    def at(self, name: str) -> "Scope":
        """The view below `name`."""
        return Scope(self._leaves, f"{self._prefix}{name}.")

    def has(self, name: str) -> bool:
        """Whether the table has this leaf, or any leaf below it."""
        full = self._prefix + name
        return full in self._leaves or any(key.startswith(full + ".") for key in self._leaves)

    def param(self, name: str) -> nnx.Param:
        """The leaf `name` as a parameter."""
        return nnx.Param(self._leaves[self._prefix + name])

    def optional(self, name: str) -> nnx.Param | None:
        """The leaf `name` as a parameter, or None if the checkpoint has none."""
        return self.param(name) if self._prefix + name in self._leaves else None


def value(param: nnx.Param | None) -> Any:
    """The array of a parameter; None stays None."""
    return None if param is None else param.get_value()


class Linear(nnx.Module):
    """A linear weight in its stored form, read by the ops through `stored`."""

    def __init__(self, scope: Scope) -> None:
        self.weight = scope.param("weight")
        self.weight_scale = nnx.data(scope.optional("weight_scale"))
        self.weight_scale_2 = nnx.data(scope.optional("weight_scale_2"))

    @property
    def stored(self) -> Weight:
        """The parts as the ops take them."""
        return Weight(value(self.weight), value(self.weight_scale), value(self.weight_scale_2))
