"""`ModelConfig.from_dict`, `from_dir` and `to_dict` on files that are right, in every spelling."""

import copy
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from m31jax.config import ModelConfig, Quantization
from m31jax.errors import ConfigError
from m31jax.presets import FORMATS, FULL, PRESETS, TINY
from tests.config_files import text_of, to_flat
from tests.golden import golden_dir


@st.composite
def configs(draw) -> ModelConfig:
    """Any valid model; widths are multiples of 32, so that every quantisation fits."""
    num_layers = draw(st.integers(1, 5))
    flags = st.lists(st.booleans(), min_size=num_layers, max_size=num_layers).map(tuple)
    moe_layers, sparse_layers = draw(flags), draw(flags)
    num_kv_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    head_dim = draw(st.sampled_from([32, 64, 128]))
    width = st.integers(1, 8).map(lambda n: 32 * n)
    topk = draw(st.integers(1, 16))
    init = draw(st.integers(0, topk))
    rotary_dim = 2 * draw(st.integers(1, head_dim // 2))
    num_experts = draw(st.integers(1, 16))
    vocab_size = draw(st.integers(4, 300000))
    token = st.integers(0, vocab_size - 1)
    number = st.floats(1e-7, 1e7, allow_subnormal=False)
    indexer = dict(
        index_num_heads=num_kv_heads,
        index_head_dim=draw(st.integers(rotary_dim, 256)),
        sparse_block_size=draw(st.integers(1, 256)),
        topk_blocks=topk,
        init_blocks=init,
        local_blocks=draw(st.integers(0, topk - init)),
    )
    if not any(sparse_layers):
        indexer = dict.fromkeys(indexer, 0) | {"sparse_block_size": 128}
    has_moe, has_dense = any(moe_layers), not all(moe_layers)
    quantization = draw(st.sampled_from(QUANTISATIONS))
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=draw(width),
        num_layers=num_layers,
        num_heads=num_kv_heads * group,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=draw(width) if has_moe else 0,
        dense_intermediate_size=draw(width) if has_dense else 0,
        shared_intermediate_size=draw(st.just(0) | width) if has_moe else 0,
        num_experts=num_experts if has_moe else 0,
        experts_per_token=draw(st.integers(1, num_experts)) if has_moe else 0,
        moe_layers=moe_layers,
        sparse_layers=sparse_layers,
        **indexer,
        routed_scaling_factor=draw(number),
        use_routing_bias=draw(st.booleans()),
        swiglu_alpha=draw(number),
        swiglu_limit=draw(number),
        swiglu_beta=draw(number),
        use_gemma_norm=draw(st.booleans()),
        rms_norm_eps=draw(number),
        rope_theta=draw(number),
        rotary_dim=rotary_dim,
        max_position_embeddings=draw(st.integers(1, 2**20)),
        tie_word_embeddings=draw(st.booleans()),
        bos_token_id=draw(st.none() | token),
        eos_token_ids=tuple(draw(st.lists(token, max_size=3, unique=True))),
        pad_token_id=draw(st.none() | token),
        quantization=quantization if has_moe else dataclasses.replace(quantization, experts="bf16"),
    )


QUANTISATIONS = (
    Quantization(),
    Quantization("mxfp8", "mxfp8"),
    Quantization("mxfp8", "nvfp4", ("lm_head", "gate")),
    Quantization("mxfp8", "bf16"),
    Quantization("mxfp8", "bf16", ("experts",)),
    Quantization("bf16", "mxfp8"),
    Quantization("bf16", "nvfp4_modelopt"),
    Quantization("mxfp8", "nvfp4_modelopt", ("model.layers.0.self_attn.k_proj",)),
)


@given(configs())
def test_released_spelling_round_trips(config):
    raw = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(raw) == config
    assert hash(ModelConfig.from_dict(raw)) == hash(config)


@given(configs())
def test_text_only_file_says_the_same(config):
    assert ModelConfig.from_dict(text_of(config)) == config


@given(configs())
def test_flat_spelling_says_the_same(config):
    config = dataclasses.replace(
        config,
        use_routing_bias=True,
        use_gemma_norm=True,
        init_blocks=0,
    )
    raw = json.loads(json.dumps(to_flat(config)))
    read = ModelConfig.from_dict(raw)
    assert dataclasses.replace(read, rotary_dim=config.rotary_dim) == config
    # The flat file has only a factor; a rounding of it may cost one step.
    assert read.rotary_dim == int(config.head_dim * (config.rotary_dim / config.head_dim))


@pytest.mark.parametrize("name", ["hf_tiny_a", "hf_tiny_k"])
def test_outside_files(name):
    config = ModelConfig.from_dir(golden_dir() / name)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert ModelConfig.from_dict(to_flat(config)) == config
    assert config.swiglu_beta == 1.0, "absent from the file"
    assert config.quantization == Quantization()
    if name == "hf_tiny_a":
        expected = (320, 128, 4, 16, 4, 64, 64, 192, 96, 8, 2, 32)
        assert (config.moe_layer_ids, config.sparse_layer_ids) == ((1, 2, 3), (1, 2, 3))
        assert (config.page_size, config.topk_blocks, config.is_m31) == (16, 4, False)
        assert (config.bos_token_id, config.eos_token_ids) == (314, (319,))
    else:
        expected = (512, 256, 2, 32, 2, 128, 128, 512, 128, 8, 2, 64)
        assert (config.moe_layer_ids, config.sparse_layer_ids) == ((1,), (0, 1))
        assert (config.page_size, config.topk_blocks, config.is_m31) == (128, 2, True)
        assert (config.bos_token_id, config.eos_token_ids) == (506, (511,))
    assert expected == (
        config.vocab_size,
        config.hidden_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.intermediate_size,
        config.dense_intermediate_size,
        config.shared_intermediate_size,
        config.num_experts,
        config.experts_per_token,
        config.rotary_dim,
    )


def test_presets():
    assert (FULL.num_heads * FULL.head_dim, FULL.hidden_size) == (8192, 6144)
    assert FULL.is_m31
    assert FULL.moe_layer_ids == tuple(range(3, 60))
    for config in PRESETS.values():
        for quantization in FORMATS.values():
            stored = dataclasses.replace(config, quantization=quantization)
            assert ModelConfig.from_dict(stored.to_dict()) == stored
    sharded = (
        TINY.vocab_size,
        TINY.num_heads * TINY.head_dim,
        TINY.num_kv_heads * TINY.head_dim,
        TINY.index_num_heads * TINY.index_head_dim,
        TINY.intermediate_size,
        TINY.dense_intermediate_size,
        TINY.shared_intermediate_size,
    )
    assert all(width % 256 == 0 for width in sharded), "8 ranks of whole 32-element scale groups"
    assert TINY.num_heads % 8 == 0


def edited(change, base: ModelConfig = TINY) -> ModelConfig:
    """`base` after `change(outer, text)` of its released file."""
    raw = base.to_dict()
    change(raw, raw["text_config"])
    return ModelConfig.from_dict(raw)


def test_released_m31_object():
    """The quantisation object of the released M3.1, and the formats of its modules."""

    def change(outer, _):
        outer["quantization_config"] = {
            "quant_method": "mxfp8",
            "moe_quant_algo": "NVFP4",
            "moe_quant_format": "nvfp4-pack-quantized",
            "weight_block_size": [1, 32],
            "activation_scheme": "dynamic",
            "group_size": 16,
            "kv_cache_quant_algo": "fp8",
            "attention_quant_algo": "FP8",
            "index_k_quant_type": "NVFP4",
            "ignored_layers": ["lm_head", "model.embed_tokens"],
            "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.index_q_proj", "gate"],
        }

    quantization = edited(change).quantization
    assert (quantization.linear, quantization.experts) == ("mxfp8", "nvfp4")
    assert quantization.ignored == (
        "lm_head",
        "model.embed_tokens",
        "model.layers.1.self_attn.index_q_proj",
        "gate",
    )


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_ignored_names_match_whole_components_with_any_prefix(prefix):
    ignored = ("gate", f"{prefix}layers.1.self_attn", "re:.*layers\\.2\\.mlp", "*layers.3.*q_proj")
    quantization = Quantization("mxfp8", "mxfp8", ignored)
    for name in (
        "layers.7.block_sparse_moe.gate",
        "layers.1.self_attn.o_proj",
        "layers.2.mlp.up_proj",
        "layers.3.self_attn.index_q_proj",
    ):
        assert quantization.linear_format(name) == "bf16", name
        assert quantization.linear_format(f"model.{name}") == "bf16", name
    for name in (
        "layers.2.self_attn.q_proj",
        "layers.0.mlp.gate_proj",
        "layers.11.self_attn.o_proj",
        "layers.3.self_attn.k_proj",
    ):
        assert quantization.linear_format(name) == "mxfp8", name
        assert quantization.linear_format(f"model.{name}") == "mxfp8", name


