"""Random weights, drawn as the bytes that a checkpoint stores.

Values follow a normal distribution of standard deviation gain / sqrt(fan_in). Quantised tensors are
drawn byte first, from tables of what a normal value quantises to: a full-size checkpoint has 4e11
values, and looking up random bytes is many times as fast as drawing, scaling and rounding normals.
A tensor depends on the seed and its own name only.
"""

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from statistics import NormalDist

import ml_dtypes
import numpy as np

from ..weights import Source

_PIECE = 1 << 22  # values drawn at a time
_ENTRIES = 1 << 16  # of a table: two random bytes, normal values up to 4.3 deviations

# Chosen so that a random model is a good test: attention and router decide, the clamp at 7 acts on
# some channels, logits have a deviation of about 2 and the residual stream does not explode.
_GAIN = {
    "lm_head": 2.0,
    "o_proj": 1.6,
    "gate_proj": 2.2,
    "up_proj": 2.2,
    "w1": 2.2,
    "w3": 2.2,
    "down_proj": 0.7,
    "w2": 0.7,
    "gate": 1.3,
}
_UNIT_DEVIATION = ("embed_tokens", "markov_w1")  # looked up, not multiplied by: no fan-in
# Mean and deviation of vectors. Norms are stored centred at 0: the model multiplies by 1 + w.
_VECTOR = {
    "input_layernorm": (0.0, 0.2),
    "post_attention_layernorm": (0.0, 0.2),
    "q_norm": (0.5, 0.3),
    "k_norm": (0.3, 0.3),
    "block_sparse_moe": (0.0, 0.25),  # e_score_correction_bias
}
# Largest activations that static scales are made for: normed rows, and the middle of an MLP.
_ACTIVATION_AMAX = {"w1": 8.0, "w3": 8.0, "w2": 56.0}
_RANGE = 2688.0  # 448 * 6
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_CODES_PER_DEVIATION = 2.2  # E2M1 saturates at 6, 2.7 deviations
_E4M3_DEVIATION = 48.0  # of E4M3 data, up to twice that: 4.3 * 96 is below 448
_SPREAD = float(
    np.sqrt((0.25 + 1 + 4) / 3)
)  # what exponents -1, 0, 1 in equal shares multiply it by


def values(seed: int, source: Source) -> Iterator[np.ndarray]:
    """A random tensor of a source's canonical shape and dtype, flat and in pieces."""
    part = source.part
    # The module's own name, w1 or q_proj; norms and linears alike end in `.weight` and its scales.
    module = source.name.rpartition(".")[0]
    leaf = module.rpartition(".")[2]
    deviation = 1.0 if leaf in _UNIT_DEVIATION else _GAIN.get(leaf, 1.0) / source.width**0.5
    match part.check:
        case "positive":
            yield np.full(
                source.shape, _outer_scale(seed, module, leaf, part.tensor, deviation), "f4"
            )
            return
        case "codes":
            table = _packed_codes()
        case "e4m3_scale":
            table = _group_scales()
        case "e8m0_scale":
            power = _power(deviation)
            table = (np.arange(_ENTRIES) % 3 - 1 + power + 127).astype(np.uint8)
        case "e4m3":
            scaled = deviation / _SPREAD / 2.0 ** _power(deviation) * _normal()
            table = scaled.astype(ml_dtypes.float8_e4m3fn)
        case _:
            mean = 0.0
            if len(source.shape) == 1:
                mean, deviation = _VECTOR.get(leaf, (0.0, 0.3))
            is_bf16 = part.dtypes[0] == "BF16"
            table = (mean + deviation * _normal()).astype(
                ml_dtypes.bfloat16 if is_bf16 else np.float32
            )
    rng = _generator(seed, source.name)
    left = int(np.prod(source.shape))
    while left:
        count = min(left, _PIECE)
        yield table[rng.integers(0, _ENTRIES, count, np.uint16)]
        left -= count


def _generator(seed: int, name: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest[:16], "little")))


@lru_cache
def _normal(count: int = _ENTRIES) -> np.ndarray:
    """Quantiles of the normal distribution, scaled to a deviation of exactly 1."""
    inverse = NormalDist().inv_cdf
    quantiles = np.array([inverse((i + 0.5) / count) for i in range(count)])
    return quantiles / quantiles.std()


@lru_cache
def _packed_codes() -> np.ndarray:
    """A packed byte, two E2M1 codes, for each pair of random bytes."""
    scaled = _CODES_PER_DEVIATION * _normal(256)
    magnitude = np.abs(np.abs(scaled)[:, None] - _E2M1).argmin(axis=1)
    codes = (magnitude + 8 * ((scaled < 0) & (magnitude > 0))).astype(np.uint8)
    pairs = np.arange(_ENTRIES)
    return codes[pairs & 255] | (codes[pairs >> 8] << 4)


@lru_cache
def _group_scales() -> np.ndarray:
    """E4M3 group scales around 128, a factor of 2 either way at two deviations."""
    return (128 * np.exp2(_normal() / 2)).clip(32, 448).astype(ml_dtypes.float8_e4m3fn)


@lru_cache
def _code_deviation() -> float:
    """Deviation of code * group scale."""
    codes, scales = _E2M1[_packed_codes() & 7], _group_scales().astype(np.float64)
    return float(np.sqrt((codes**2).mean() * (scales**2).mean()))


def _outer_scale(seed: int, module: str, leaf: str, tensor: str, deviation: float) -> float:
    """An expert's outer scale, within 10 % of what its gain asks for; w1 and w3 have the same.

    `*_global_scale` are encode scales, the reciprocals of the decode scales of the other packaging.
    """
    expert = module.rpartition(".")[0]
    is_input = tensor.startswith(".input")
    jitter = 0.9 + 0.2 * _generator(seed, f"{expert}.{leaf == 'w2'}.{is_input}").random()
    if is_input:
        encode = _RANGE / (_ACTIVATION_AMAX[leaf] * jitter)
    else:
        encode = _code_deviation() / (deviation * jitter)
    return encode if tensor.endswith("global_scale") else 1 / encode


def _power(deviation: float) -> int:
    """Exponent of the scale under which E4M3 data of this deviation has 48 to 96."""
    return int(np.floor(np.log2(deviation / _SPREAD / _E4M3_DEVIATION)))
