"""What a checkpoint is, read strictly from its `config.json`."""

from .model_config import ModelConfig
from .quantization import Quantization

__all__ = ["ModelConfig", "Quantization"]