def test_plain_mxfp8_and_ignored_experts():
    def change(outer, _, **more):
        outer["quantization_config"] = {"quant_method": "mxfp8"} | more

    assert edited(change).quantization == Quantization("mxfp8", "mxfp8")

    def ignoring(outer, text):
        change(outer, text, ignored_layers=["experts"])

    assert edited(ignoring).quantization == Quantization("mxfp8", "bf16", ("experts",))


def modelopt_map(config: ModelConfig, *, fused: bool) -> dict[str, Any]:
    """Projections of layer 0 to MXFP8 and all experts to NVFP4, as ModelOpt writes it."""
    layers: dict[str, Any] = {
        f"language_model.model.layers.0.self_attn.{name}": {"quant_algo": "MXFP8"}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    for layer in config.moe_layer_ids:
        name = f"language_model.model.layers.{layer}.block_sparse_moe.experts"
        tails = [f".{e}.{w}" for e in range(config.num_experts) for w in ("w1", "w2", "w3")]
        for tail in [""] if fused else tails:
            layers[name + tail] = {"quant_algo": "NVFP4", "group_size": 16}
    return layers


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("separate_file", [True, False])
def test_modelopt_mixed_precision(fused, separate_file):
    raw, layers = TINY.to_dict(), modelopt_map(TINY, fused=fused)
    inner = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    hf_quant = None
    if separate_file:
        hf_quant = {
            "producer": {"name": "modelopt", "version": "0.47.0"},
            "quantization": inner | {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"},
        }
    else:
        raw["quantization_config"] = inner | {"quant_method": "modelopt", "ignore": ["lm_head"]}
    config = ModelConfig.from_dict(raw, hf_quant=hf_quant)
    quantization = config.quantization
    assert (quantization.linear, quantization.experts) == ("mxfp8", "nvfp4_modelopt")
    assert quantization.linear_format("model.layers.0.self_attn.q_proj") == "mxfp8"
    assert quantization.linear_format("model.layers.0.self_attn.index_q_proj") == "bf16"
    assert quantization.linear_format("model.layers.1.self_attn.q_proj") == "bf16"
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_modelopt_uniform_nvfp4_of_experts_only():
    raw = TINY.to_dict()
    ignore = ["*self_attn*", "*.mlp.*", "*shared_experts*", "lm_head"]
    raw["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ignore,
    }
    config = ModelConfig.from_dict(raw)
    assert config.quantization == Quantization("bf16", "nvfp4_modelopt", tuple(ignore))
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_hf_quant_is_read_only_without_quantization_config():
    hf_quant = {"quantization": {"quant_algo": "MXFP8"}}
    raw = TINY.to_dict()
    assert ModelConfig.from_dict(raw, hf_quant=hf_quant).quantization.linear == "mxfp8"
    raw["quantization_config"] = {
        "quant_method": "mxfp8",
        "moe_quant_algo": "nvfp4",
        "moe_quant_format": "nvfp4-pack-quantized",
    }
    assert ModelConfig.from_dict(raw, hf_quant=hf_quant).quantization.experts == "nvfp4"
    assert ModelConfig.from_dict(raw, hf_quant={"nonsense": 1}).quantization.experts == "nvfp4"
    none = {"quantization": {"quant_algo": None}}
    assert ModelConfig.from_dict(TINY.to_dict(), hf_quant=none) == TINY


def test_quantization_config_may_sit_in_either_object():
    quant = {"quant_method": "mxfp8"}
    inner = edited(lambda _, text: text.update(quantization_config=quant))
    assert inner == edited(lambda outer, _: outer.update(quantization_config=quant))
    assert inner.quantization.linear == "mxfp8"


@pytest.mark.parametrize(
    ("outer", "text", "tied"),
    [(True, False, True), (False, True, True), (True, None, True), (None, None, False)],
)
def test_tied_when_either_object_says_so(outer, text, tied):
    def change(o, t):
        o["tie_word_embeddings"], t["tie_word_embeddings"] = outer, text

    assert edited(change).tie_word_embeddings is tied


def test_token_ids_lists_and_fallbacks():
    def both(outer, text):
        text["eos_token_id"] = [5, 6, 5]
        outer["bos_token_id"] = text.pop("bos_token_id")

    config = edited(both)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (510, (5, 6), None)

    def override(generation):
        return ModelConfig.from_dict(TINY.to_dict(), generation=generation)

    generation = {"eos_token_id": [1, 2], "pad_token_id": 0, "bos_token_id": None, "top_p": 0.95}
    config = override(generation)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (510, (1, 2), 0)
    assert override({"eos_token_id": 3}).eos_token_ids == (3,)
    assert override({"temperature": 1.0}) == TINY


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda t: t.pop("swiglu_beta"), "swiglu_beta", 1.0),
        (lambda t: t.pop("routed_scaling_factor"), "routed_scaling_factor", 1.0),
        (lambda t: t.pop("use_gemma_norm"), "use_gemma_norm", True),
        (lambda t: t.update(use_gemma_norm=False), "use_gemma_norm", False),
        (lambda t: t.update(use_routing_bias=False), "use_routing_bias", False),
        (lambda t: t.pop("moe_layer_freq"), "moe_layers", (True,) * 4),
        (lambda t: t.update(hidden_act="silu"), "swiglu_limit", 7.0),
        (lambda t: t.pop("hidden_act"), "swiglu_alpha", 1.702),
        (lambda t: t.pop("rotary_dim"), "rotary_dim", 64),
        (lambda t: t.update(partial_rotary_factor=0.5), "rotary_dim", 32),
        (lambda t: t.update(rope_scaling={"type": "default"}), "rotary_dim", 32),
        (lambda t: t.update(rope_theta=10000), "rope_theta", 10000.0),
        (lambda t: t.update(num_experts=8), "num_experts", 8),
        (lambda t: t.update(n_shared_experts=2), "shared_intermediate_size", 512),
        (lambda t: t.update(n_shared_experts=0), "shared_intermediate_size", 256),
        (lambda t: t.update(shared_intermediate_size=0), "shared_intermediate_size", 0),
        (lambda t: t.update(sparse_attention_config=None), "is_m31", False),
        (lambda t: t.pop("sparse_attention_config"), "sparse_layer_ids", ()),
        (lambda t: t.pop("sparse_attention_config"), "page_size", 128),
    ],
)
def test_defaults_and_aliases(change, field, value):
    got = getattr(edited(lambda _, text: change(text)), field)
    assert got == value
    assert type(got) is type(value)


