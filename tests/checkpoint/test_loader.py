"""What is loaded equals what is stored, on every width, prefix, spelling and packaging."""

import dataclasses
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from m31jax import weights
from m31jax.checkpoint import loader, make
from m31jax.checkpoint.plan import plan
from m31jax.config import ModelConfig
from sharding import rules
from sharding.mesh import make_mesh
from tests.golden import golden_dir

from . import raw
from .raw import Tensor

FORMATS = (("bf16", "bf16"), ("mxfp8", "mxfp8"), ("mxfp8", "nvfp4"), ("mxfp8", "nvfp4_modelopt"))


def load(path: Path, tp: int = 1, dtype=np.float32, config: ModelConfig | None = None):
    config = config or ModelConfig.from_dir(path)
    return loader.load(path, config, make_mesh(tp, jax.devices()), dtype=dtype, progress=False)


def same(a, b) -> bool:
    """Equal bit for bit."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def expected(tensors: dict[str, Tensor], config: ModelConfig, prefix: str) -> dict[str, np.ndarray]:
    """Parameters of TP1 in float32, spelled out a second time from the stored tensors."""
    found: dict[str, np.ndarray] = {}

    def take(name: str) -> np.ndarray:
        return tensors[prefix + name].array

    def linear(path: str, name: str) -> None:
        if prefix + name + ".weight_scale_inv" in tensors:
            found[path + ".weight"] = take(name + ".weight")
            found[path + ".weight_scale"] = take(name + ".weight_scale_inv")
        else:
            found[path + ".weight"] = take(name + ".weight").astype(np.float32)

    def experts(path: str, names: list[list[str]]) -> None:
        """names[e][j], or names[e][0] alone for the down projection."""

        def stack(suffix: str, change=lambda x: x) -> np.ndarray:
            rows = [np.stack([change(take(n + suffix)) for n in group]) for group in names]
            out = np.stack(rows)
            return out if len(names[0]) > 1 else out[:, 0]

        one = prefix + names[0][0]
        if one + ".weight_packed" in tensors:
            found[path + ".weight"] = stack(".weight_packed")
            found[path + ".weight_scale"] = stack(".weight_scale")
            found[path + ".weight_scale_2"] = stack(
                ".weight_global_scale", lambda g: np.float32(1) / g.reshape(())
            )
        elif one + ".weight_scale_2" in tensors:
            found[path + ".weight"] = stack(".weight")
            found[path + ".weight_scale"] = stack(".weight_scale")
            found[path + ".weight_scale_2"] = stack(".weight_scale_2", lambda g: g.reshape(()))
        elif one + ".weight_scale_inv" in tensors:
            found[path + ".weight"] = stack(".weight")
            found[path + ".weight_scale"] = stack(".weight_scale_inv")
        else:
            found[path + ".weight"] = stack(".weight", lambda w: w.astype(np.float32))

    def plain(path: str, name: str) -> None:
        found[path] = take(name).astype(np.float32)

    plain("embed_tokens.weight", "model.embed_tokens.weight")
    plain("norm.weight", "model.norm.weight")
    plain("lm_head.weight", "lm_head.weight")
    for layer in range(config.num_layers):
        here, there = f"layers.{layer}.", f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plain(here + norm + ".weight", there + norm + ".weight")
        index = ("index_q", "index_k") if config.sparse_layers[layer] else ()
        for leaf in ("q", "k", "v", "o", *index):
            linear(f"{here}self_attn.{leaf}_proj", f"{there}self_attn.{leaf}_proj")
        for leaf in ("q", "k", *index):
            plain(f"{here}self_attn.{leaf}_norm.weight", f"{there}self_attn.{leaf}_norm.weight")
        if not config.moe_layers[layer]:
            for leaf in ("gate_proj", "up_proj", "down_proj"):
                linear(f"{here}mlp.{leaf}", f"{there}mlp.{leaf}")
            continue
        moe, block = here + "moe.", there + "block_sparse_moe."
        plain(moe + "router.weight", block + "gate.weight")
        plain(moe + "router.e_score_correction_bias", block + "e_score_correction_bias")
        every = [f"{block}experts.{e}." for e in range(config.num_experts)]
        experts(moe + "experts.gate_up_proj", [[e + "w1", e + "w3"] for e in every])
        experts(moe + "experts.down_proj", [[e + "w2"] for e in every])
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            linear(f"{moe}shared_expert.{leaf}", f"{block}shared_experts.{leaf}")
    return found


def check(params, want: dict[str, np.ndarray]) -> None:
    assert params.keys() == want.keys()
    for name, array in want.items():
        assert same(np.asarray(params[name]), array), name


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint in each format, as (path, config)."""
    folder = tmp_path_factory.mktemp("made")
    found = {}
    for linear, experts in FORMATS:
        path = folder / f"{linear}-{experts}"
        config = raw.small(linear, experts)
        make.make(config, path, seed=3, max_shard_bytes=100_000, progress=False)
        found[linear, experts] = (path, ModelConfig.from_dir(path))
    return found


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_k"])
def test_every_value_of_the_golden_checkpoints(name):
    path = golden_dir() / name
    config = ModelConfig.from_dir(path)
    want = expected(raw.read_all(path), config, "language_model." if name == "hf_tiny_a" else "")
    check(load(path), want)


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_k"])
def test_bfloat16_keeps_bf16_bits_and_float32_norms(name):
    path = golden_dir() / name
    full, half = load(path), load(path, dtype=ml_dtypes.bfloat16)
    for key, array in half.items():
        is_wide = "norm" in key or "router" in key
        assert array.dtype == (np.float32 if is_wide else ml_dtypes.bfloat16), key
        assert same(np.asarray(array).astype(np.float32), np.asarray(full[key])), key


