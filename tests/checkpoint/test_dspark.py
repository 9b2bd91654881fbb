"""The drafter's table and random drafters."""

import json

import pytest

from m31jax.checkpoint import dspark, inspect, make
from m31jax.checkpoint.dspark import DrafterShape
from m31jax.errors import CheckpointError
from m31jax.presets import FULL, TINY
from tests.golden import golden_dir

from . import raw
from .test_make import released_drafter


def test_the_released_drafter():
    shape = dspark.shape_for(FULL)
    assert shape.capture_layers == (3, 17, 31, 45, 59)
    assert (shape.num_layers, shape.markov_rank, shape.block_size) == (5, 256, 7)
    assert (shape.mask_token_id, shape.window) == (200058, 4096)
    kinds = {"F8_E4M3": "F8"}
    listed = {
        s.name: (s.shape, kinds.get(s.part.dtypes[0], s.part.dtypes[0]))
        for s in dspark.sources(shape)
    }
    assert listed == released_drafter()


def test_the_golden_drafter_has_the_tensors_of_the_table():
    folder = golden_dir() / "dspark" / "tiny_draft" / "dspark"
    text = json.loads((folder / "config.json").read_text())["text_config"]
    shape = DrafterShape(
        hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=128,
        vocab_size=97, num_layers=2, capture_layers=tuple(text["dspark_target_layer_ids"]),
        markov_rank=16, block_size=7, mask_token_id=96, window=16,
    )  # fmt: skip
    stored = raw.read_all(folder)
    listed = {
        dspark.PREFIX + s.name: (list(s.shape), s.part.dtypes[0]) for s in dspark.sources(shape)
    }
    assert listed == {name: (tensor.shape, tensor.dtype) for name, tensor in stored.items()}


def test_its_config_has_the_keys_of_the_golden_one():
    folder = golden_dir() / "dspark" / "tiny_draft" / "dspark"
    golden = json.loads((folder / "config.json").read_text())
    written = dspark.to_config(dspark.shape_for(TINY), TINY)

    def keys(value) -> object:
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None

    assert keys(written) == keys(golden)
    assert written["text_config"]["dflash_config"]["num_target_layers"] == TINY.num_layers
    assert written["text_config"]["dflash_config"]["target_layer_ids"] == [0, 1, 2, 3]


@pytest.mark.parametrize("vocab", [64, 97, 512])
def test_the_mask_is_no_special_token(vocab):
    config = raw.small(
        vocab_size=vocab, bos_token_id=vocab - 1, eos_token_ids=(vocab - 2,), pad_token_id=vocab - 3
    )
    assert dspark.shape_for(config).mask_token_id == vocab - 4


def test_a_drafter_for_an_existing_target(tmp_path):
    make.make(raw.small(), tmp_path / "with", seed=4, drafter=True, progress=False)
    make.make(raw.small(), tmp_path / "without", seed=4, progress=False)
    assert inspect.inspect(tmp_path / "without")["drafter"] is None
    made = make.add_drafter(tmp_path / "without", seed=4, progress=False)
    for folder in ("with", "without"):
        report = inspect.inspect(tmp_path / folder)
        assert report["problems"] == []
        assert report["drafter"] == made
    one, other = (raw.read_all(tmp_path / f / "dspark") for f in ("with", "without"))
    assert {n: t.data for n, t in one.items()} == {n: t.data for n, t in other.items()}
    with pytest.raises(CheckpointError, match=r"dspark exists"):
        make.add_drafter(tmp_path / "with", progress=False)


def test_a_damaged_drafter_is_seen(tmp_path):
    make.make(raw.small(), tmp_path / "model", drafter=True, progress=False)
    (shard,) = (tmp_path / "model" / "dspark").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    (problem,) = inspect.inspect(tmp_path / "model")["problems"]
    assert "dspark/" in problem
    assert "truncated" in problem
