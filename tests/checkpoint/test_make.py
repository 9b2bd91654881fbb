"""Random checkpoints: sizes, layout, distribution, and all or nothing on disk."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from m31jax import mxfp8, nvfp4
from m31jax.checkpoint import inspect, make, writer
from m31jax.config import ModelConfig
from m31jax.errors import CheckpointError, ConfigError
from m31jax.presets import FULL, TINY

from . import raw

BYTES = {"BF16": 2, "F32": 4, "F8": 1, "U8": 1}


def released_m31() -> dict[str, tuple[tuple[int, ...], str]]:
    """Tensors of the released M3.1, from its public description: name -> shape, dtype."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    hidden, vocab = 6144, 200064

    def mxfp8_linear(name: str, rows: int, columns: int) -> None:
        found[name + ".weight"] = ((rows, columns), "F8")
        found[name + ".weight_scale_inv"] = ((rows, columns // 32), "U8")

    def mlp(name: str, width: int) -> None:
        mxfp8_linear(name + "gate_proj", width, hidden)
        mxfp8_linear(name + "up_proj", width, hidden)
        mxfp8_linear(name + "down_proj", hidden, width)

    found["model.embed_tokens.weight"] = ((vocab, hidden), "BF16")
    found["model.norm.weight"] = ((hidden,), "BF16")
    found["lm_head.weight"] = ((vocab, hidden), "BF16")
    for layer in range(60):
        stem = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{stem}{norm}.weight"] = ((hidden,), "BF16")
        attn = stem + "self_attn."
        mxfp8_linear(attn + "q_proj", 8192, hidden)
        mxfp8_linear(attn + "k_proj", 512, hidden)
        mxfp8_linear(attn + "v_proj", 512, hidden)
        mxfp8_linear(attn + "o_proj", hidden, 8192)
        mxfp8_linear(attn + "index_q_proj", 512, hidden)
        mxfp8_linear(attn + "index_k_proj", 128, hidden)
        for norm in ("q_norm", "k_norm", "index_q_norm", "index_k_norm"):
            found[f"{attn}{norm}.weight"] = ((128,), "BF16")
        if layer < 3:
            mlp(stem + "mlp.", 12288)
            continue
        moe = stem + "block_sparse_moe."
        found[moe + "gate.weight"] = ((128, hidden), "F32")
        found[moe + "e_score_correction_bias"] = ((128,), "F32")
        mlp(moe + "shared_experts.", 3072)
        for expert in range(128):
            for w, rows, columns in (
                ("w1", 3072, hidden),
                ("w3", 3072, hidden),
                ("w2", hidden, 3072),
            ):
                name = f"{moe}experts.{expert}.{w}."
                found[name + "weight_packed"] = ((rows, columns // 2), "U8")
                found[name + "weight_scale"] = ((rows, columns // 16), "F8")
                found[name + "weight_global_scale"] = ((1,), "F32")
                found[name + "input_global_scale"] = ((1,), "F32")
    return found


def released_drafter() -> dict[str, tuple[tuple[int, ...], str]]:
    """The 97 tensors of the released drafter, likewise."""
    hidden = 6144
    found = {
        "fc.weight": ((hidden, 5 * hidden), "BF16"),
        "hidden_norm.weight": ((hidden,), "BF16"),
        "final_norm.weight": ((hidden,), "BF16"),
        "markov_head.markov_w1.weight": ((200064, 256), "BF16"),
        "markov_head.markov_w2.weight": ((200064, 256), "BF16"),
        "confidence_head.proj.weight": ((1, 6400), "BF16"),
        "confidence_head.proj.bias": ((1,), "BF16"),
    }
    for i in range(5):
        stem = f"layers.{i}.decoder_layer."
        for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                           ("self_attn.q_norm", 128), ("self_attn.k_norm", 128)):  # fmt: skip
            found[f"{stem}{norm}.weight"] = ((size,), "BF16")
        for name, rows, columns in (
            ("self_attn.q_proj", 8192, hidden), ("self_attn.k_proj", 512, hidden),
            ("self_attn.v_proj", 512, hidden), ("self_attn.o_proj", hidden, 8192),
            ("mlp.gate_proj", 12288, hidden), ("mlp.up_proj", 12288, hidden),
            ("mlp.down_proj", hidden, 12288),
        ):  # fmt: skip
            found[f"{stem}{name}.weight"] = ((rows, columns), "F8")
            found[f"{stem}{name}.weight_scale_inv"] = ((rows, columns // 32), "U8")
    return found


def total_bytes(tensors) -> int:
    return sum(int(np.prod(shape)) * BYTES[dtype] for shape, dtype in tensors.values())


def test_the_full_size_is_that_of_the_released_files():
    full = make.with_format(FULL, "nvfp4")
    target, drafter = released_m31(), released_drafter()
    assert len(drafter) == 97
    plain, both = make.dry_run(full), make.dry_run(full, drafter=True)
    assert plain["tensors"] == len(target)
    assert plain["total_bytes"] == total_bytes(target)
    assert plain["total_bytes"] == pytest.approx(248.4e9, rel=1e-3)
    assert both["tensors"] == len(target) + len(drafter)
    assert both["total_bytes"] == total_bytes(target) + total_bytes(drafter)
    assert both["total_bytes"] == pytest.approx(250.7e9, rel=1e-3)


def test_the_full_tensors_are_those_of_the_released_files():
    kinds = {"F8_E4M3": "F8"}
    listed = {
        s.name: (s.shape, kinds.get(s.part.dtypes[0], s.part.dtypes[0]))
        for s in make.released_sources(make.with_format(FULL, "nvfp4"))
    }
    assert listed == released_m31()


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "nvfp4"])
def test_a_dry_run_says_what_is_written(fmt, tmp_path):
    path = tmp_path / "model"
    config = make.with_format(TINY, fmt)
    summary = make.make(config, path, drafter=True, max_shard_bytes=2_000_000, progress=False)
    assert summary == make.dry_run(config, drafter=True, max_shard_bytes=2_000_000)
    target, drafter = raw.read_all(path), raw.read_all(path / "dspark")
    assert len(target) + len(drafter) == summary["tensors"]
    sizes = [len(t.data) for t in (*target.values(), *drafter.values())]
    assert sum(sizes) == summary["total_bytes"]
    assert len(drafter) == summary["drafter_tensors"]
    shards = sorted(p.name for p in path.glob("*.safetensors"))
    count = summary["shards"]
    assert shards == [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    for shard in shards:
        held = raw.read(path / shard)
        assert sum(len(t.data) for t in held.values()) <= 2_000_000 or len(held) == 1
    index = raw.read_index(path)
    assert index["metadata"]["total_size"] == sum(len(t.data) for t in target.values())
    assert index["weight_map"].keys() == target.keys()
    assert all(name.startswith("language_model.") for name in target)
    assert inspect.inspect(path)["problems"] == []


def test_config_files_are_the_released_ones(tmp_path):
    config = make.with_format(TINY, "nvfp4")
    make.make(config, tmp_path / "model", progress=False)
    assert ModelConfig.from_dir(tmp_path / "model") == config
    written = json.loads((tmp_path / "model" / "config.json").read_text())
    assert written["architectures"] == ["MiniMaxM3SparseForConditionalGeneration"]
    assert written["text_config"]["num_hidden_layers"] == TINY.num_layers
    assert written["quantization_config"]["moe_quant_format"] == "nvfp4-pack-quantized"
    generation = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(TINY.eos_token_ids)
    assert (generation["temperature"], generation["top_p"]) == (1.0, 0.95)


def test_the_safetensors_package_reads_the_files(tmp_path):
    make.make(make.with_format(TINY, "nvfp4"), tmp_path / "model", progress=False)
    (shard,) = (tmp_path / "model").glob("*.safetensors")
    ours = raw.read(shard)
    with safe_open(shard, framework="np") as file:
        assert set(file.keys()) == set(ours)
        assert file.metadata() == {"format": "pt"}
        for name, tensor in ours.items():
            part = file.get_slice(name)
            assert (part.get_dtype(), part.get_shape()) == (tensor.dtype, tensor.shape)
            if tensor.dtype in ("BF16", "F32", "U8"):
                np.testing.assert_array_equal(file.get_tensor(name), tensor.array)


def test_weights_depend_on_seed_and_name_only(tmp_path):
    config = raw.small()
    runs = {}
    for name, seed, shard in (("a", 1, 1 << 30), ("b", 1, 50_000), ("c", 2, 1 << 30)):
        make.make(config, tmp_path / name, seed=seed, max_shard_bytes=shard, progress=False)
        runs[name] = raw.read_all(tmp_path / name)
    assert runs["a"].keys() == runs["b"].keys()
    assert all(runs["a"][n].data == runs["b"][n].data for n in runs["a"])
    # Tensors of some size differ between seeds, and between names of one seed.
    big = [n for n in runs["a"] if len(runs["a"][n].data) > 64]
    assert all(runs["a"][n].data != runs["c"][n].data for n in big)
    assert len({runs["a"][n].data for n in big}) == len(big)
    # The embedding is the same in every format.
    make.make(raw.small("bf16", "bf16"), tmp_path / "d", seed=1, progress=False)
    name = "language_model.model.embed_tokens.weight"
    assert raw.read_all(tmp_path / "d")[name].data == runs["a"][name].data


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "nvfp4"])
def test_weights_are_spread_as_a_trained_model_needs(fmt, tmp_path):
    make.make(make.with_format(TINY, fmt), tmp_path / "model", progress=False)
    tensors = raw.read_all(tmp_path / "model")
    stem = "language_model.model.layers.1."

    def values(name: str) -> np.ndarray:
        if name + ".weight_packed" in tensors:
            scale = np.float32(1) / tensors[name + ".weight_global_scale"].array
            packed, group = (tensors[name + s].array for s in (".weight_packed", ".weight_scale"))
            return np.asarray(nvfp4.dequantize(packed, group, scale))
        if name + ".weight_scale_inv" in tensors:
            data, scale = (tensors[name + s].array for s in (".weight", ".weight_scale_inv"))
            return np.asarray(mxfp8.dequantize(data, scale))
        return tensors[name + ".weight"].array.astype(np.float32)

    gains = {
        "self_attn.q_proj": 1.0,
        "self_attn.o_proj": 1.6,
        "block_sparse_moe.experts.3.w1": 2.2,
        "block_sparse_moe.experts.3.w3": 2.2,
        "block_sparse_moe.experts.3.w2": 0.7,
        "block_sparse_moe.shared_experts.up_proj": 2.2,
        "block_sparse_moe.gate": 1.3,
    }
    for name, gain in gains.items():
        weight = values(stem + name)
        measured = weight.std() * np.sqrt(weight.shape[1])
        assert measured == pytest.approx(gain, rel=0.15), name
        assert abs(weight.mean()) < 0.05 * weight.std(), name
        # Normal, not a few levels: a tenth of the values lie beyond 1.6 deviations.
        assert (np.abs(weight) > 1.6 * weight.std()).mean() == pytest.approx(0.11, abs=0.04), name
    bias = tensors[stem + "block_sparse_moe.e_score_correction_bias"].array
    assert 0.1 < bias.std() < 0.5
    norm = tensors[stem + "input_layernorm.weight"].array.astype(np.float32)
    assert abs(norm.mean()) < 0.05
    assert norm.std() == pytest.approx(0.2, rel=0.2)


def test_scales_vary_so_that_a_swap_shows(tmp_path):
    make.make(raw.small(), tmp_path / "model", progress=False)
    tensors = raw.read_all(tmp_path / "model")
    moe = "language_model.model.layers.1.block_sparse_moe.experts."
    outer = {n: t.array.item() for n, t in tensors.items() if n.endswith("weight_global_scale")}
    assert len(set(outer.values())) == 2 * 4  # one for w1 and w3, one for w2, of each expert
    assert outer[moe + "0.w1.weight_global_scale"] == outer[moe + "0.w3.weight_global_scale"]
    assert len(np.unique(tensors[moe + "0.w1.weight_scale"].array)) > 10
    attn = "language_model.model.layers.0.self_attn.q_proj.weight_scale_inv"
    assert len(np.unique(tensors[attn].array)) == 3


def test_an_unknown_format():
    with pytest.raises(ConfigError, match=r"int4.*bf16, mxfp8, nvfp4"):
        make.with_format(TINY, "int4")


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "note").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        make.make(raw.small(), tmp_path / "model", progress=False)
    assert [p.name for p in (tmp_path / "model").iterdir()] == ["note"]
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="not empty"):
        make.make(raw.small(), tmp_path / "file", progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model"]


def test_an_empty_directory_is_filled(tmp_path):
    (tmp_path / "model").mkdir()
    make.make(raw.small(), tmp_path / "model", progress=False)
    assert inspect.inspect(tmp_path / "model")["problems"] == []
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_run_leaves_nothing(tmp_path):
    def run() -> None:
        with writer.fresh_directory(tmp_path / "model") as partial:
            (partial / "config.json").write_text("{}")
            raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        run()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_leaves_nothing_that_looks_complete(tmp_path):
    """Killed while it writes, and once more right before the end."""
    script = (
        "import sys, pathlib, time\n"
        "from m31jax.checkpoint import make\n"
        "from tests.checkpoint import raw\n"
        "def slow(path, content, old=make.write_json):\n"
        "    old(path, content)\n"
        "    print(path.name, flush=True)\n"
        "    time.sleep(60)\n"
        "make.write_json = slow\n"
        "make.make(raw.small(), sys.argv[1], progress=False)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "model")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    with process:
        assert process.stdout.readline().strip() == "generation_config.json"
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=30)
    assert not (tmp_path / "model").exists()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".model.partial-")
    assert not (left / "config.json").exists()
    make.make(raw.small(), tmp_path / "model", progress=False)
    assert inspect.inspect(tmp_path / "model")["problems"] == []


def test_values_of_the_wrong_size_are_refused(tmp_path):
    spec = writer.Spec("x", "F32", (4,))
    with pytest.raises(CheckpointError, match="x: 12 bytes given, 16 expected"):
        writer.write_file(tmp_path / "f", [spec], lambda _: [np.zeros(3, np.float32)], None)


def test_random_values_are_quick(tmp_path):
    """Over 5 MB/s even on a busy slow core: drawing and rounding normals one by one is not."""
    config = raw.small(vocab_size=200_000, hidden_size=128, bos_token_id=1, eos_token_ids=(2,))
    start = time.perf_counter()
    made = make.make(config, tmp_path / "model", progress=False)
    assert made["total_bytes"] / (time.perf_counter() - start) > 5e6