def test_shared_width_from_a_count_alone():
    def change(_, text):
        del text["shared_intermediate_size"]
        text["n_shared_experts"] = 3

    assert edited(change).shared_intermediate_size == 3 * TINY.intermediate_size


@pytest.mark.parametrize(
    ("change", "init", "local"),
    [
        (lambda s: s.update(sparse_init_block=2), 2, 1),
        (lambda s: s.pop("sparse_init_block"), 0, 1),
        (lambda s: s.pop("sparse_local_block"), 0, 1),
        (lambda s: s.update(sparse_local_block=0), 0, 0),
        (lambda s: (s.pop("sparse_init_block"), s.update(sparse_init_tokens=129)), 2, 1),
        (lambda s: (s.pop("sparse_local_block"), s.update(sparse_local_tokens=256)), 0, 2),
        (lambda s: s.update(sparse_init_tokens=0, sparse_local_tokens=1), 0, 1),
        (lambda s: s.pop("sparse_disable_index_value"), 0, 1),
        (lambda s: s.pop("use_sparse_attention"), 0, 1),
    ],
)
def test_forced_blocks(change, init, local):
    config = edited(lambda _, text: change(text["sparse_attention_config"]))
    assert config == dataclasses.replace(TINY, init_blocks=init, local_blocks=local)


