"""One checkpoint on one machine: what an engine of it would run and hold. Reads no weight."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import bundled
from .config import ModelConfig
from .errors import TargetError
from .memory import MemoryPlan, plan_memory
from .steps import page_buckets
from .target import Numerics, Target


@dataclass(frozen=True)
class Deployment:
    """Everything that is decided before weights are read.

    Attributes:
      path: the checkpoint's directory.
      config, target, numerics: the checkpoint, the machine, the number formats.
      memory: the plan that fixes slots, pages and the longest context.
      prefill_chunk: most prompt tokens of one step.
    """

    path: Path
    config: ModelConfig
    target: Target
    numerics: Numerics
    memory: MemoryPlan
    prefill_chunk: int

    @classmethod
    def resolve(
        cls,
        model_dir: str | Path,
        *,
        tp: int = 1,
        target: str | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        index_dtype: str | None = None,
        activation_quant: str | None = None,
        drafter: str | Path | None = "auto",
        draft_tokens: int | None = None,
        max_slots: int = 8,
        max_seq_len: int | None = None,
        num_pages: int | None = None,
        prefill_chunk: int | None = None,
    ) -> "Deployment":
        """Resolve the options of `Engine.load`, which describes them.

        Raises:
          ConfigError, CheckpointError, TargetError: what `Engine.load` would raise before it reads
            a weight.
        """
        resolved = Target.resolve(tp, target)
        path = bundled.locate(model_dir, resolved.settings.cache_dir)
        config = ModelConfig.from_dir(path)
        numerics = Numerics.resolve(
            config,
            resolved.dtype,
            dtype=dtype,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            activation_quant=activation_quant,
        )
        _refuse_drafter(path, drafter, draft_tokens)
        chunk = resolved.prefill_chunk if prefill_chunk is None else prefill_chunk
        if chunk < 1:
            raise TargetError(f"prefill_chunk={chunk} is below 1; use 1 or more")
        memory = plan_memory(
            config,
            resolved,
            numerics,
            slots=max_slots,
            max_seq_len=max_seq_len,
            num_pages=num_pages,
        )
        return cls(path, config, resolved, numerics, memory, chunk)

    def explain(self) -> dict[str, Any]:
        """Target, implementations, switches, number formats, buckets and the memory plan.

        Of dicts, lists and scalars alone: what `m31jax explain --json` prints.
        """
        config, memory = self.config, self.memory
        quantization = dataclasses.asdict(config.quantization)
        return {
            **self.target.explain(),
            "model": {
                "is_m31": config.is_m31,
                "layers": config.num_layers,
                "experts": config.num_experts,
                "quantization": quantization | {"ignored": list(config.quantization.ignored)},
            },
            "numerics": self.numerics.describe(),
            "page_buckets": list(page_buckets(memory.spec.pages_per_slot)),
            "memory": memory.describe(),
        }


def _refuse_drafter(path: Path, drafter: str | Path | None, draft_tokens: int | None) -> None:
    found = drafter == "auto" and (path / "dspark").is_dir()
    if found or drafter not in (None, "auto", "none"):
        raise TargetError(
            f"drafter={drafter!r}: this build does not speculate yet; load with drafter=None "
            "(--drafter none)"
        )
    if draft_tokens:
        raise TargetError(f"draft_tokens={draft_tokens} needs a drafter; leave it out")
