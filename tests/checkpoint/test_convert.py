"""Orbax conversions: laid out for a width, loaded like the original, and back bit for bit."""

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from m31jax.checkpoint import convert, inspect, loader, make, requantise
from m31jax.config import ModelConfig
from m31jax.errors import CheckpointError, TargetError
from sharding.mesh import make_mesh
from tests.golden import golden_dir

from . import raw

BF16, F32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)


def load(path: Path, tp: int, dtype):
    config = ModelConfig.from_dir(path)
    return loader.load(path, config, make_mesh(tp, jax.devices()), dtype=dtype, progress=False)


def to_orbax(path: Path, out: Path, tp: int, dtype):
    return convert.to_orbax(path, out, tp, dtype, devices=jax.devices(), progress=False)


def assert_same(a, b) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert (a[name].dtype, a[name].sharding) == (b[name].dtype, b[name].sharding), name
        assert np.asarray(a[name]).tobytes() == np.asarray(b[name]).tobytes(), name


def files(path: Path) -> dict[str, bytes]:
    return {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("originals")
    requantise.requantise(
        golden_dir() / "hf_tiny_k", folder / "requantised", "nvfp4", progress=False
    )
    make.make(raw.small(), folder / "shards", drafter=True, max_shard_bytes=100_000, progress=False)
    expert = "language_model.model.layers.1.block_sparse_moe.experts.1."
    raw.edit(folder / "shards", {"vision_tower.x": raw.Tensor.of("F16", [1.0])})
    raw.set_bytes(folder / "shards", expert + "w1.weight_packed", 0, bytes(8))
    raw.set_bytes(folder / "shards", expert + "w1.weight_scale", 0, b"\x7f")
    raw.set_value(folder / "shards", expert + "w2.weight_global_scale", 3.0)  # 1 / (1 / 3) is not 3
    (folder / "shards" / "tokenizer.json").write_text("{}")
    make.make(raw.small("bf16", "nvfp4_modelopt"), folder / "modelopt", progress=False)
    make.make(raw.small("mxfp8", "mxfp8"), folder / "mxfp8", progress=False)
    return {p.name: p for p in folder.iterdir()} | {"golden": golden_dir() / "hf_tiny_a"}


@pytest.mark.filterwarnings("ignore::m31jax.checkpoint.reader.CheckpointWarning")
@pytest.mark.parametrize(
    ("name", "tp", "dtype"),
    [
        ("golden", 8, BF16),
        ("requantised", 4, BF16),
        ("shards", 8, F32),
        ("shards", 1, BF16),
        ("modelopt", 2, F32),
        ("mxfp8", 4, F32),
    ],
)
def test_there_and_back(name, tp, dtype, originals, tmp_path):
    original = originals[name]
    made = to_orbax(original, tmp_path / "orbax", tp, dtype)
    params = load(original, tp, dtype)
    assert made["parameters"] == len(params)
    assert made["total_bytes"] == sum(array.nbytes for array in params.values())
    assert_same(load(tmp_path / "orbax", tp, dtype), params)
    written = convert.to_hf(tmp_path / "orbax", tmp_path / "back")
    before, after = raw.read_all(original), raw.read_all(tmp_path / "back")
    assert before == after
    assert written["tensors"] == len(before)
    if name == "shards":  # edited by the test, so not as the writer lays tensors out
        drop = {k for k in files(original) if k.startswith("model-")}
        assert files(original).keys() == files(tmp_path / "back").keys()
        one, other = files(original), files(tmp_path / "back")
        assert all(one[k] == other[k] for k in one.keys() - drop)
    else:
        assert files(original) == files(tmp_path / "back")


def test_it_is_cut_as_the_ranks_read_it(originals, tmp_path):
    """The files of a conversion hold one chunk a rank."""
    to_orbax(originals["mxfp8"], tmp_path / "orbax", 4, F32)
    metadata = json.loads((tmp_path / "orbax" / "m31jax.json").read_text())
    assert (metadata["tp"], metadata["dtype"]) == (4, "float32")
    assert metadata["parameters"]["lm_head.weight"] == [[64, 64], "float32"]
    chunks = [
        json.loads(p.read_text())
        for p in (tmp_path / "orbax" / "params" / "array_metadatas").iterdir()
    ]
    shapes = {
        m["array_metadata"]["param_name"]: m["array_metadata"]["write_shape"]
        for group in chunks
        for m in group["array_metadatas"]
    }
    assert shapes["lm_head.weight"] == [16, 64]
    assert shapes["layers.0.self_attn.o_proj.weight"] == [64, 64]


def test_another_width_of_the_same_shapes(originals, tmp_path):
    to_orbax(originals["golden"], tmp_path / "orbax", 4, F32)
    for tp in (1, 2, 4):
        assert_same(load(tmp_path / "orbax", tp, F32), load(originals["golden"], tp, F32))
    with pytest.raises(TargetError, match=r"laid out for tp=4: .*k_proj.*tp=8"):
        load(tmp_path / "orbax", 8, F32)


@pytest.mark.parametrize(("stored", "wanted"), [(F32, BF16), (BF16, F32)])
def test_another_dtype(stored, wanted, originals, tmp_path):
    to_orbax(originals["requantised"], tmp_path / "orbax", 1, stored)
    assert_same(load(tmp_path / "orbax", 1, wanted), load(originals["requantised"], 1, wanted))


def test_inspecting_a_conversion(originals, tmp_path):
    to_orbax(originals["requantised"], tmp_path / "orbax", 2, BF16)
    report = inspect.inspect(tmp_path / "orbax")
    assert (report["layout"], report["tp"], report["dtype"]) == ("orbax", 2, "bfloat16")
    assert report["problems"] == []
    assert report["total_bytes"] == sum(
        array.nbytes for array in load(tmp_path / "orbax", 2, BF16).values()
    )


@pytest.mark.filterwarnings("ignore::m31jax.checkpoint.reader.CheckpointWarning")
def test_refusals(originals, tmp_path):
    original = originals["shards"]
    with pytest.raises(TargetError, match="tp=3"):
        to_orbax(original, tmp_path / "orbax", 3, F32)
    with pytest.raises(TargetError, match="float16"):
        to_orbax(original, tmp_path / "orbax", 1, np.float16)
    with pytest.raises(TargetError, match="tp=8 needs 8 devices, 2 found"):
        convert.to_orbax(original, tmp_path / "orbax", 8, F32, devices=jax.devices()[:2])
    with pytest.raises(CheckpointError, match=r"no m31jax\.json"):
        convert.to_hf(original, tmp_path / "back")
    broken = tmp_path / "broken"
    shutil.copytree(original, broken)
    raw.edit(broken, {"language_model.lm_head.weight": None})
    with pytest.raises(CheckpointError, match="missing"):
        to_orbax(broken, tmp_path / "orbax", 1, F32)
    shutil.rmtree(broken)
    assert list(tmp_path.iterdir()) == []
    to_orbax(original, tmp_path / "orbax", 1, F32)
    with pytest.raises(CheckpointError, match="not empty"):
        to_orbax(original, tmp_path / "orbax", 1, F32)
    with pytest.raises(CheckpointError, match="already"):
        to_orbax(tmp_path / "orbax", tmp_path / "again", 1, F32)


def _metadata(path: Path, **changes) -> None:
    file = path / "m31jax.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _config(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["num_local_experts"] = 2
    (path / "config.json").write_text(json.dumps(config))


def _some_bytes(path: Path) -> None:
    """Overwrite the largest data file."""
    largest = max((path / "params").rglob("*"), key=lambda p: p.stat().st_size * p.is_file())
    largest.write_bytes(bytes(largest.stat().st_size))


BROKEN = {
    "metadata is not JSON": (lambda p: (p / "m31jax.json").write_text("{"), "not JSON"),
    "another version": (lambda p: _metadata(p, version=2), "version 2"),
    "metadata is a list": (lambda p: (p / "m31jax.json").write_text("[]"), "version None"),
    "metadata in part": (
        lambda p: (p / "m31jax.json").write_text('{"version": 1, "tp": 1}'),
        "lacks dtype, parameters, prefix, shards",
    ),
    "no arrays": (lambda p: shutil.rmtree(p / "params"), "no params/"),
    "another config": (_config, "different models"),
    "damaged arrays": (_some_bytes, "damaged"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_damaged_conversion(what, originals, tmp_path):
    to_orbax(originals["mxfp8"], tmp_path / "orbax", 1, F32)
    break_it, words = BROKEN[what]
    break_it(tmp_path / "orbax")
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path / "orbax", 1, F32)
    if what != "damaged arrays":
        assert inspect.inspect(tmp_path / "orbax")["problems"] != []


def test_the_way_back_needs_the_extras(originals, tmp_path):
    to_orbax(originals["mxfp8"], tmp_path / "orbax", 1, F32)
    (tmp_path / "orbax" / "extras.safetensors").unlink()
    load(tmp_path / "orbax", 1, F32)
    with pytest.raises(CheckpointError, match=r"no extras\.safetensors"):
        convert.to_hf(tmp_path / "orbax", tmp_path / "back")
    assert not (tmp_path / "back").exists()
