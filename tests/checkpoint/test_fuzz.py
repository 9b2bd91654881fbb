"""Files with bytes changed at random: refused in words, or read; never another kind of error."""

import json
import random
import shutil
from pathlib import Path

import pytest

from m31jax import weights
from m31jax.checkpoint import make
from m31jax.checkpoint.reader import Checkpoint

from . import raw

CONFIG = raw.small("bf16", "bf16", num_experts=2)
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "model"
    make.make(CONFIG, path, max_shard_bytes=300_000, progress=False)
    return path


def problems(path: Path) -> list[str]:
    return Checkpoint(path).problems(weights.expand(CONFIG))


@pytest.mark.parametrize("seed", range(150))
def test_changed_bytes(seed, sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    rng = random.Random(seed)
    name = rng.choice([INDEX, *(p.name for p in path.glob("model-*"))])
    content = bytearray((path / name).read_bytes())
    header = len(content) if name == INDEX else 8 + int.from_bytes(content[:8], "little")
    for _ in range(rng.choice([1, 1, 2, 20])):
        content[rng.randrange(header)] = rng.choice(b'0123456789"{}[],: \x00\xffabz')
    if rng.random() < 0.2:
        content = content[: rng.randrange(len(content))]
    (path / name).write_bytes(content)
    found = problems(path)
    assert all(isinstance(problem, str) and problem for problem in found)


VALUES = [None, 0, -1, 1.5, True, "", "x", "../x", [], [1], {}, {"a": 1}, 1 << 80]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_any_json_in_an_index(value, sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    index = raw.read_index(path)
    name = next(iter(index["weight_map"]))
    for broken in (
        value,
        {"weight_map": value},
        index | {"weight_map": index["weight_map"] | {name: value}},
    ):
        raw.write_index(path, broken)
        assert problems(path) != []
    raw.write_index(path, index | {"metadata": value})
    assert problems(path) == []
    raw.write_index(path, index | {"metadata": {"total_size": value}})
    assert (problems(path) == []) == (value is None)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_any_json_in_a_header(value, sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    shard = next(path.glob("model-*"))
    content = shard.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    for broken in (
        value,
        header | {name: value},
        *(
            header | {name: header[name] | {key: value}}
            for key in ("dtype", "shape", "data_offsets")
        ),
        header | {name: header[name] | {"data_offsets": [0, value]}},
    ):
        text = json.dumps(broken).encode()
        shard.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
        assert problems(path) != []
