"""What the values of checkpoint tensors must satisfy, and the one repair that is made.

A scale byte that is NaN (E4M3 0x7F or 0xFF, E8M0 0xFF) over a group of zero codes is read as zero
with a warning: some quantisers divide by a zero maximum and leave it. Over anything else it is an
error.
"""

import warnings

import numpy as np

from ..errors import CheckpointError
from ..weights import Source
from .files import Stored
from .reader import Checkpoint, CheckpointWarning


def is_sound(values: np.ndarray, check: str) -> bool:
    """Whether values satisfy a check of `weights.Part`; NaN scales count as unsound here."""
    if values.size == 0 or check == "codes":
        return True
    match check:
        case "finite":
            return bool(np.isfinite(values).all())
        case "positive":
            return bool((np.isfinite(values) & (values > 0)).all())
        case "e4m3":
            return not ((values.view(np.uint8) & 0x7F) == 0x7F).any()
        case "e4m3_scale":
            return bool(values.view(np.uint8).max() < 0x7F)
        case "e8m0_scale":
            return bool(values.max() < 0xFF)
    raise AssertionError(check)


_MUST = {
    "finite": "NaN or infinite values",
    "positive": "a scale that is not finite and > 0",
    "e4m3": "NaN codes (0x7F or 0xFF)",
}


def reason(checkpoint: Checkpoint, stored: Stored, source: Source) -> str | None:
    """What is wrong with a tensor's values, or None if they are sound or can be repaired."""
    check = source.part.check
    values = checkpoint.view(stored)
    if is_sound(values, check):
        return None
    where = f"{stored.name} ({stored.path.name})"
    if check not in ("e4m3_scale", "e8m0_scale"):
        bad = np.isfinite(values.astype(np.float32))
        if check == "positive":
            bad &= values > 0
        first = np.argwhere(~bad)[0].tolist()
        return f"{where} holds {_MUST[check]}, first at {first}: damaged, download it again"
    raw = values.view(np.uint8)
    if check == "e4m3_scale":
        negative = (raw > 0x80) & (raw < 0xFF)
        if negative.any():
            first = np.argwhere(negative)[0].tolist()
            return f"{where} holds a negative scale at {first}; scales must be >= 0"
    bad = _nan_scales(raw, check) & ~_zero_groups(checkpoint, source, raw.shape)
    if bad.any():
        first = np.argwhere(bad)[0]
        byte = int(raw[tuple(first)])
        at = first.tolist()
        return f"{where} holds the NaN scale 0x{byte:02X} at {at} over codes that are not zero"
    return None


def repaired_scale(checkpoint: Checkpoint, stored: Stored, source: Source) -> np.ndarray:
    """A whole scale tensor with NaN over zero codes read as zero; warns with the tensor's name.

    Raises:
      CheckpointError: NaN over other codes, or a negative scale.
    """
    fault = reason(checkpoint, stored, source)
    if fault is not None:
        raise CheckpointError(fault)
    values = checkpoint.view(stored).copy()
    raw = values.view(np.uint8)
    bad = _nan_scales(raw, source.part.check)
    if bad.any():
        warnings.warn(
            f"{stored.name} ({stored.path.name}): {int(bad.sum())} NaN scale(s) over zero codes, "
            "read as 0",
            CheckpointWarning,
            stacklevel=2,
        )
    raw[bad] = 0
    return values


def _nan_scales(raw: np.ndarray, check: str) -> np.ndarray:
    return (raw & 0x7F) == 0x7F if check == "e4m3_scale" else raw == 0xFF


def _zero_groups(checkpoint: Checkpoint, source: Source, shape: tuple[int, ...]) -> np.ndarray:
    """Per scale, whether every code of its group is a zero of either sign."""
    codes = checkpoint.view(checkpoint.tensors[source.codes]).view(np.uint8)
    magnitude = 0x77 if source.part.check == "e4m3_scale" else 0x7F  # two E2M1 codes, or one E4M3
    return ~((codes & magnitude).reshape(*shape, -1).any(axis=-1))


def check_optional(checkpoint: Checkpoint, sources: tuple[Source, ...]) -> list[str]:
    """Faults of tensors that are only checked: activation scales, and K/V scales unless 1."""
    found = []
    for source in sources:
        stored = checkpoint.find(source)
        if stored is not None and (fault := reason(checkpoint, stored, source)):
            found.append(fault)
    for stored in checkpoint.unit_scales:
        if not (checkpoint.view(stored).astype(np.float32) == 1).all():
            found.append(
                f"{stored.name} ({stored.path.name}) is not 1; the cache is stored with outer "
                "scale 1, so this checkpoint's K/V scales cannot be honoured"
            )
    return found
