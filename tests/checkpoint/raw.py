"""Safetensors read and written without the code under test, and small models to store."""

import dataclasses
import json
import struct
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from m31jax.config import ModelConfig, Quantization

DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F16": np.float16,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": np.uint8,
}


@dataclass
class Tensor:
    """A tensor as stored."""

    dtype: str
    shape: list[int]
    data: bytes

    @property
    def array(self) -> np.ndarray:
        """A copy of the values."""
        return np.frombuffer(self.data, DTYPES[self.dtype]).reshape(self.shape).copy()

    @classmethod
    def of(cls, dtype: str, values) -> "Tensor":
        array = np.ascontiguousarray(np.asarray(values, DTYPES[dtype]))
        return cls(dtype, list(np.shape(values)), array.tobytes())


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor of one file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    body = content[8 + length :]
    return {
        name: Tensor(entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """One file, tensors in the order given."""
    header, body = {}, b""
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [len(body), len(body) + len(tensor.data)],
        }
        body += tensor.data
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def read_all(directory: Path) -> dict[str, Tensor]:
    """Every tensor of a directory."""
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= read(path)
    return found


def read_index(directory: Path) -> dict:
    return json.loads((directory / "model.safetensors.index.json").read_text())


def write_index(directory: Path, content: dict) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def shard_of(directory: Path, name: str) -> Path:
    """The file that holds a tensor, by the index."""
    return directory / read_index(directory)["weight_map"][name]


def edit(directory: Path, changes: dict[str, Tensor | None]) -> None:
    """Replace, remove (None) or add (to the first shard) tensors, and keep the index right."""
    index = read_index(directory)
    places = index["weight_map"]
    first = min(places.values())
    for name in changes:
        places.setdefault(name, first)
    for shard in {places[name] for name in changes}:
        tensors = read(directory / shard)
        for name, tensor in changes.items():
            if places[name] != shard:
                continue
            if tensor is None:
                del tensors[name]
            else:
                tensors[name] = tensor
        write(directory / shard, tensors)
    index["weight_map"] = {n: p for n, p in places.items() if changes.get(n, True) is not None}
    tensors = read_all(directory)
    index["metadata"]["total_size"] = sum(len(t.data) for t in tensors.values())
    write_index(directory, index)


def set_bytes(directory: Path, name: str, offset: int, value: bytes) -> None:
    """Overwrite some bytes of one tensor."""
    tensor = read(shard_of(directory, name))[name]
    data = bytearray(tensor.data)
    data[offset : offset + len(value)] = value
    edit(directory, {name: dataclasses.replace(tensor, data=bytes(data))})


def set_value(directory: Path, name: str, value: float) -> None:
    """Overwrite the first value of one tensor."""
    tensor = read(shard_of(directory, name))[name]
    set_bytes(directory, name, 0, np.asarray(value, DTYPES[tensor.dtype]).tobytes())


SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=64,
    num_layers=2,
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=128,
    dense_intermediate_size=256,
    shared_intermediate_size=256,
    num_experts=4,
    experts_per_token=2,
    moe_layers=(False, True),
    sparse_layers=(True, True),
    index_num_heads=2,
    index_head_dim=32,
    sparse_block_size=16,
    topk_blocks=2,
    init_blocks=0,
    local_blocks=1,
    routed_scaling_factor=2.0,
    use_routing_bias=True,
    swiglu_alpha=1.702,
    swiglu_limit=7.0,
    swiglu_beta=1.0,
    use_gemma_norm=True,
    rms_norm_eps=1e-6,
    rope_theta=5e6,
    rotary_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    bos_token_id=62,
    eos_token_ids=(63,),
    pad_token_id=None,
)
"""Fits every width in BF16 and NVFP4; its 2 K/V heads are fewer than 4 and 8 ranks."""


def small(linear: str = "mxfp8", experts: str = "nvfp4", **changes) -> ModelConfig:
    """SMALL in a number format."""
    return dataclasses.replace(SMALL, quantization=Quantization(linear, experts), **changes)
