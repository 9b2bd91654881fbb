"""The keys of a `config.json`: what each spelling means, which are ignored, and typed reading.

Released files nest (`sparse_attention_config`), newer writers are flat (`index_*`, `layer_types`,
`rope_parameters`). `merge` turns both into one dictionary under the released names, and refuses a
key that it does not know: an unknown key may change the mathematics, and a model that is computed
slightly wrong still writes fluent text.
"""

import difflib
import math
import reprlib
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from ..errors import ConfigError

MAX_INT = 2**31 - 1  # sizes, positions and token ids are int32 everywhere below


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Keys that the model reads, under their released names.
TEXT_KEYS = _words(
    """vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    intermediate_size dense_intermediate_size shared_intermediate_size n_shared_experts
    num_local_experts num_experts_per_tok moe_layer_freq routed_scaling_factor use_routing_bias
    swiglu_alpha swiglu_limit swiglu_beta use_gemma_norm rms_norm_eps rope_theta rotary_dim
    partial_rotary_factor max_position_embeddings"""
)
# Keys that may sit beside `text_config` as well as in it.
SHARED_KEYS = _words(
    """bos_token_id eos_token_id pad_token_id tie_word_embeddings quantization_config"""
)
SPARSE_KEYS = _words(
    """use_sparse_attention sparse_attention_freq sparse_num_index_heads sparse_index_dim
    sparse_block_size sparse_topk_blocks sparse_local_block sparse_local_tokens sparse_init_block
    sparse_init_tokens sparse_score_type sparse_disable_index_value"""
)
ROPE_KEYS = {
    "rope_type": "rope_type",
    "type": "rope_type",
    "rope_theta": "rope_theta",
    "partial_rotary_factor": "partial_rotary_factor",
}
FLAT_TO_RELEASED = {
    "num_experts": "num_local_experts",
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
}
# Flat per-layer lists of words: the released key, and the 0 or 1 that each word stands for.
WORD_LISTS = {
    "mlp_layer_types": ("moe_layer_freq", {"dense": 0, "sparse": 1}),
    "layer_types": ("sparse_attention_freq", {"full_attention": 0, "minimax_m3_sparse": 1}),
}
NESTED_KEYS = ("sparse_attention_config", "rope_parameters", "rope_scaling")

# Keys with one supported value. Any other value is a model that this code does not compute.
ONLY: dict[str, tuple[Any, ...]] = {
    "scoring_func": ("sigmoid",),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False,),
    # Flat files say "silu" although the model is clamped SwiGLU, whose two constants are required.
    "hidden_act": ("swigluoai", "silu"),
    "sparse_score_type": ("max",),
    "rope_type": ("default",),
    "norm_topk_prob": (True,),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "n_group": (1,),
    "topk_group": (1,),
    # No value but null.
    "sliding_window": (),
    "attention_chunk_size": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "cross_attention_hidden_size": (),
}

# Keys that cannot change the forward pass of the text model.
IGNORED = _words(
    # identity and bookkeeping
    """architectures model_type dtype torch_dtype transformers_version auto_map tokenizer_class
    name_or_path use_cache return_dict output_hidden_states output_attentions torchscript
    use_bfloat16 tf_legacy_loss tie_encoder_decoder chunk_size_feed_forward finetuning_task
    id2label label2id num_labels problem_type prefix sep_token_id decoder_start_token_id
    task_specific_params is_decoder pretraining_tp use_return_dict"""
    # training only
    """ attention_dropout hidden_dropout dropout router_aux_loss_coef router_jitter_noise
    router_z_loss_coef output_router_logits initializer_range gradient_checkpointing"""
    # next-token-prediction heads are never built, their tensors are skipped
    """ num_mtp_modules num_nextn_predict_layers use_mtp"""
    # sampling defaults that old writers put here instead of generation_config.json
    """ max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens"""
    # vision: kept by writers of text-only files
    """ process_image_mode spatial_merge_size merged_hidden_size num_reward_heads encoder_only"""
)
IGNORED_PREFIXES = ("_", "mtp_", "vision_", "image_", "img_", "video_", "projector_", "multimodal_")

MODEL_KEYS = (
    TEXT_KEYS | ONLY.keys() | FLAT_TO_RELEASED.keys() | WORD_LISTS.keys() | {*NESTED_KEYS}
) - {"rope_type", "sparse_score_type"}
"""Top-level keys of a text object, in either spelling, that say what the model computes."""


_SHORT = reprlib.Repr(maxlevel=2, maxlist=8, maxdict=4, maxstring=80, maxlong=40, maxother=80)


class Entry(NamedTuple):
    """A value and the key under which the file spells it."""

    value: Any
    key: str


def show(value: object) -> str:
    """`repr`, short enough for one line of an error message."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"an integer of {value.bit_length()} bits"
    return "null" if value is None else _SHORT.repr(value)


def same(a: object, b: object) -> bool:
    """Equality in which `true` is not 1."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, bool) == isinstance(b, bool) and a == b


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Puts the file's name in front of every `ConfigError` raised inside."""
    try:
        yield
    except ConfigError as error:
        located = ConfigError(f"{source}: {error}")
        raise located.with_traceback(error.__traceback__) from error.__cause__


