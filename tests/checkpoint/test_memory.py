"""Loading needs the result and at most one shard more."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from m31jax.checkpoint import make
from m31jax.presets import TINY

from . import raw

REPOSITORY = Path(__file__).resolve().parents[2]

# Peak resident memory while loading, above what the process held before.
SCRIPT = """
import json, sys, threading, time
import jax, ml_dtypes, numpy as np, psutil
from m31jax.checkpoint import loader
from m31jax.config import ModelConfig
from sharding.mesh import make_mesh

path, tp, dtype = sys.argv[1], int(sys.argv[2]), np.dtype(sys.argv[3])
config = ModelConfig.from_dir(path)
mesh = make_mesh(tp, jax.devices())
jax.device_put(np.zeros(1)).block_until_ready()
process = psutil.Process()
before = peak = process.memory_info().rss
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
params = loader.load(path, config, mesh, dtype=dtype, progress=False)
jax.block_until_ready(params)
done = True
thread.join()
held = sum(loader.placed_bytes(params).values())
print(json.dumps({"peak": peak - before, "held": held}))
"""


def peak_bytes(path: Path, tp: int, dtype: str) -> tuple[int, int]:
    """Peak while loading, and bytes of the result."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path), str(tp), dtype],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        env=environment,
    )
    report = json.loads(done.stdout)
    return report["peak"], report["held"]


def check(path: Path, tp: int, dtype: str) -> None:
    largest = max(p.stat().st_size for p in path.glob("*.safetensors"))
    peak, held = peak_bytes(path, tp, dtype)
    assert held < peak * 1.1, "the result was not resident: the measurement is wrong"
    assert peak < 1.1 * (held + largest), f"peak {peak}, result {held}, largest shard {largest}"


def wide(layers: int):
    """A model of about 45 MB a layer in NVFP4."""
    config = make.with_format(TINY, "nvfp4")
    return raw.dataclasses.replace(
        config,
        num_layers=layers,
        moe_layers=(False,) + (True,) * (layers - 1),
        sparse_layers=(True,) * layers,
        hidden_size=1024,
        intermediate_size=1024,
        num_experts=24,
    )


@pytest.mark.parametrize(
    ("tp", "dtype", "shard_bytes"), [(1, "float32", 40 << 20), (2, "bfloat16", 150 << 20)]
)
def test_a_checkpoint_of_300_mb(tp, dtype, shard_bytes, tmp_path):
    path = tmp_path / "model"
    made = make.make(wide(8), path, max_shard_bytes=shard_bytes, progress=False)
    assert made["total_bytes"] > 300e6
    assert made["shards"] > 1
    check(path, tp, dtype)


@pytest.mark.long
@pytest.mark.parametrize(("tp", "dtype"), [(1, "float32"), (8, "bfloat16")])
def test_a_checkpoint_of_2_gb(tp, dtype, tmp_path):
    path = tmp_path / "model"
    made = make.make(wide(52), path, max_shard_bytes=500 << 20, progress=False)
    assert made["total_bytes"] > 2e9
    assert made["shards"] >= 4
    check(path, tp, dtype)
