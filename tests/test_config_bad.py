"""Damaged configs: each is refused with a message that names the key, the value and the way out."""

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from m31jax.config import ModelConfig, Quantization
from m31jax.errors import ConfigError, M31Error
from m31jax.presets import FORMATS, TINY

Change = Callable[[dict[str, Any]], object]
NESTED = "sparse_attention_config"


def text(**values: Any) -> Change:
    return lambda raw: raw["text_config"].update(values)


def drop(key: str) -> Change:
    return lambda raw: raw["text_config"].pop(key)


def drops(*keys: str) -> Change:
    return lambda raw: [raw["text_config"].pop(key) for key in keys]


def outer(**values: Any) -> Change:
    return lambda raw: raw.update(values)


def sparse(**values: Any) -> Change:
    return lambda raw: raw["text_config"][NESTED].update(values)


def drop_sparse(key: str) -> Change:
    return lambda raw: raw["text_config"][NESTED].pop(key)


def quant(**values: Any) -> Change:
    """Changes the quantisation object of an M3.1 file."""
    return lambda raw: raw["quantization_config"].update(values)


def modelopt(**values: Any) -> Change:
    def change(raw):
        raw["quantization_config"] = {"quant_method": "modelopt"} | values

    return change


def mapped(layers: Any, **values: Any) -> Change:
    return modelopt(quant_algo="MIXED_PRECISION", quantized_layers=layers, **values)


def one_expert(index: int, algo: str) -> dict[str, Any]:
    return {f"model.layers.1.block_sparse_moe.experts.{index}.w1": {"quant_algo": algo}}


EXPERTS = "model.layers.{}.block_sparse_moe.experts"
NAN, INF = float("nan"), float("inf")

