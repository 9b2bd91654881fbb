"""Any checkpoint on CPU, any tensor-parallel width: every op is its reference, `exact` holds."""

from ..target import TargetData

DATA = TargetData(
    arch="cpu",
    platform="cpu",
    widths=(1, 2, 4, 8),
    dtype="float32",
    impls={},
    row_buckets=(8, 16, 32, 64),
    prefill_chunk=64,
    is_exact=True,
)