def test_use_sparse_attention_false_means_full_attention_everywhere():
    config = edited(
        lambda _, text: text["sparse_attention_config"].update(use_sparse_attention=False)
    )
    assert config.sparse_layers == (False,) * 4
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_keys_that_cannot_matter_are_ignored():
    def change(outer, text):
        outer |= {"image_token_index": 3, "vision_config": {"hidden_size": 9}, "made_up_vision": 1}
        text |= {
            "transformers_version": "5.23.0",
            "torch_dtype": "bfloat16",
            "_name_or_path": "x",
            "use_cache": True,
            "auto_map": {},
            "tokenizer_class": "T",
            "attention_dropout": 0.0,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "output_router_logits": False,
            "initializer_range": 0.02,
            "num_mtp_modules": 7,
            "mtp_transformer_layers": 1,
            "sliding_window": None,
            "model_type": "minimax_m2",
        }

    assert edited(change) == TINY


def test_from_dir(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    assert ModelConfig.from_dir(tmp_path) == TINY
    assert ModelConfig.from_dir(str(tmp_path)) == TINY
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    quant = {"quantization": {"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    config = ModelConfig.from_dir(tmp_path)
    assert config.eos_token_ids == (7, 8)
    assert config.quantization == Quantization("mxfp8", "mxfp8", ("lm_head",))


def test_reading_leaves_its_input_alone():
    raw = dataclasses.replace(TINY, quantization=FORMATS["nvfp4"]).to_dict()
    before = copy.deepcopy(raw)
    ModelConfig.from_dict(raw)
    assert raw == before


ODD = dataclasses.replace(
    TINY,
    routed_scaling_factor=3.0,
    use_routing_bias=False,
    swiglu_alpha=1.5,
    swiglu_limit=5.0,
    swiglu_beta=0.5,
    use_gemma_norm=False,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    init_blocks=1,
    local_blocks=2,
    index_head_dim=96,
)
"""No field at its default."""


def neighbours(value: Any) -> list[Any]:
    """Other values of a scalar field, of which at least one is valid."""
    if isinstance(value, bool):
        return [not value]
    return [2 * value, value - 1, value + 1]


SCALARS = [f.name for f in dataclasses.fields(ModelConfig) if f.type in (int, float, bool)]


HEADS = ("num_kv_heads", "index_num_heads")  # they must be equal


@pytest.mark.parametrize("field", sorted({*SCALARS} - {"num_layers"}))
def test_every_scalar_is_written_and_read(field):
    """A field that `to_dict` drops or `from_dict` does not read would come back as a default."""
    fields = HEADS if field in HEADS else (field,)
    for value in neighbours(getattr(ODD, field)):
        try:
            changed = dataclasses.replace(ODD, **dict.fromkeys(fields, value))
        except ConfigError:
            continue
        assert ModelConfig.from_dict(changed.to_dict()) == changed != ODD
        return
    pytest.fail(f"no valid neighbour of {field}={getattr(ODD, field)}")
