"""Counts compilations, from JAX's own events, so that one after warm-up can be seen and named."""

import threading
from typing import Any

from jax import monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts every XLA compilation of this process from its creation on.

    It listens to the events that JAX records, so that a compile this project did not ask for (an
    eager operation on a new shape, say) counts as well.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: list[str] = []
        monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **fields: Any) -> None:
        if event == _EVENT:
            with self._lock:
                self._names.append(str(fields.get("fun_name", "unnamed")))

    @property
    def count(self) -> int:
        """Compilations so far."""
        return len(self._names)

    def names_since(self, count: int) -> tuple[str, ...]:
        """Functions compiled after the first `count` compilations."""
        return tuple(self._names[count:])


_counter: CompileCounter | None = None


def counter() -> CompileCounter:
    """The process's counter; JAX cannot take a listener back, so there is one."""
    global _counter
    if _counter is None:
        _counter = CompileCounter()
    return _counter
