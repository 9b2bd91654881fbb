"""Where the bytes of one engine go, and how many slots, pages and tokens they allow."""

import os
from dataclasses import dataclass
from typing import Any

from .checkpoint.plan import plan
from .config import ModelConfig
from .errors import TargetError
from .model.state import StateSpec, lane_shapes, page_bytes
from .target import Numerics, Target

_CPU_SHARE = 4  # a quarter of the machine's memory for the cache, at most the next line
_CPU_LIMIT_BYTES = 4 << 30


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes per rank: of the parameters, of the cache pool, and what the pool may take.

    `max_seq_len` is what a slot serves; its whole pages may hold a few tokens more.
    """

    spec: StateSpec
    max_seq_len: int
    params_bytes: int
    page_bytes: int
    cache_bytes: int
    budget_bytes: int

    def describe(self) -> dict[str, Any]:
        """For `explain`: the plan in bytes, lane by lane."""
        spec = self.spec
        return {
            "params_bytes": self.params_bytes,
            "cache_bytes": self.cache_bytes,
            "cache_budget_bytes": self.budget_bytes,
            "page_bytes": self.page_bytes,
            "page_tokens": spec.config.page_size,
            "num_pages": spec.num_pages,
            "pages_per_slot": spec.pages_per_slot,
            "max_slots": spec.slots,
            "max_seq_len": self.max_seq_len,
            "lanes": {
                name: {"shape": list(lane.shape), "dtype": str(lane.dtype)}
                for name, lane in lane_shapes(spec).items()
            },
        }


def cpu_budget_bytes() -> int:
    """What the cache may take on a CPU machine."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(total // _CPU_SHARE, _CPU_LIMIT_BYTES)


def plan_memory(
    config: ModelConfig,
    target: Target,
    numerics: Numerics,
    *,
    slots: int,
    max_seq_len: int | None = None,
    num_pages: int | None = None,
    budget_bytes: int | None = None,
) -> MemoryPlan:
    """Resolve `max_seq_len` and `num_pages`, or refuse what does not fit.

    All arithmetic is in Python integers, so a million tokens cannot overflow it.

    Args:
      slots: requests that decode at once.
      max_seq_len: longest context of a slot in tokens; None: the model's maximum, or what fits.
      num_pages: pages of the pool, the guard included; None: enough for all slots, or what fits.
      budget_bytes: bytes per rank that the pool may take; None: the target's.
    Raises:
      TargetError: `num_pages`, or one slot of `max_seq_len`, does not fit; names what would.
    """
    if slots < 1:
        raise TargetError(f"max_slots={slots} is below 1; use 1 or more")
    page = config.page_size
    budget = cpu_budget_bytes() if budget_bytes is None else budget_bytes
    empty = StateSpec(config, target.tp, numerics.kv_format, numerics.index_format, slots, 0, 0)
    each = page_bytes(empty)
    fitting = budget // each if num_pages is None else num_pages
    if fitting * each > budget:
        raise TargetError(
            f"num_pages={fitting} of {each} bytes a rank take {fitting * each} bytes, the budget "
            f"is {budget}; pass num_pages={budget // each} or less"
        )
    longest = (fitting - 1) * page
    if longest < page:
        raise TargetError(
            f"num_pages={fitting} leaves no page beside the guard; pass num_pages=2 or more "
            f"(a page takes {each} bytes a rank, the budget is {budget})"
        )
    wanted = min(config.max_position_embeddings, longest) if max_seq_len is None else max_seq_len
    if wanted < 1 or wanted > config.max_position_embeddings:
        raise TargetError(
            f"max_seq_len={wanted} is not in 1..{config.max_position_embeddings}, the model's "
            "max_position_embeddings; lower it"
        )
    columns = -(-wanted // page)
    if columns > fitting - 1:
        raise TargetError(
            f"max_seq_len={wanted} needs {columns} pages of {each} bytes a rank, {fitting - 1} fit "
            f"(budget {budget} bytes); the longest context that fits is max_seq_len={longest}"
        )
    if num_pages is None:
        num_pages = min(fitting, 1 + slots * columns)
    spec = StateSpec(
        config,
        target.tp,
        numerics.kv_format,
        numerics.index_format,
        slots,
        num_pages,
        columns,
    )
    params = plan(config, target.tp, numerics.dtype).bytes_per_rank
    return MemoryPlan(spec, wanted, params, each, each * num_pages, budget)
