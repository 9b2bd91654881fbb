"""m31jax serves MiniMax-M3 and MiniMax-M3.1 from JAX. Start at `Engine.load`."""

from .config import ModelConfig
from .engine import Engine
from .errors import CheckpointError, ConfigError, M31Error, RequestError, TargetError
from .request import Completion, SamplingParams
from .target import Target

__all__ = [
    "CheckpointError",
    "Completion",
    "ConfigError",
    "Engine",
    "M31Error",
    "ModelConfig",
    "RequestError",
    "SamplingParams",
    "Target",
    "TargetError",
]