# The change, and what the message says.
DAMAGED: list[tuple[Change, str]] = [
    # identity
    (outer(architectures=["LlamaForCausalLM"]), "'LlamaForCausalLM'] is not"),
    (outer(architectures=["DSparkMiniMaxDraftModel"]), "is a drafter; give the target"),
    (outer(architectures=["A", "B"]), "must be a list of one name"),
    (outer(architectures="MiniMaxM3"), "architectures='MiniMaxM3' must"),
    (outer(model_type="llama"), "model_type='llama' is not supported"),
    (outer(model_type=["x"]), "model_type=['x'] is not supported"),
    (outer(architectures=None, model_type=None), "missing keys 'architectures' and"),
    (lambda raw: raw.pop("text_config"), "missing key 'text_config', which"),
    (outer(text_config=[1]), "text_config must be a JSON object with"),
    # which object a key belongs to
    (outer(hidden_size=512), "hidden_size=512 beside text_config, where it is 256"),
    (
        lambda raw: raw.update(
            routed_scaling_factor=raw["text_config"].pop("routed_scaling_factor")
        ),
        "routed_scaling_factor=2.0 beside text_config, where it is absent",
    ),
    (outer(num_experts=9), "num_experts=9 beside text_config, where it is absent"),
    (outer(eos_token_id=3), "eos_token_id=3 beside text_config but 511 in it"),
    # unknown keys
    (text(swiglu_limitt=7.0), "unknown key 'swiglu_limitt' = 7.0 in the text model's"),
    (text(hiden_size=256), "did you mean 'hidden_size'?"),
    (text(zzqqx=1), "no known key is near"),
    (sparse(sparse_heads=4), "unknown key 'sparse_heads' = 4 in sparse_attention_config"),
    (text(rope_parameters={"factor": 8.0}), "unknown key 'factor' = 8.0 in rope_parameters"),
    # missing keys
    (drop("vocab_size"), "missing key 'vocab_size'"),
    (text(hidden_size=None), "missing key 'hidden_size'"),
    (drop("head_dim"), "missing key 'head_dim'; add it, it is not hidden_size"),
    (drop("rope_theta"), "missing key 'rope_theta'"),
    (drop("rms_norm_eps"), "missing key 'rms_norm_eps'"),
    (drop("swiglu_alpha"), "missing key 'swiglu_alpha'; SwiGLU of this model is clamped"),
    (drop("swiglu_limit"), "missing key 'swiglu_limit'; SwiGLU of this model is clamped"),
    (
        lambda raw: (drops("swiglu_limit", "swiglu_alpha")(raw), text(hidden_act="silu")(raw)),
        "missing key 'swiglu_alpha'; SwiGLU",
    ),
    (drop("num_local_experts"), "missing key 'num_local_experts'; MoE layers need it"),
    (drop("num_experts_per_tok"), "missing key 'num_experts_per_tok'; MoE layers need"),
    (
        drop("dense_intermediate_size"),
        "missing key 'dense_intermediate_size'; layers without experts need it",
    ),
    (
        drops("shared_intermediate_size", "n_shared_experts"),
        "missing key 'shared_intermediate_size' (or 'n_shared_experts')",
    ),
    (drop_sparse("sparse_num_index_heads"), "missing key 'sparse_num_index_heads'"),
    (drop_sparse("sparse_block_size"), "missing key 'sparse_block_size'; sparse"),
    (drop_sparse("sparse_topk_blocks"), "missing key 'sparse_topk_blocks'; sparse"),
    (drop_sparse("sparse_attention_freq"), "but no layer is said to be sparse; add"),
    # types and ranges
    (text(hidden_size=256.0), "hidden_size=256.0 must be an integer"),
    (text(num_hidden_layers="4"), "num_hidden_layers='4' must be an integer"),
    (text(num_attention_heads=True), "num_attention_heads=True must be an integer"),
    (text(num_key_value_heads=0), "num_key_value_heads=0 must lie in 1..2147483647"),
    (text(vocab_size=-1), "vocab_size=-1 must lie in 1.."),
    (text(max_position_embeddings=2**31), "max_position_embeddings=2147483648 must lie"),
    (text(intermediate_size=10**100), "intermediate_size=an integer of 333 bits must lie"),
    (text(num_hidden_layers=10**9), "must lie in 1..4096"),
    (text(rms_norm_eps=NAN), "rms_norm_eps=nan must be finite"),
    (text(rope_theta=INF), "rope_theta=inf must be finite"),
    (text(rms_norm_eps=0), "rms_norm_eps=0.0 must be above 0"),
    (text(swiglu_limit=-7.0), "swiglu_limit=-7.0 must be above 0"),
    (text(swiglu_beta="1"), "swiglu_beta='1' must be a number"),
    (text(swiglu_alpha=True), "swiglu_alpha=True must be a number"),
    (text(use_gemma_norm=0), "use_gemma_norm=0 must be true or false"),
    (text(use_routing_bias=1), "use_routing_bias=1 must be true or false"),
    (outer(tie_word_embeddings="no"), "tie_word_embeddings='no' must be true"),
    # per-layer lists
    (text(moe_layer_freq=[0, 1]), "moe_layer_freq has 2 entries but num_hidden_layers=4"),
    (sparse(sparse_attention_freq=[1] * 5), "sparse_attention_freq has 5 entries"),
    (
        lambda raw: (drop("moe_layer_freq")(raw), text(mlp_layer_types=["dense"])(raw)),
        "mlp_layer_types has 1 entries but num_hidden_layers=4",
    ),
    (text(moe_layer_freq=[0, 1, 1, 2]), "moe_layer_freq has the entry 2; allowed"),
    (text(moe_layer_freq=[0, 1, 1, True]), "moe_layer_freq has the entry True;"),
    (text(moe_layer_freq=1), "moe_layer_freq must be a list with one entry"),
    (text(layer_types=["sliding_attention"] * 4), "has the entry 'sliding_attention'"),
    (text(mlp_layer_types=["moe"] * 4), "mlp_layer_types has the entry 'moe'"),
    # two spellings that disagree
    (text(num_experts=16), "num_local_experts=8 and num_experts=16 disagree"),
    (
        text(mlp_layer_types=["sparse"] * 4),
        "moe_layer_freq=[0, 1, 1, 1] and mlp_layer_types=[1, 1, 1, 1] disagree",
    ),
    (
        text(rope_parameters={"rope_theta": 10000}),
        "rope_theta=5000000.0 and rope_parameters.rope_theta=10000 disagree",
    ),
    (text(index_block_size=64), "index_block_size=64 disagree"),
    (text(partial_rotary_factor=0.25), "(of head_dim=64: 16) disagree"),
    (sparse(sparse_init_tokens=128), "sparse_init_tokens=128 (1 blocks of 128)"),
    # what this model never has
    (text(scoring_func="softmax"), "scoring_func='softmax' is not supported"),
    (text(attention_output_gate=True), "attention_output_gate=True is not supported"),
    (text(qk_norm_type="per_layer"), "qk_norm_type='per_layer' is not supported"),
    (text(use_qk_norm=False), "use_qk_norm=False is not supported, only True is"),
    (text(hidden_act="gelu"), "hidden_act='gelu' is not supported, only 'swigluoai' or"),
    (text(rope_parameters={"rope_type": "yarn"}), "rope_parameters.rope_type='yarn' is not"),
    (text(rope_scaling={"type": "yarn", "factor": 4}), "rope_scaling.type='yarn' is not"),
    (text(sliding_window=4096), "sliding_window=4096 is not supported, only null (absent)"),
    (sparse(sparse_score_type="lse"), "sparse_score_type='lse' is not supported"),
    (sparse(sparse_disable_index_value=[1, 0, 1, 1]), "a K-only sparse index is required"),
    # rules between keys
    (text(num_attention_heads=18), "18 is not a multiple of num_key_value_heads=4"),
    (text(rotary_dim=31), "rotary_dim=31 must be even and in 2..head_dim=64"),
    (text(rotary_dim=66), "rotary_dim=66 must be even"),
    (text(partial_rotary_factor=1.5), "partial_rotary_factor=1.5 must be at most 1"),
    (sparse(sparse_index_dim=16), "sparse_index_dim=16 is less than rotary_dim=32"),
    (sparse(sparse_num_index_heads=8), "8 is more than num_key_value_heads=4"),
    (sparse(sparse_num_index_heads=2), "2 is less than num_key_value_heads=4"),
    (
        sparse(sparse_init_block=3, sparse_local_block=2),
        "sparse_init_block=3 + sparse_local_block=2 exceeds sparse_topk_blocks=4",
    ),
    (sparse(sparse_init_block=-1), "sparse_init_block=-1 must lie in 0.."),
    (text(num_experts_per_tok=9), "num_experts_per_tok=9 exceeds num_local_experts=8"),
    (text(eos_token_id=512), "eos_token_id=512 is outside the vocabulary"),
    (text(eos_token_id=[1, 600]), "eos_token_id=600 is outside the vocabulary"),
    (text(eos_token_id=["</s>"]), "eos_token_id='</s>' must be an integer"),
    (text(bos_token_id=-1), "bos_token_id=-1 must lie in 0.."),
    (text(pad_token_id=512), "pad_token_id=512 is outside the vocabulary"),
    # quantization_config of an M3.1 file
    (outer(quantization_config="mxfp8"), "quantization_config must be a JSON object"),
    (outer(quantization_config={}), "quant_method=null is not supported"),
    (quant(quant_method="fp8"), "quant_method='fp8' is not supported; use a BF16, mxfp8"),
    (quant(activation_scheme="static"), "activation_scheme='static' is not supported, only"),
    (quant(group_size=32), "group_size=32 is not supported, only 16 is"),
    (quant(group_size=True), "group_size=True is not supported"),
    (quant(weight_block_size=[128, 128]), "weight_block_size=[128, 128] is not supported"),
    (quant(kv_cache_quant_algo="INT8"), "kv_cache_quant_algo='INT8' is not supported"),
    (quant(attention_quant_algo="BF16"), "attention_quant_algo='BF16' is not supported"),
    (quant(index_k_quant_type="fp8"), "index_k_quant_type='fp8' is not supported, only"),
    (
        sparse(sparse_attention_freq=[0, 1, 1, 1]),
        "index_k_quant_type is set but not every layer is sparse",
    ),
    (quant(moe_quant_algo="INT4"), "moe_quant_algo='INT4' is not supported"),
    (quant(moe_quant_format="marlin"), "moe_quant_format='marlin' is not supported"),
    (quant(moe_quant_format=None), "moe_quant_algo is set but moe_quant_format is missing"),
    (quant(moe_quant_algo=None), "moe_quant_format is set but moe_quant_algo is missing"),
    (quant(zero_point=True), "unknown key 'zero_point' = True in quantization_config"),
    (quant(ignored_layers="lm_head"), "ignored_layers='lm_head' must be a list of"),
    (quant(modules_to_not_convert=[""]), "modules_to_not_convert=[''] must be a list"),
    (quant(ignored_layers=["re:("]), "'re:(', no regular expression"),
    (
        quant(ignored_layers=["model.layers.2.block_sparse_moe.experts.3.w1"]),
        "ignores model.layers.2.block_sparse_moe.experts.3.w1 but not model.layers.1.",
    ),
    (quant(ignored_layers=["experts"]), "ignores every routed expert but moe_quant_algo says"),
    (text(hidden_size=272), "hidden_size=272 is not a multiple of 32, the"),
    (text(intermediate_size=264), "intermediate_size=264 is not a multiple of 16"),
    # ModelOpt
    (modelopt(quant_algo="FP8"), "quant_algo='FP8' is not supported; use NVFP4"),
    (modelopt(quant_algo=["NVFP4"]), "quant_algo=['NVFP4'] is not supported"),
    (modelopt(quant_algo="NVFP4", smooth=1), "unknown key 'smooth' = 1 in quantization_config"),
    (modelopt(quant_algo="NVFP4"), "quantises model.layers.0.self_attn.q_proj to"),
    (
        modelopt(quant_algo="MXFP8", quantized_layers={}),
        "has quantized_layers but quant_algo='MXFP8'",
    ),
    (mapped(None), "quantization_config.quantized_layers must be a JSON object"),
    (
        mapped({"model.layers.0.self_attn.q_proj": {"quant_algo": "NVFP4"}}),
        "q_proj.quant_algo='NVFP4': a projection may be MXFP8 or left out",
    ),
    (mapped({"lm_head": {"quant_algo": "MXFP8"}}), "lm_head is no quantisable module"),
    (mapped({"lm_head": "NVFP4"}), "quantized_layers.lm_head must be a JSON"),
    (mapped({"lm_head": {"quant_algo": "W4A8"}}), ".quant_algo='W4A8' must be NVFP4 or"),
    (
        mapped({EXPERTS.format(1): {"quant_algo": "NVFP4", "group_size": 32}}),
        ".group_size=32 must be 16 for NVFP4",
    ),
    (mapped(one_expert(0, "NVFP4")), "names 1 of 24 expert matrices of layer 1"),
    (mapped(one_expert(8, "NVFP4")), "there are num_local_experts=8"),
    (
        mapped({EXPERTS.format(n): {"quant_algo": a} for n, a in ((1, "NVFP4"), (2, "MXFP8"))}),
        "gives routed experts both NVFP4 and MXFP8",
    ),
    (
        mapped({EXPERTS.format(1): {"quant_algo": "NVFP4"}}, ignore=["experts"]),
        "is also listed under ignore; keep one",
    ),
]


