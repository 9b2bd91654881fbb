"""Errors raised to users. Each message names the value, the limit and the way out."""


class M31Error(ValueError):
    """Base of every error that m31jax raises for something the caller can change."""


class ConfigError(M31Error):
    """A `config.json` that is not a model this code serves."""


class CheckpointError(M31Error):
    """A checkpoint directory whose tensors are missing, damaged or not what the config says."""


class TargetError(M31Error):
    """A machine, mesh or switch setting that cannot work for this model."""


class RequestError(M31Error):
    """A request that cannot be served as asked."""
