"""Files with one value changed, removed or added, in every spelling: read whole, or refused."""

import copy
import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from m31jax.config import ModelConfig, Quantization
from m31jax.errors import ConfigError
from m31jax.presets import FORMATS, TINY
from tests.config_files import text_of, to_flat

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.integers(-(10**50), 10**50)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["NVFP4", "MXFP8", "mxfp8", "modelopt", "dense", "yarn", "experts", "re:["]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
SEEDS = {
    "nested": TINY.to_dict(),
    "nvfp4": dataclasses.replace(TINY, quantization=FORMATS["nvfp4"]).to_dict(),
    "text only": text_of(TINY),
    "flat": to_flat(TINY),
    "modelopt": dataclasses.replace(
        TINY, quantization=Quantization("mxfp8", "nvfp4_modelopt")
    ).to_dict(),
}


def paths(raw: Any, above: tuple = ()) -> list[tuple]:
    """Where every value of a JSON object sits."""
    found = [above] if above else []
    items = (
        raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    )
    for key, value in items:
        found += paths(value, (*above, key))
    return found


@settings(max_examples=1000)
@given(st.sampled_from(sorted(SEEDS)), st.data())
def test_one_mutation_is_read_whole_or_refused(seed, data):
    """A file with one key changed, removed or added: no error but ConfigError, nothing "
    "half-built."""
    raw = copy.deepcopy(SEEDS[seed])
    *way, last = data.draw(st.sampled_from(paths(raw)))
    holder: Any = raw
    for key in way:
        holder = holder[key]
    match data.draw(st.sampled_from(["change", "remove", "add"])):
        case "change":
            holder[last] = data.draw(JUNK)
        case "remove":
            del holder[last]
        case "add" if isinstance(holder, dict):
            holder[data.draw(st.text(max_size=6) | st.just(f"{last}x"))] = data.draw(JUNK)
        case _:
            holder.append(data.draw(JUNK))
    try:
        config = ModelConfig.from_dict(raw)
    except ConfigError:
        return
    check_whole(config)


def check_whole(config: ModelConfig) -> None:
    """Every field has its type, and the value survives a round trip."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in (int, float, bool):
            assert type(value) is field.type, field.name
    assert all(type(flag) is bool for flag in config.moe_layers + config.sparse_layers)
    assert len(config.moe_layers) == len(config.sparse_layers) == config.num_layers
    assert all(type(token) is int for token in config.eos_token_ids)
    assert ModelConfig.from_dict(config.to_dict()) == config
    hash(config)
