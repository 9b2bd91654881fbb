"""Widths that a model can be cut to, and the ones that are refused before anything is read."""

import dataclasses

import jax
import numpy as np
import pytest

from m31jax import weights
from m31jax.checkpoint import loader, make
from m31jax.checkpoint.plan import allowed_widths, check_widths, plan
from m31jax.config import ModelConfig
from m31jax.errors import TargetError
from m31jax.presets import FULL, TINY
from sharding.mesh import make_mesh
from tests.golden import golden_dir

from . import raw


@pytest.mark.parametrize("fmt", ["bf16", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("preset", [TINY, FULL], ids=["tiny", "full"])
def test_the_presets_fit_every_width(preset, fmt):
    assert allowed_widths(make.with_format(preset, fmt)) == (1, 2, 4, 8)


@pytest.mark.parametrize("tp", [3, 5, 6, 7, 16, 0, -1])
def test_other_widths_are_refused_and_name_the_allowed_ones(tp):
    with pytest.raises(TargetError, match=rf"tp={tp} .*allowed widths: 1, 2, 4, 8"):
        check_widths(make.with_format(TINY, "nvfp4"), tp)


@pytest.mark.parametrize("tp", [3, 16])
def test_a_width_is_refused_before_the_checkpoint_is_opened(tp, tmp_path):
    if tp > len(jax.devices()):
        mesh = jax.sharding.AbstractMesh((tp,), ("tp",))
    else:
        mesh = make_mesh(tp, jax.devices())
    with pytest.raises(TargetError, match="allowed widths"):
        loader.load(tmp_path / "absent", TINY, mesh, progress=False)


REFUSED = {
    "heads": (dict(num_heads=6, num_kv_heads=2), 4, "num_heads=6"),
    "vocabulary": (dict(vocab_size=62, bos_token_id=0, eos_token_ids=(1,)), 4, "vocab_size=62"),
    "K/V heads": (dict(num_heads=24, num_kv_heads=3, index_num_heads=3), 2, "num_kv_heads=3"),
    "dense": (dict(dense_intermediate_size=36), 8, "layers.0.mlp.down_proj"),
    "shared": (dict(shared_intermediate_size=36), 8, "shared_experts.down_proj"),
    "experts": (dict(intermediate_size=36), 8, "experts.0.w2"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_divide_is_named(what):
    changes, tp, words = REFUSED[what]
    with pytest.raises(TargetError, match=words):
        check_widths(raw.small("bf16", "bf16", **changes), tp)


GROUPS = {
    "MXFP8 dense": ("mxfp8", "bf16", dict(dense_intermediate_size=192), 4, "mlp.down_proj"),
    "MXFP8 shared": ("mxfp8", "bf16", dict(shared_intermediate_size=96), 2, "shared_experts"),
    "MXFP8 experts": ("mxfp8", "mxfp8", dict(intermediate_size=128), 8, "experts.0.w2"),
    "NVFP4 experts": ("mxfp8", "nvfp4", dict(intermediate_size=64), 8, "experts.0.w2"),
    "ModelOpt experts": ("bf16", "nvfp4_modelopt", dict(intermediate_size=64), 8, "experts.0.w2"),
}  # fmt: skip


@pytest.mark.parametrize("what", GROUPS)
def test_groups_of_a_number_format_are_never_cut(what):
    linear, experts, changes, tp, words = GROUPS[what]
    config = raw.small(linear, experts, **changes)
    check_widths(config, tp // 2)
    with pytest.raises(TargetError, match=words):
        check_widths(config, tp)


def test_columns_of_o_proj_are_whole_groups():
    narrow = dict(num_heads=8, head_dim=16, rotary_dim=16, index_head_dim=32)
    check_widths(raw.small("bf16", "bf16", **narrow), 8)
    with pytest.raises(TargetError, match=r"o_proj.*128.*16 a rank.*mxfp8 groups of 32"):
        check_widths(raw.small("mxfp8", "bf16", **narrow), 8)


@pytest.mark.parametrize(
    ("name", "fmt", "words"),
    [
        ("hf_tiny_a", "nvfp4", "allowed widths: 1$"),
        ("hf_tiny_k", "mxfp8", "allowed widths: 1, 2, 4$"),
    ],
)
def test_the_golden_checkpoints_are_too_narrow_for_tp8_once_quantised(name, fmt, words):
    config = ModelConfig.from_dir(golden_dir() / name)
    check_widths(config, 8)
    with pytest.raises(TargetError, match=words):
        check_widths(make.with_format(config, fmt), 8)


def test_the_golden_experts_alone_are_too_narrow_for_tp8_in_nvfp4():
    config = ModelConfig.from_dir(golden_dir() / "hf_tiny_a")
    quantization = dataclasses.replace(config.quantization, linear="bf16", experts="nvfp4_modelopt")
    config = dataclasses.replace(config, quantization=quantization)
    assert allowed_widths(config) == (1, 2, 4)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_bytes_of_the_full_model_by_hand(tp):
    """TP cuts everything but routers, norms, biases, index keys and outer scales."""
    d, layers, moe = 6144, 60, 57
    q, kv, head = 8192, 512, 128
    copies = max(1, tp // 4)
    mxfp8 = lambda n, k: n * k + n * k // 32  # noqa: E731
    nvfp4 = lambda n, k: n * k // 2 + n * k // 16  # noqa: E731
    cut = 2 * (2 * 200064 * d)  # embedding and head, BF16
    cut += layers * (2 * mxfp8(q, d) + (2 + 1) * copies * mxfp8(kv, d))
    cut += 3 * 3 * mxfp8(12288, d) + moe * 3 * mxfp8(3072, d)
    cut += moe * 128 * 3 * nvfp4(3072, d)
    whole = 4 * d + layers * (mxfp8(head, d) + 4 * (2 * d + 4 * head))
    whole += moe * 4 * (128 * d + 128 + 128 * 3)
    planned = plan(make.with_format(FULL, "nvfp4"), tp, np.dtype("bfloat16"))
    assert planned.bytes_per_rank == cut // tp + whole


def test_expand_lists_every_tensor_once():
    manifest = weights.expand(make.with_format(FULL, "nvfp4"))
    names = [source.name for source in (*manifest.sources(), *manifest.optional)]
    assert len(names) == len(set(names))
    assert len({p.name for p in manifest.parameters}) == len(manifest.parameters)
