"""Front ends over `m31jax.Engine`: the command line, and the servers when they are installed."""
