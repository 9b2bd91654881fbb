"""The environment of every test: eight simulated CPU devices, and nothing of the developer's shell.

All of it has to happen before JAX starts, and so at import.
"""

import os

from hypothesis import settings

DEVICES = "--xla_force_host_platform_device_count=8"

for name in [name for name in os.environ if name.startswith("M31JAX_")]:
    del os.environ[name]
if DEVICES not in os.environ.get("XLA_FLAGS", "").split():
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")
