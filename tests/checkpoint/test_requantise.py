"""Re-written checkpoints against a second implementation of the quantisers, in NumPy."""

import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest

from m31jax.checkpoint import inspect, loader, make, requantise
from m31jax.config import ModelConfig
from m31jax.errors import CheckpointError
from sharding.mesh import make_mesh
from tests.golden import golden_dir

from . import raw

E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e4m3(x: np.ndarray) -> np.ndarray:
    return np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)


def numpy_nvfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """compressed-tensors: codes (sign kept off zero), group scales, global scale."""
    w = w.astype(np.float32)
    groups = w.reshape(*w.shape[:-1], -1, 16)
    global_scale = np.float32(2688) / np.abs(w).max()
    scale = e4m3(global_scale * (np.abs(groups).max(-1) / np.float32(6)))
    scale = np.where(scale.astype(np.float32) == 0, e4m3(np.float32(0.125)), scale)
    x = groups / (scale.astype(np.float32) / global_scale)[..., None]
    distance = np.abs(np.abs(x)[..., None] - E2M1)
    # Nearest, a tie to the even code.
    nearest = distance.min(-1, keepdims=True) == distance
    even = np.arange(8) % 2 == 0
    code = np.where((nearest & even).any(-1), (nearest & even).argmax(-1), nearest.argmax(-1))
    code = code | np.where((x < 0) & (code > 0), 8, 0)
    return code.reshape(w.shape).astype(np.uint8), scale, global_scale


