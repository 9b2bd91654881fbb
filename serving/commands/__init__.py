"""The commands of `m31jax`, one module each. A module's `command` is imported when it is called.

Every command prints its answer alone on stdout, with `--json` as one JSON object, and everything
else on stderr. m31jax, and with it JAX, is imported inside functions, so that `--help` is quick.
"""
