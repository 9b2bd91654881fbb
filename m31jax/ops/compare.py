"""How an implementation's output is held against the reference. Shared by every op's `compare`."""

import ml_dtypes
import numpy as np
from jax import Array


def _assert_alike(out: Array | np.ndarray, ref: Array | np.ndarray, what: str) -> None:
    if out.shape != ref.shape or out.dtype != ref.dtype:
        raise AssertionError(f"{what}: {out.dtype}{out.shape}, expected {ref.dtype}{ref.shape}")


def assert_equal(out: Array | np.ndarray, ref: Array | np.ndarray, what: str) -> None:
    """Every entry the same; for ids, tables and moved bytes."""
    _assert_alike(out, ref, what)
    got, want = np.asarray(out), np.asarray(ref)
    if got.dtype.itemsize == 1:
        got, want = got.view(np.uint8), want.view(np.uint8)
    differ = got != want
    if differ.any():
        first = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(
            f"{what}: {differ.sum()} of {differ.size} entries differ, "
            f"first at {first}: {got[first]} against {want[first]}"
        )


def assert_ulp(out: Array | np.ndarray, ref: Array | np.ndarray, ulps: float, what: str) -> None:
    """Each entry within `ulps` units in the last place of its row's largest magnitude.

    The row is the last axis. A sum of products has errors that follow the size of its terms, not of
    its result, so the row's scale is the honest unit.
    """
    _assert_alike(out, ref, what)
    eps = float(ml_dtypes.finfo(np.asarray(ref).dtype).eps)
    got, want = (np.asarray(a).astype(np.float64) for a in (out, ref))
    same = (got == want) | (np.isnan(got) & np.isnan(want))
    finite = np.where(np.isfinite(want), np.abs(want), 0.0)
    bound = ulps * eps * np.maximum(finite.max(axis=-1, keepdims=True), np.finfo(np.float32).tiny)
    with np.errstate(invalid="ignore"):
        wrong = ~same & ~(np.abs(got - want) <= bound)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise AssertionError(
            f"{what}: {wrong.sum()} of {wrong.size} entries past {ulps} ulp of their row, "
            f"first at {at}: {got[at]} against {want[at]}"
        )
