"""Next token from logits: greedy, or drawn with filters and a counter-based random stream.

Noise is a function of (request seed, output position, purpose, token id) and of nothing else: not
of the slot, the step, the batch or the shard. A token is the arg-max of filtered log-probability
plus Gumbel noise, so a drafter that uses the same noise draws the same token from the same
distribution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float32, Int32

from .model.state import SlotSampling
from .ops.op import map_tiles
from .request import GREEDY_TEMPERATURE, MAX_LOGPROBS

MASS_ONE = 2.0**31
"""Top-p adds probabilities as integers of 2^-31, so their sum does not depend on the order."""

PURPOSE_TOKEN = 0
"""Random stream of the emitted token; other purposes get other numbers."""


class Drawn(NamedTuple):
    """Tokens of T rows. Log-probabilities are of the raw logits, before temperature and filters."""

    token: Int32[Array, " T"]
    logprob: Float32[Array, " T"] | None = None
    top_ids: Int32[Array, "T L"] | None = None
    top_logprobs: Float32[Array, "T L"] | None = None


def is_greedy(sampling: SlotSampling) -> Bool[Array, " T"]:
    """Rows that take the arg-max: a temperature too small to divide by, or one candidate."""
    return (sampling.temperature <= GREEDY_TEMPERATURE) | (sampling.top_k == 1)


def keep_mask(
    logits: Float32[Array, "T V"], top_k: Array, top_p: Array, min_p: Array
) -> Bool[Array, "T V"]:
    """Which tokens the filters leave, for logits that are already divided by the temperature.

    Order: min-p, top-k, then top-p on what those left, renormalised. Sorted by (probability
    descending, id ascending), token i stays iff it is among the first `top_k` and the mass strictly
    before it is below `top_p`; the first always stays. `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    """
    width = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    rank = jnp.arange(width)
    limit = jnp.where(top_k <= 0, width, top_k)[:, None]
    likely = ranked >= ranked[:, :1] + jnp.log(min_p)[:, None]  # log(0) = -inf keeps all
    kept = (rank < limit) & (likely | (rank == 0))
    probs = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf), axis=-1)
    mass = jnp.round(probs * MASS_ONE).astype(jnp.uint32)
    before = jnp.cumsum(mass, axis=-1, dtype=jnp.uint32) - mass
    bound = (jnp.minimum(top_p, 1.0) * MASS_ONE).astype(jnp.uint32)[:, None]
    nucleus = (before < bound) & (mass > 0) | (rank == 0)
    kept &= jnp.where(top_p[:, None] >= 1.0, True, nucleus)
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.zeros(logits.shape, bool).at[rows, order].set(kept)


def gumbel(seed: Array, count: Array, purpose: int, width: int) -> Float32[Array, "T V"]:
    """Gumbel noise of T rows for token ids 0..width-1; finite, one value an id."""

    def row(seed: Array, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed), count)
        key = jax.random.fold_in(key, purpose)
        ids = jax.vmap(lambda i: jax.random.key_data(jax.random.fold_in(key, i)))(
            jnp.arange(width, dtype=jnp.uint32)
        )
        # 1 - u in (0, 1): fine where u is near 1, where the largest noise comes from, and never 1.
        below = (ids[:, 0].astype(jnp.float32) + 0.5) * 2.0**-32
        return -jnp.log(-jnp.log1p(-jnp.minimum(below, 1 - 2.0**-24)))

    return jax.vmap(row)(seed, count)


def draw(logits: Float32[Array, "T V"], sampling: SlotSampling) -> Drawn:
    """Draw a token a row from full-width logits, with log-probabilities.

    Args:
      logits: of all token ids; the same bits on every rank.
      sampling: of each row (leading axis T).
    Returns:
      tokens, their log-probabilities and the best `MAX_LOGPROBS` ids with theirs.
    """
    listed = min(MAX_LOGPROBS, logits.shape[-1])

    def tile(logits: Array, *fields: Array) -> Drawn:
        rows = SlotSampling(*fields)
        scaled = logits / jnp.maximum(rows.temperature, GREEDY_TEMPERATURE)[:, None]
        keep = keep_mask(scaled, rows.top_k, rows.top_p, rows.min_p)
        noise = gumbel(rows.seed, rows.count, PURPOSE_TOKEN, logits.shape[-1])
        sampled = jnp.argmax(jnp.where(keep, scaled + noise, -jnp.inf), axis=-1)
        token = jnp.where(is_greedy(rows), jnp.argmax(logits, axis=-1), sampled).astype(jnp.int32)
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        chosen = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
        top, ids = jax.lax.top_k(logprobs, listed)
        return Drawn(token, chosen, ids.astype(jnp.int32), top)

    return map_tiles(tile, logits, *sampling)
