"""What inspect says of sound checkpoints; test_damaged.py has the others."""

import json
import shutil

import jax
import numpy as np
import pytest

from m31jax.checkpoint import inspect, loader, make
from m31jax.config import ModelConfig
from sharding.mesh import make_mesh
from tests.golden import golden_dir

from . import raw


@pytest.mark.parametrize("fmt", ["bf16", "nvfp4"])
def test_a_sound_checkpoint(fmt, tmp_path):
    path = tmp_path / "model"
    linear, experts = ("bf16", "bf16") if fmt == "bf16" else ("mxfp8", "nvfp4")
    made = make.make(raw.small(linear, experts), path, max_shard_bytes=100_000, progress=False)
    report = inspect.inspect(path)
    assert json.loads(json.dumps(report))
    assert (report["layout"], report["prefix"]) == ("huggingface", "language_model.")
    assert report["format"] == {"linear": linear, "experts": experts}
    assert report["tensors"] == made["tensors"]
    assert report["total_bytes"] == made["total_bytes"]
    assert [s["file"] for s in report["shards"]] == sorted(p.name for p in path.glob("model-*"))
    assert all(s["bytes"] == (path / s["file"]).stat().st_size for s in report["shards"])
    assert (report["problems"], report["drafter"], report["tokenizer"]) == ([], None, [])
    assert any("tokenizer" in note for note in report["notes"])
    assert report["values_read"] is True
    assert report["allowed_widths"] == [1, 2, 4, 8]
    config = ModelConfig.from_dir(path)
    for tp in (1, 8):
        for dtype in ("float32", "bfloat16"):
            params = loader.load(
                path, config, make_mesh(tp, jax.devices()), dtype=np.dtype(dtype), progress=False
            )
            (placed,) = set(loader.placed_bytes(params).values())
            assert report["bytes_per_rank"][tp][dtype] == placed


def test_the_number_of_weights_does_not_depend_on_the_format(tmp_path):
    counts = set()
    for linear, experts in (("bf16", "bf16"), ("mxfp8", "mxfp8"), ("mxfp8", "nvfp4")):
        path = tmp_path / f"{linear}-{experts}"
        make.make(raw.small(linear, experts), path, progress=False)
        counts.add(inspect.inspect(path)["parameters"])
    stored = raw.read_all(tmp_path / "bf16-bf16").values()
    assert counts == {sum(int(np.prod(t.shape)) for t in stored)}


def test_widths_that_do_not_fit_say_why():
    report = inspect.inspect(golden_dir() / "hf_tiny_k")
    assert report["allowed_widths"] == [1, 2, 4, 8]
    assert report["prefix"] == ""


def test_reasons_and_files(tmp_path):
    path = tmp_path / "model"
    make.make(raw.small(intermediate_size=64), path, drafter=True, progress=False)
    (path / "tokenizer.json").write_text("{}")
    shutil.copy(next(path.glob("model-*")), path / "old.safetensors")
    raw.edit(path, {"vision_tower.x": raw.Tensor.of("F16", [1.0])})
    report = inspect.inspect(path)
    assert "tp=8" in report["bytes_per_rank"][8]
    assert report["allowed_widths"] == [1, 2, 4]
    assert report["tokenizer"] == ["tokenizer.json"]
    assert report["drafter"]["tensors"] == 7 + 18
    assert report["skipped"] == 1
    notes = "\n".join(report["notes"])
    assert "old.safetensors" in notes
    assert "vision_tower.x" in notes


def test_different_global_scales_are_noted(tmp_path):
    path = tmp_path / "model"
    make.make(raw.small(), path, progress=False)
    assert not any("global" in note for note in inspect.inspect(path)["notes"])
    expert = "language_model.model.layers.1.block_sparse_moe.experts.2."
    raw.set_value(path, expert + "w3.weight_global_scale", 1.0)
    notes = inspect.inspect(path)["notes"]
    assert any("experts.2.w1" in note and "(1)" in note for note in notes)


def test_values_are_read_on_request(tmp_path):
    path = tmp_path / "model"
    make.make(raw.small(), path, progress=False)
    raw.set_value(path, "language_model.model.norm.weight", np.nan)
    assert inspect.inspect(path, read_values=False)["problems"] == []
    (problem,) = inspect.inspect(path, read_values=True)["problems"]
    assert "model.norm.weight" in problem


@pytest.mark.parametrize("config", [None, "{", '{"architectures": ["Other"]}'])
def test_without_a_usable_config_the_files_are_still_told(config, tmp_path):
    path = tmp_path / "model"
    make.make(raw.small(), path, progress=False)
    (path / "config.json").unlink()
    if config is not None:
        (path / "config.json").write_text(config)
    shard = next(path.glob("model-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    report = inspect.inspect(path)
    assert any("config.json" in problem for problem in report["problems"])
    assert any("truncated" in problem for problem in report["problems"])
    assert report["bytes_per_rank"] is None


def test_an_empty_directory(tmp_path):
    problems = inspect.inspect(tmp_path)["problems"]
    assert any("config.json" in problem for problem in problems)
    assert any("no *.safetensors" in problem for problem in problems)