def m31_file() -> dict[str, Any]:
    return dataclasses.replace(TINY, quantization=FORMATS["nvfp4"]).to_dict()


def refused(raw: Any, **files: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(raw, **files)
    return str(caught.value)


@pytest.mark.parametrize(("change", "fragment"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_damaged(change, fragment):
    raw = m31_file()
    ModelConfig.from_dict(raw)
    change(raw)
    message = refused(raw)
    assert fragment in message
    assert message.startswith("config.json: ")
    assert message.count("config.json: ") == 1
    assert "\n" not in message
    assert len(message) < 400


def test_every_damage_has_its_own_message():
    fragments = [fragment for _, fragment in DAMAGED]
    assert len({*fragments}) == len(fragments) >= 30


@pytest.mark.parametrize("raw", [None, [], "x", 3, {1: 2}])
def test_not_an_object(raw):
    assert "the file must be a JSON object with string keys" in refused(raw)


def test_source_is_named():
    assert refused([], source="/models/m3/config.json").startswith("/models/m3/config.json: ")
    message = refused(TINY.to_dict(), generation={"eos_token_id": 512}, source="/m/config.json")
    assert message.startswith("/m/generation_config.json: eos_token_id=512 is outside")
    assert "generation_config.json: the file must be" in refused(TINY.to_dict(), generation=[])
    assert "bos_token_id=1.5 must" in refused(TINY.to_dict(), generation={"bos_token_id": 1.5})


@pytest.mark.parametrize(
    ("hf_quant", "fragment"),
    [
        ([], "the file must be a JSON object"),
        ({}, "quantization must be a JSON object"),
        ({"quantization": {"quant_algo": "FP8"}}, "quant_algo='FP8' is not supported"),
        ({"quantization": {"quant_method": "mxfp8"}}, "unknown key 'quant_method'"),
        ({"quantization": {}, "extra": 1}, "unknown key 'extra' = 1 in the file"),
    ],
)
def test_bad_hf_quant(hf_quant, fragment):
    message = refused(TINY.to_dict(), hf_quant=hf_quant, source="m/config.json")
    assert message.startswith("m/hf_quant_config.json: ")
    assert fragment in message


@pytest.mark.parametrize(
    ("content", "fragment"),
    [
        (b"", "is not valid JSON"),
        (b'{"vocab_size": 5,', "is not valid JSON"),
        (b"\xff\xfe\x00", "is not valid JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[" * 100000, "is nested too deeply"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "key 'c' is given twice"),
        (b"[1]", "the file must be a JSON object"),
        (b"null", "the file must be a JSON object"),
    ],
)
def test_unreadable_file(tmp_path, content, fragment):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/config.json: {fragment}")):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("name", ["generation_config.json", "hf_quant_config.json"])
def test_unreadable_second_file(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    (tmp_path / name).write_text("{")
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/{name}: is not valid JSON")):
        ModelConfig.from_dir(tmp_path)


def test_missing_and_misplaced_files(tmp_path):
    with pytest.raises(ConfigError, match=r"/none does not exist; give the directory"):
        ModelConfig.from_dir(tmp_path / "none")
    with pytest.raises(ConfigError, match=r"/config\.json does not exist; give the directory"):
        ModelConfig.from_dir(tmp_path)
    (tmp_path / "a.safetensors").touch()
    with pytest.raises(
        ConfigError, match=r"a\.safetensors is a file; give the directory that holds"
    ):
        ModelConfig.from_dir(tmp_path / "a.safetensors")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match=r"/config\.json: cannot be read: Is a directory"):
        ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        (dict(num_kv_heads=0), "num_kv_heads=0 must be at least 1"),
        (dict(num_kv_heads=3), "is not a multiple of num_key_value_heads=3"),
        (dict(num_layers=3), "must be a tuple of num_hidden_layers=3"),
        (dict(moe_layers=[True] * 4), "moe_layers must be a tuple"),
        (dict(topk_blocks=0), "sparse_topk_blocks=0 must be at least 1"),
        (dict(experts_per_token=0), "num_experts_per_tok=0 must be at least 1"),
        (dict(dense_intermediate_size=0), "layer 0 has a dense MLP"),
        (dict(bos_token_id=-1), "bos_token_id=-1 is outside"),
    ],
)
def test_rules_hold_for_replaced_fields_too(values, fragment):
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        dataclasses.replace(TINY, **values)


@pytest.mark.parametrize(
    ("values", "fragment"),
    [
        (("fp8", "bf16"), "linear='fp8' must be one of bf16, mxfp8"),
        (("mxfp8", "int4"), "experts='int4' must be one of"),
        (("bf16", "nvfp4"), "has no spelling in config.json; use linear='mxfp8'"),
        (("mxfp8", "mxfp8", ["lm_head"]), "ignored=['lm_head'] must be a tuple"),
        (("mxfp8", "mxfp8", (3,)), "has the entry 3; use module names"),
    ],
)
def test_bad_quantization(values, fragment):
    with pytest.raises(ConfigError, match=re.escape(fragment)):
        Quantization(*values)


def test_errors_are_value_errors():
    assert issubclass(ConfigError, M31Error)
    assert issubclass(ConfigError, ValueError)
