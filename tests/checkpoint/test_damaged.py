"""Damaged checkpoints: each is refused with a message that names what is wrong."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from m31jax.checkpoint import inspect, loader, make
from m31jax.checkpoint.reader import CheckpointWarning
from m31jax.config import ModelConfig
from m31jax.errors import CheckpointError
from sharding.mesh import make_mesh

from . import raw
from .raw import Tensor

P = "language_model."
ATTN = P + "model.layers.1.self_attn."
MOE = P + "model.layers.1.block_sparse_moe."
EXPERT = MOE + "experts.2."
NORM = P + "model.layers.0.input_layernorm.weight"
HEAD = P + "lm_head.weight"
FIRST, LAST = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "model"
    made = make.make(raw.small(), path, seed=5, max_shard_bytes=120_000, progress=False)
    assert made["shards"] == 3
    return path


def _drop(*names: str) -> Callable[[Path], None]:
    return lambda path: raw.edit(path, dict.fromkeys(names))


def _add(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda path: raw.edit(path, {name: tensor})


def _set(name: str, value: float) -> Callable[[Path], None]:
    return lambda path: raw.set_value(path, name, value)


def _bytes(name: str, *values: int, offset: int = 0) -> Callable[[Path], None]:
    return lambda path: raw.set_bytes(path, name, offset, bytes(values))


def _change(name: str, **fields) -> Callable[[Path], None]:
    """Replace fields of a tensor, its bytes made to fit."""

    def damage(path: Path) -> None:
        tensor = dataclasses.replace(raw.read(raw.shard_of(path, name))[name], **fields)
        size = int(np.prod(tensor.shape)) * np.dtype(raw.DTYPES[tensor.dtype]).itemsize
        tensor.data = bytes(size)
        raw.edit(path, {name: tensor})

    return damage


def _cut(name: str, count: int) -> Callable[[Path], None]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes()[:count])


def _overwrite(name: str, at: int, content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        old = (path / name).read_bytes()
        (path / name).write_bytes(old[:at] + content + old[at + len(content) :])

    return damage


def _index(change: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = raw.read_index(path)
        change(content)
        raw.write_index(path, content)

    return damage


def _twice(path: Path) -> None:
    raw.write(path / FIRST, raw.read(path / FIRST) | {HEAD: raw.read(path / LAST)[HEAD]})


def _overlap(path: Path) -> None:
    """Two tensors that claim the same bytes."""
    content = (path / FIRST).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    a, b, *_ = (name for name in header if name != "__metadata__")
    header[b]["data_offsets"] = header[a]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    (path / FIRST).write_bytes(content[:8] + text + content[8 + length :])


def _tie(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (path / "config.json").write_text(json.dumps(config))


def _nonzero(path: Path) -> None:
    """A NaN scale over a group with one code that is not zero."""
    raw.set_bytes(path, EXPERT + "w1.weight_packed", 0, bytes([0, 0, 0, 0x80, 0, 0, 0, 0x10]))
    raw.set_bytes(path, EXPERT + "w1.weight_scale", 0, bytes([0x7F]))


DAMAGES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "unknown tensor": (_add(P + "model.layers.0.extra.weight", Tensor.of("BF16", [1])),
                       ("unexpected", "model.layers.0.extra.weight", FIRST)),
    "a layer too many": (_add(P + "model.layers.2.input_layernorm.weight", Tensor.of("BF16", [1])),
                         ("unexpected", "layers.2")),
    "another prefix": (_add("model.norm.weight", Tensor.of("BF16", [1])),
                       ("unexpected", "model.norm.weight")),
    "missing tensor": (_drop(HEAD), ("missing", HEAD, "(1)")),
    "missing index projections": (
        _drop(*(ATTN + "index_" + n for n in (
            "q_proj.weight", "q_proj.weight_scale_inv", "k_proj.weight", "k_proj.weight_scale_inv",
            "q_norm.weight", "k_norm.weight"))),
        ("missing", ATTN + "index_q_proj.weight", "(6)")),
    "w1 without w3": (
        _drop(*(EXPERT + "w3.weight_" + n for n in ("packed", "scale", "global_scale"))),
        ("incomplete", EXPERT + "w3.weight_packed", "(3)")),
    "weight without scale": (_drop(ATTN + "o_proj.weight_scale_inv"),
                             ("incomplete", ATTN + "o_proj.weight_scale_inv")),
    "q without k": (_drop(ATTN + "k_proj.weight", ATTN + "k_proj.weight_scale_inv"),
                    ("incomplete", ATTN + "k_proj.weight")),
    "gate without up": (_drop(MOE + "shared_experts.up_proj.weight"),
                        ("incomplete", "shared_experts.up_proj.weight")),
    "no global scale": (_drop(EXPERT + "w2.weight_global_scale"),
                        ("incomplete", EXPERT + "w2.weight_global_scale")),
    "two spellings of a scale": (
        _add(ATTN + "o_proj.weight_scale", Tensor("U8", [64, 8], bytes(512))),
        ("two names", "o_proj.weight_scale_inv and", ATTN + "o_proj.weight_scale")),
    "wrong shape": (_change(NORM, shape=[65]), ("shape", NORM, "[65]", "[64]", FIRST)),
    "transposed": (_change(ATTN + "v_proj.weight_scale_inv", shape=[2, 64]),
                   ("shape", ATTN + "v_proj.weight_scale_inv", "[64, 2]")),
    "half the experts' width": (_change(EXPERT + "w2.weight_packed", shape=[64, 32]),
                                ("shape", EXPERT + "w2.weight_packed")),
    "wrong dtype": (_change(HEAD, dtype="F32"), ("dtype", HEAD, "F32", "BF16", LAST)),
    "half precision": (_change(NORM, dtype="F16"), ("dtype", NORM, "F16")),
    "BF16 expert in an NVFP4 model": (_change(EXPERT + "w1.weight_packed", dtype="BF16"),
                                      ("dtype", EXPERT + "w1.weight_packed", "U8")),
    "truncated file": (_cut(LAST, 9000), ("truncated", LAST)),
    "truncated header": (_cut(FIRST, 100), ("truncated", FIRST)),
    "empty file": (_cut(FIRST, 0), ("truncated", FIRST)),
    "corrupt header": (_overwrite(FIRST, 20, b"\xff\xff"), ("corrupt header", FIRST)),
    "header that is no object": (_overwrite(FIRST, 0, b"\x02" + bytes(7) + b"[]"),
                                 ("corrupt header", FIRST)),
    "overlapping tensors": (_overlap, ("corrupt header", FIRST)),
    "Git LFS pointer": (_overwrite(FIRST, 0, b"version https://git-lfs"), ("Git LFS", FIRST)),
    "absent shard": (lambda path: (path / LAST).unlink(), ("absent", LAST)),
    "index total": (_index(lambda i: i["metadata"].update(total_size=1)), ("total_size 1", INDEX)),
    "index names a tensor too many": (
        _index(lambda i: i["weight_map"].update({"language_model.model.x": FIRST})),
        ("lists but", "language_model.model.x", FIRST)),
    "index names another shard": (_index(lambda i: i["weight_map"].update({HEAD: FIRST})),
                                  ("lists but", HEAD, FIRST)),
    "index lacks a tensor": (_index(lambda i: i["weight_map"].pop(HEAD)),
                             ("does not list", HEAD, LAST)),
    "tensor in two shards": (_twice, ("two shards", HEAD, FIRST, LAST)),
    "index is not JSON": (_cut(INDEX, 50), ("not JSON", INDEX)),
    "index without a map": (_index(lambda i: i.pop("weight_map")), ("no weight_map", INDEX)),
    "index leaves its directory": (
        _index(lambda i: i["weight_map"].update({HEAD: "../model.safetensors"})),
        ("outside", "../model.safetensors")),
    "no weights": (lambda path: [f.unlink() for f in path.glob("model*")], ("no *.safetensors",)),
    "no index": (lambda path: (path / INDEX).unlink(), (FIRST, "but no", INDEX)),
    "global scale 0": (_set(EXPERT + "w1.weight_global_scale", 0.0),
                       (EXPERT + "w1.weight_global_scale", "> 0")),
    "global scale below 0": (_set(EXPERT + "w3.weight_global_scale", -1.0),
                             (EXPERT + "w3.weight_global_scale", "> 0")),
    "global scale infinite": (_set(EXPERT + "w2.weight_global_scale", np.inf),
                              (EXPERT + "w2.weight_global_scale", "not finite")),
    "global scale NaN": (_set(EXPERT + "w2.weight_global_scale", np.nan),
                         (EXPERT + "w2.weight_global_scale", "not finite")),
    "activation scale 0": (_set(EXPERT + "w2.input_global_scale", 0.0),
                           (EXPERT + "w2.input_global_scale", "> 0")),
    "NaN scale over codes": (_nonzero, (EXPERT + "w1.weight_scale", "0x7F", "[0, 0]")),
    "negative scale": (_bytes(EXPERT + "w1.weight_scale", 0xB0, offset=5),
                       (EXPERT + "w1.weight_scale", "negative", "[1, 1]")),
    "NaN exponent over codes": (_bytes(ATTN + "q_proj.weight_scale_inv", 0xFF),
                                (ATTN + "q_proj.weight_scale_inv", "0xFF", "[0, 0]")),
    "NaN in a quantised weight": (_bytes(ATTN + "q_proj.weight", 0xFF, offset=65),
                                  (ATTN + "q_proj.weight", "NaN", "[1, 1]")),
    "NaN in a norm": (_set(NORM, np.nan), (NORM, "NaN", FIRST)),
    "infinity in a router": (_set(MOE + "gate.weight", np.inf), (MOE + "gate.weight", "infinite")),
    "NaN in a bias": (_set(MOE + "e_score_correction_bias", np.nan),
                      (MOE + "e_score_correction_bias", "NaN")),
    "NaN in the embedding": (_set(P + "model.embed_tokens.weight", np.nan),
                             ("embed_tokens", "NaN")),
    "K scale not 1": (_add(ATTN + "k_scale", Tensor.of("F32", 0.5)), (ATTN + "k_scale", "not 1")),
    "V scale not 1": (_add(ATTN + "attn.v_scale", Tensor.of("F32", [1.0, 2.0])),
                      ("v_scale", "not 1")),
    "tied, with another head": (_tie, ("unexpected", HEAD, "differ")),
}  # fmt: skip


def load(path: Path, tp: int = 1) -> dict[str, jax.Array]:
    config = ModelConfig.from_dir(path)
    return loader.load(path, config, make_mesh(tp, jax.devices()), progress=False)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(damage, tp, sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    break_it, words = DAMAGES[damage]
    break_it(path)
    with pytest.raises(CheckpointError) as caught:
        load(path, tp)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    if tp == 1:
        problems = inspect.inspect(path)["problems"]
        assert any(all(word in problem for word in words) for problem in problems), problems


def test_the_sound_checkpoint_loads(sound):
    assert load(sound)
    assert inspect.inspect(sound)["problems"] == []


def test_one_message_names_eight_and_counts_all(sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    raw.edit(path, {f"{P}model.extra.{i:02d}": Tensor.of("F32", [1]) for i in range(11)})
    with pytest.raises(CheckpointError, match=r"extra\.07 .*, \.\.\. \(11\)") as caught:
        load(path)
    assert "extra.08" not in str(caught.value)


def test_every_problem_is_told_at_once(sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    _drop(HEAD)(path)
    _add(P + "model.odd", Tensor.of("F32", [1]))(path)
    _change(NORM, shape=[65])(path)
    _set(MOE + "gate.weight", np.inf)(path)
    with pytest.raises(CheckpointError, match="3 problems") as caught:
        load(path)
    assert all(name in str(caught.value) for name in (HEAD, "model.odd", NORM))
    problems = "\n".join(inspect.inspect(path)["problems"])
    assert all(name in problems for name in (HEAD, "model.odd", NORM, MOE + "gate.weight"))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("scale", "codes", "byte", "group"),
    [
        (EXPERT + "w1.weight_scale", EXPERT + "w1.weight_packed", 0x7F, 8),
        (EXPERT + "w2.weight_scale", EXPERT + "w2.weight_packed", 0xFF, 8),
        (ATTN + "o_proj.weight_scale_inv", ATTN + "o_proj.weight", 0xFF, 32),
    ],
)
def test_a_nan_scale_over_zero_codes_is_zero_with_one_warning(
    scale, codes, byte, group, tp, sound, tmp_path
):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    # The second group of the first row; 0x80 and 0x88 are zeros with a sign.
    zeros = [0x88, 0x80] * (group // 2) if group == 8 else [0x80, 0x00] * (group // 2)
    raw.set_bytes(path, codes, group, bytes(zeros))
    raw.set_bytes(path, scale, 1, bytes([byte]))
    with pytest.warns(CheckpointWarning, match=f"{scale} .*1 NaN scale") as caught:
        params = load(path, tp)
    assert len([w for w in caught if w.category is CheckpointWarning]) == 1
    name, index = {
        EXPERT + "w1.weight_scale": ("layers.1.moe.experts.gate_up_proj.weight_scale", (2, 0)),
        EXPERT + "w2.weight_scale": ("layers.1.moe.experts.down_proj.weight_scale", (2,)),
        ATTN + "o_proj.weight_scale_inv": ("layers.1.self_attn.o_proj.weight_scale", ()),
    }[scale]
    loaded = np.asarray(params[name])[index].view(np.uint8)
    expected = raw.read(raw.shard_of(path, scale))[scale].array.view(np.uint8)
    expected[0, 1] = 0
    np.testing.assert_array_equal(loaded, expected)
    report = inspect.inspect(path)
    assert report["problems"] == []
    assert any(scale in note for note in report["notes"])


def test_tied_embeddings_have_no_head_and_accept_a_copy_of_the_embedding(sound, tmp_path):
    path = tmp_path / "model"
    shutil.copytree(sound, path)
    _tie(path)
    embedding = raw.read_all(path)[P + "model.embed_tokens.weight"]
    raw.edit(path, {HEAD: embedding})
    assert "lm_head.weight" not in load(path)
    raw.edit(path, {HEAD: None})
    assert "lm_head.weight" not in load(path)


def test_a_path_that_is_no_directory(tmp_path):
    with pytest.raises(CheckpointError, match="not a directory"):
        loader.load(tmp_path / "none", raw.SMALL, make_mesh(1, jax.devices()), progress=False)
    with pytest.raises(CheckpointError, match="not a directory"):
        inspect.inspect(tmp_path / "none")