@pytest.mark.parametrize("fmt", FORMATS, ids="-".join)
def test_every_value_of_every_packaging(fmt, made):
    path, config = made[fmt]
    assert (config.quantization.linear, config.quantization.experts) == fmt
    check(load(path), expected(raw.read_all(path), config, "language_model."))


def slices_of(array: np.ndarray, axes, config: ModelConfig, tp: int, rank: int) -> np.ndarray:
    """What a rank holds, by the rule for each kind of axis."""
    for dim, axis in enumerate(axes):
        size = array.shape[dim]
        heads = {"kv_heads": config.num_kv_heads, "index_heads": config.index_num_heads}.get(axis)
        if axis is None:
            continue
        if heads is not None and heads < tp:
            width = size // heads
            start = rank // (tp // heads) * width
        else:
            width = size // tp
            start = rank * width
        array = array.take(range(start, start + width), axis=dim)
    return array


def check_ranks(path: Path, config: ModelConfig, tp: int, dtype) -> None:
    whole, cut = load(path, dtype=dtype), load(path, tp, dtype)
    axes = {p.name: p.axes for p in weights.expand(config, tp, dtype).parameters}
    assert whole.keys() == cut.keys()
    for name, array in cut.items():
        reference = np.asarray(whole[name])
        assert array.sharding.spec == rules.spec(axes[name])
        assert len(array.addressable_shards) == tp
        for shard in array.addressable_shards:
            want = slices_of(reference, axes[name], config, tp, shard.device.id)
            assert same(np.asarray(shard.data), want), (name, shard.device.id)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_k"])
def test_ranks_hold_slices_of_the_golden_checkpoints(name, tp):
    path = golden_dir() / name
    check_ranks(path, ModelConfig.from_dir(path), tp, np.float32)


@pytest.mark.parametrize(
    ("fmt", "tp"),
    # 128 / 8 columns of an expert would cut MXFP8 groups; test_plan.py has the refusal.
    [(fmt, tp) for fmt in FORMATS for tp in (2, 4, 8) if (fmt[1], tp) != ("mxfp8", 8)],
)
def test_ranks_hold_slices_of_every_packaging(fmt, tp, made):
    path, config = made[fmt]
    check_ranks(path, config, tp, ml_dtypes.bfloat16)


