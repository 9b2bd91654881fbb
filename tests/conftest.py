"""The environment of every test: eight simulated CPU devices, and nothing of the developer's shell.

All of it has to happen before JAX starts, and so at import. Subprocesses inherit it.
"""

import os
from pathlib import Path

from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count=8"

for name in [name for name in os.environ if name.startswith("M31JAX_")]:
    del os.environ[name]
if DEVICES not in os.environ.get("XLA_FLAGS", "").split():
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

# Many tests compile the same steps, each in its own engine; the workers share what they compiled. A
# limit makes JAX lock the folder, so that no worker reads what another has half written.
COMPILED = Path(__file__).resolve().parent.parent / ".pytest_cache" / "compiled"
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(COMPILED)
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 << 30)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")
