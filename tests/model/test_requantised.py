"""The golden checkpoints re-written to the quantised packagings: how far their logits move."""

import numpy as np
import pytest

from m31jax import Engine
from m31jax.checkpoint.requantise import requantise
from tests import engines
from tests.golden import golden_dir

# Root mean square logit error in units of the logits' standard deviation. Measured, a / k: mxfp8
# 0.336 / 0.138, nvfp4 0.400 / 0.173. Random weights amplify rounding: a few rows change an
# expert or a block. Unrelated logits are at 1.2 and more (the last test).
LIMITS = {"mxfp8": 0.4, "nvfp4": 0.5}


def distance(out: np.ndarray, ref: np.ndarray) -> float:
    """Root mean square difference in units of the reference's standard deviation."""
    return float(np.sqrt(np.mean((out - ref) ** 2)) / ref.std())


@pytest.mark.parametrize("fmt", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("which", ["a", "k"])
def test_logits_stay_close(which, fmt, tmp_path):
    ids = engines.golden_arrays(which)["mid/input_ids"].tolist()
    reference = engines.golden(which).score(ids)
    requantise(golden_dir() / f"hf_tiny_{which}", tmp_path / fmt, fmt, progress=False)
    engine = Engine.load(
        tmp_path / fmt,
        activation_quant="none",
        kv_dtype="f32",
        index_dtype="f32",
        progress=False,
    )
    logits = engine.score(ids)
    assert np.isfinite(logits).all()
    moved = distance(logits, reference)
    print(f"hf_tiny_{which} as {fmt}: logits moved by {moved:.3f} of their standard deviation")
    assert 0 < moved < LIMITS[fmt]


def test_the_limit_is_below_unrelated_logits():
    logits = engines.golden("a").score(engines.golden_arrays("a")["mid/input_ids"].tolist())
    assert distance(np.roll(logits, 1, axis=0), logits) > 1.2