def test_k_and_v_heads_are_held_by_neighbouring_ranks(made):
    path, config = made["bf16", "bf16"]
    assert config.num_kv_heads == 2
    k = load(path, 8)["layers.0.self_attn.k_proj.weight"]
    assert k.shape == (8 * config.head_dim, config.hidden_size)
    parts = {s.device.id: np.asarray(s.data) for s in k.addressable_shards}
    for rank in range(8):
        assert same(parts[rank], parts[rank // 4 * 4])
    assert not same(parts[0], parts[4])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("fmt", FORMATS, ids="-".join)
def test_the_bytes_of_the_plan_are_the_bytes_placed(fmt, tp, dtype, made):
    path, config = made[fmt]
    params = load(path, tp, dtype)
    planned = plan(config, tp, dtype)
    assert loader.placed_bytes(params) == dict.fromkeys(range(tp), planned.bytes_per_rank)
    for name, array in params.items():
        for shard in array.addressable_shards:
            assert shard.data.nbytes == planned.parameters[name], name
    assert planned.parameters.keys() == params.keys()


def _renamed(path: Path, to: Path, rename) -> Path:
    tensors = {rename(name): tensor for name, tensor in raw.read_all(path).items()}
    to.mkdir()
    raw.write(to / "model.safetensors", tensors)
    shutil.copy(path / "config.json", to)
    return to


PREFIXES = {
    "none": lambda name: name.removeprefix("language_model."),
    "model.language_model., head outside": lambda name: (
        name.removeprefix("language_model.")
        if "lm_head" in name
        else name.replace("language_model.model.", "model.language_model.")
    ),
    "model.language_model.model.": lambda name: "model." + name,
    "model.language_model.model., head outside": lambda name: (
        name.removeprefix("language_model.") if "lm_head" in name else "model." + name
    ),
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_prefixes(prefix, made, tmp_path):
    path, _ = made["mxfp8", "nvfp4"]
    other = _renamed(path, tmp_path / "model", PREFIXES[prefix])
    check(load(other), {name: np.asarray(a) for name, a in load(path).items()})


@pytest.mark.parametrize("change", ["weight_scale", "F8_E8M0", "scalar", "no input scales"])
def test_other_spellings(change, made, tmp_path):
    path, _ = made["mxfp8", "nvfp4"]
    tensors = raw.read_all(path)
    if change == "no input scales":
        tensors = {n: t for n, t in tensors.items() if "input_global_scale" not in n}
    for name, tensor in list(tensors.items()):
        if change == "scalar" and name.endswith("global_scale"):
            tensor.shape = []
        if change == "F8_E8M0" and name.endswith("weight_scale_inv"):
            tensor.dtype = "F8_E8M0"
        if change == "weight_scale" and name.endswith("weight_scale_inv"):
            tensors[name.removesuffix("_inv")] = tensors.pop(name)
    other = tmp_path / "model"
    other.mkdir()
    raw.write(other / "model.safetensors", tensors)
    shutil.copy(path / "config.json", other)
    check(load(other), {name: np.asarray(a) for name, a in load(path).items()})


def test_tensors_of_other_parts_of_the_model_are_left_alone(made, tmp_path):
    path, _ = made["mxfp8", "nvfp4"]
    other = tmp_path / "model"
    shutil.copytree(path, other)
    names = (
        "vision_tower.blocks.0.weight",
        "multi_modal_projector.weight",
        "patch_merge_mlp.weight",
        "language_model.model.mtp.0.weight",
        "language_model.model.dspark.fc.weight",
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
    )
    raw.edit(other, {name: Tensor.of("F16", [np.nan]) for name in names})
    attn = "language_model.model.layers.1.self_attn."
    raw.edit(other, {attn + "k_scale": Tensor.of("F32", 1.0)})
    raw.edit(other, {attn + "v_proj.v_scale": Tensor.of("BF16", [1.0])})
    check(load(other), {name: np.asarray(a) for name, a in load(path).items()})


def test_w1_and_w3_may_have_their_own_global_scale(made, tmp_path):
    path, _ = made["mxfp8", "nvfp4"]
    other = tmp_path / "model"
    shutil.copytree(path, other)
    expert = "language_model.model.layers.1.block_sparse_moe.experts.3."
    raw.set_value(other, expert + "w1.weight_global_scale", 8.0)
    raw.set_value(other, expert + "w3.weight_global_scale", 4.0)
    scales = np.asarray(load(other)["layers.1.moe.experts.gate_up_proj.weight_scale_2"])
    assert scales[3].tolist() == [0.125, 0.25]
    assert (scales[:3, 0] == scales[:3, 1]).all()


def test_a_router_may_be_bf16_and_routing_bias_absent(made, tmp_path):
    path, config = made["bf16", "bf16"]
    other = tmp_path / "model"
    shutil.copytree(path, other)
    gate = "language_model.model.layers.1.block_sparse_moe.gate.weight"
    bias = "language_model.model.layers.1.block_sparse_moe.e_score_correction_bias"
    stored = raw.read_all(other)[gate].array
    raw.edit(other, {gate: Tensor.of("BF16", stored), bias: None})
    params = load(other, config=dataclasses.replace(config, use_routing_bias=False))
    want = stored.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert same(np.asarray(params["layers.1.moe.router.weight"]), want)
    assert "layers.1.moe.router.e_score_correction_bias" not in params


def test_a_model_without_shared_expert_or_dense_layers(tmp_path):
    config = raw.small(
        shared_intermediate_size=0, dense_intermediate_size=0, moe_layers=(True, True)
    )
    make.make(config, tmp_path / "model", progress=False)
    params = load(tmp_path / "model", 2)
    assert not [name for name in params if "shared_expert" in name or ".mlp." in name]
    assert "layers.0.moe.router.weight" in params


def test_ignored_projections_stay_bf16(tmp_path):
    quantization = dataclasses.replace(
        raw.small().quantization, ignored=("index_q_proj", "model.layers.0.self_attn.o_proj")
    )
    config = raw.small(num_layers=2)
    config = dataclasses.replace(config, quantization=quantization)
    make.make(config, tmp_path / "model", progress=False)
    params = load(tmp_path / "model", dtype=ml_dtypes.bfloat16)
    kinds = {n: a.dtype for n, a in params.items() if n.endswith("_proj.weight")}
    half = sorted(n for n, dtype in kinds.items() if dtype == ml_dtypes.bfloat16)
    assert half == [
        "layers.0.self_attn.index_q_proj.weight",
        "layers.0.self_attn.o_proj.weight",
        "layers.1.self_attn.index_q_proj.weight",
    ]


def test_progress_goes_to_stderr(made, capsys):
    path, config = made["bf16", "bf16"]
    loader.load(path, config, make_mesh(1, jax.devices()))
    out, err = capsys.readouterr()
    assert out == ""
    assert "load" in err
    assert "100%" in err