def as_object(value: object, name: str) -> dict[str, Any]:
    """`value`, if it is a JSON object."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a JSON object with string keys, got {show(value)}")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for `json.loads` that refuses a key given twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ConfigError(f"key {twice!r} is given twice in one object; keep one of them")
    return result


def refuse_unknown(keys: dict[str, Any], known: Set[str], where: str) -> None:
    """Raises for the first key that is not known, naming its nearest known neighbour."""
    for key in keys:
        if key in known:
            continue
        near = difflib.get_close_matches(key, sorted(known), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "no known key is near."
        raise ConfigError(
            f"unknown key {key!r} = {show(keys[key])} in {where}; {hint} It may change the forward "
            "pass, so it is not ignored; if you know that it does not, delete it from the file"
        )


def merge(text: dict[str, Any]) -> dict[str, Entry]:
    """One dictionary, under released names, of a text object in either spelling.

    Null counts as absent. Raises `ConfigError` for unknown keys, unsupported values of the keys in
    `ONLY`, and two spellings of one thing that disagree.
    """
    plain = {k: v for k, v in text.items() if not k.startswith(IGNORED_PREFIXES)}
    refuse_unknown(plain, MODEL_KEYS | SHARED_KEYS | IGNORED, "the text model's config")
    merged: dict[str, Entry] = {}

    def put(released: str, value: Any, key: str) -> None:
        if value is None:
            return
        old = merged.get(released)
        if old is None:
            merged[released] = Entry(value, key)
        elif not same(old.value, value):
            raise ConfigError(
                f"{old.key}={show(old.value)} and {key}={show(value)} disagree; keep one of them"
            )

    for key, value in plain.items():
        if value is None or key in IGNORED:
            continue
        if key in WORD_LISTS:
            released, words = WORD_LISTS[key]
            put(released, [_word(word, words, key) for word in _list(value, key)], key)
        elif key == "sparse_attention_config":
            inner = as_object(value, key)
            refuse_unknown(inner, SPARSE_KEYS, key)
            for name, item in inner.items():
                put(name, item, f"{key}.{name}")
        elif key in ("rope_parameters", "rope_scaling"):
            inner = as_object(value, key)
            for name in ("rope_type", "type"):  # names the real trouble before its extra keys
                put("rope_type", inner.get(name), f"{key}.{name}")
                _refuse_unsupported(merged, "rope_type")
            refuse_unknown(inner, ROPE_KEYS.keys(), key)
            for name, item in inner.items():
                put(ROPE_KEYS[name], item, f"{key}.{name}")
        else:
            put(FLAT_TO_RELEASED.get(key, key), value, key)
    for released in ONLY:
        _refuse_unsupported(merged, released)
    return merged


def _refuse_unsupported(merged: dict[str, Entry], released: str) -> None:
    entry = merged.get(released)
    if entry is not None and not any(same(entry.value, choice) for choice in ONLY[released]):
        choices = " or ".join(map(show, ONLY[released])) or "null (absent)"
        raise ConfigError(
            f"{entry.key}={show(entry.value)} is not supported, only {choices} is; serve this "
            "checkpoint with an engine that models it"
        )


def _list(value: object, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{key} must be a list with one entry per layer, got {show(value)}")
    return value


def _word(word: object, words: dict[str, int], key: str) -> int:
    if not isinstance(word, str) or word not in words:
        raise ConfigError(f"{key} has the entry {show(word)}; allowed are {', '.join(words)}")
    return words[word]


class Reader:
    """Typed access to merged entries. Every error names the key as the file spells it."""

    def __init__(self, entries: dict[str, Entry]):
        self.entries = entries

    def __contains__(self, key: str) -> bool:
        return key in self.entries

    def spelling(self, key: str) -> str:
        """The key under which the file gives `key`."""
        return self.entries[key].key if key in self.entries else key

    def _get(self, key: str, default: Any, why: str) -> Entry | None:
        if key in self.entries:
            return self.entries[key]
        if default is None:
            raise ConfigError(f"missing key {key!r}; {why or 'add it, it has no default'}")
        return None

    def integer(
        self,
        key: str,
        *,
        low: int = 1,
        high: int = MAX_INT,
        default: int | None = None,
        why: str = "",
    ) -> int:
        """An integer in `low`..`high`; `default` when absent, or an error when that is None."""
        entry = self._get(key, default, why)
        if entry is None:
            assert default is not None
            return default
        return check_integer(entry.value, entry.key, low, high)

    def number(self, key: str, *, default: float | None = None, why: str = "") -> float:
        """A finite float."""
        entry = self._get(key, default, why)
        if entry is None:
            assert default is not None
            return default
        value = entry.value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{entry.key}={show(value)} must be a number")
        if not -1e30 < value < 1e30 or not math.isfinite(value):
            raise ConfigError(f"{entry.key}={show(value)} must be finite and within +-1e30")
        return float(value)

    def positive(self, key: str, *, default: float | None = None, why: str = "") -> float:
        """A finite float above zero."""
        value = self.number(key, default=default, why=why)
        if value <= 0:
            raise ConfigError(f"{self.spelling(key)}={value} must be above 0")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """`true` or `false`; 0 and 1 are refused."""
        entry = self._get(key, default, "")
        if entry is None:
            return default
        if not isinstance(entry.value, bool):
            raise ConfigError(f"{entry.key}={show(entry.value)} must be true or false")
        return entry.value

    def flags(self, key: str, length: int) -> tuple[bool, ...]:
        """One 0 or 1 per layer."""
        value, spelled = self.entries[key]
        for flag in _list(value, spelled):
            if isinstance(flag, bool) or flag not in (0, 1) or not isinstance(flag, int):
                raise ConfigError(f"{spelled} has the entry {show(flag)}; allowed are 0 and 1")
        if len(value) != length:
            raise ConfigError(
                f"{spelled} has {len(value)} entries but num_hidden_layers={length}; give one per "
                "layer"
            )
        return tuple(flag == 1 for flag in value)


def check_integer(value: object, key: str, low: int = 0, high: int = MAX_INT) -> int:
    """`value`, if it is an integer (not a boolean, not 4.0) in `low`..`high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}={show(value)} must be an integer")
    if not low <= value <= high:
        raise ConfigError(f"{key}={show(value)} must lie in {low}..{high}")
    return value