def numpy_mxfp8(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Round-up rule: the scaled maximum lies in (224, 448]."""
    groups = w.astype(np.float64).reshape(*w.shape[:-1], -1, 32)
    amax = np.abs(groups).max(-1)
    exponent = np.ceil(np.log2(np.where(amax > 0, amax, 1) / 448))
    byte = np.where(amax > 0, np.clip(exponent + 127, 0, 254), 0).astype(np.uint8)
    data = e4m3((groups * 2.0 ** (127 - byte.astype(np.float64))[..., None]).astype(np.float32))
    return data.reshape(w.shape), byte


def unpack(packed: np.ndarray) -> np.ndarray:
    return np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)


def value(codes: np.ndarray) -> np.ndarray:
    return np.where(codes >= 8, -1, 1) * E2M1[codes & 7]


def test_the_numpy_rules_are_those_of_the_outside_producers():
    stored = np.load(golden_dir() / "quant.npz")
    code, scale, global_scale = numpy_nvfp4(stored["nvfp4_weight_ct/x"])
    assert global_scale == stored["nvfp4_weight_ct/weight_global_scale"]
    np.testing.assert_array_equal(scale.view(np.uint8), stored["nvfp4_weight_ct/weight_scale"])
    np.testing.assert_array_equal(
        value(code), value(unpack(stored["nvfp4_weight_ct/weight_packed"]))
    )
    data, byte = numpy_mxfp8(stored["mxfp8_bf16/x"])
    np.testing.assert_array_equal(byte, stored["mxfp8_bf16/scale_e8m0"])
    np.testing.assert_array_equal(data.view(np.uint8), stored["mxfp8_bf16/data_e4m3"])


@pytest.fixture(scope="module")
def rewritten(tmp_path_factory):
    """The golden checkpoints in both formats, as (original, path)."""
    folder = tmp_path_factory.mktemp("rewritten")
    found = {}
    for name in ("hf_tiny_a", "hf_tiny_k"):
        for fmt in ("mxfp8", "nvfp4"):
            original, path = golden_dir() / name, folder / f"{name}-{fmt}"
            requantise.requantise(original, path, fmt, max_shard_bytes=1 << 20, progress=False)
            found[name, fmt] = (original, path)
    return found


CASES = [(name, fmt) for name in ("hf_tiny_a", "hf_tiny_k") for fmt in ("mxfp8", "nvfp4")]


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_every_tensor_is_quantised_by_the_rule_or_unchanged(case, rewritten):
    original, path = rewritten[case]
    before, after = raw.read_all(original), raw.read_all(path)
    unseen = set(after)
    for name, tensor in before.items():
        stem = name.removesuffix(".weight")
        is_expert = ".experts." in name
        if is_expert and case[1] == "nvfp4":
            leaf = stem[-2:]
            together = ["w1", "w3"] if leaf != "w2" else ["w2"]
            stack = np.stack([before[f"{stem[:-2]}{w}.weight"].array for w in together])
            code, scale, global_scale = numpy_nvfp4(stack)
            at = together.index(leaf)
            suffixes = (".weight_packed", ".weight_scale", ".weight_global_scale")
            parts = {suffix: after[stem + suffix] for suffix in suffixes}
            np.testing.assert_array_equal(unpack(parts[".weight_packed"].array), code[at], name)
            stored_scale = parts[".weight_scale"].array
            assert stored_scale.tobytes() == scale[at].tobytes(), name
            assert parts[".weight_global_scale"].array.tolist() == [global_scale]
            unseen -= {stem + suffix for suffix in parts}
        elif is_expert or name.endswith("_proj.weight"):
            data, byte = numpy_mxfp8(tensor.array)
            assert after[stem + ".weight"].data == data.tobytes(), name
            assert after[stem + ".weight_scale_inv"].data == byte.tobytes(), name
            unseen -= {stem + ".weight", stem + ".weight_scale_inv"}
        else:
            assert after[name] == tensor, name
            unseen.remove(name)
    assert unseen == set()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_it_is_a_sound_checkpoint_close_to_the_original(case, rewritten):
    original, path = rewritten[case]
    report = inspect.inspect(path)
    assert report["problems"] == []
    assert len(report["shards"]) > 1
    config = ModelConfig.from_dir(path)
    assert config == make.with_format(ModelConfig.from_dir(original), case[1])
    params = loader.load(path, config, make_mesh(1, jax.devices()), progress=False)
    before = raw.read_all(original)
    prefix = "language_model." if case[0] == "hf_tiny_a" else ""
    experts = "layers.1.moe.experts.gate_up_proj."
    stored = before[f"{prefix}model.layers.1.block_sparse_moe.experts.3.w3.weight"].array
    w = stored.astype(np.float32)
    if case[1] == "nvfp4":
        data, scale, scale_2 = (
            np.asarray(params[experts + part])[3, 1]
            for part in ("weight", "weight_scale", "weight_scale_2")
        )
        step = scale.astype(np.float32) * scale_2
        close = value(unpack(data)) * np.repeat(step, 16, axis=-1)
        assert 0.02 < np.abs(close - w).mean() / np.abs(w).mean() < 0.12
    else:
        data, byte = (np.asarray(params[experts + p])[3, 1] for p in ("weight", "weight_scale"))
        close = data.astype(np.float32) * np.repeat(2.0 ** (byte.astype(np.float32) - 127), 32, -1)
        assert 0.002 < np.abs(close - w).mean() / np.abs(w).mean() < 0.03


def test_other_files_are_kept(tmp_path):
    source = tmp_path / "source"
    make.make(raw.small("bf16", "bf16"), source, drafter=True, progress=False)
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    (source / ".cache").mkdir()
    requantise.requantise(source, tmp_path / "out", "nvfp4", progress=False)
    kept = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*")}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= kept
    assert "dspark/config.json" in kept
    assert ".cache" not in kept
    for name in ("tokenizer.json", "dspark/config.json", "dspark/model.safetensors.index.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()


def test_prefix_router_dtype_and_unloaded_tensors_are_kept(tmp_path):
    source = tmp_path / "source"
    made = tmp_path / "made"
    make.make(raw.small("bf16", "bf16"), made, progress=False)
    tensors = {
        n.removeprefix("language_model.")
        if "lm_head" in n
        else n.replace("language_model.model.", "model.language_model."): t
        for n, t in raw.read_all(made).items()
    }
    gate = "model.language_model.layers.1.block_sparse_moe.gate.weight"
    tensors[gate] = raw.Tensor.of("BF16", tensors[gate].array)
    tensors["model.vision_tower.x"] = raw.Tensor.of("F16", [1.0, 2.0])
    source.mkdir()
    raw.write(source / "model.safetensors", tensors)
    shutil.copy(made / "config.json", source)
    requantise.requantise(source, tmp_path / "out", "nvfp4", progress=False)
    after = raw.read_all(tmp_path / "out")
    assert after[gate] == tensors[gate]
    assert after["model.vision_tower.x"] == tensors["model.vision_tower.x"]
    assert after["lm_head.weight"] == tensors["lm_head.weight"]
    assert "model.language_model.layers.1.block_sparse_moe.experts.0.w1.weight_packed" in after
    assert inspect.inspect(tmp_path / "out")["problems"] == []


def test_what_cannot_be_requantised(tmp_path):
    make.make(raw.small(), tmp_path / "nvfp4", progress=False)
    with pytest.raises(CheckpointError, match="only BF16"):
        requantise.requantise(tmp_path / "nvfp4", tmp_path / "out", "mxfp8", progress=False)
    make.make(raw.small("bf16", "bf16"), tmp_path / "bf16", progress=False)
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight"
    raw.set_value(tmp_path / "bf16", name, np.nan)
    with pytest.raises(CheckpointError, match=rf"{name} .*NaN"):
        requantise.requantise(tmp_path / "bf16", tmp_path / "out", "nvfp4", progress=False)
    raw.edit(tmp_path / "bf16", {name: None})
    with pytest.raises(CheckpointError, match="incomplete"):
        requantise.requantise(tmp_path / "bf16", tmp_path / "out", "nvfp4", progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bf16", "nvfp4"]


def test_the_released_key_is_written(rewritten):
    _, path = rewritten["hf_tiny_a", "nvfp4"]
    quantization = json.loads((path / "config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "mxfp8"
    assert quantization["moe_quant_algo"] == "NVFP4"
