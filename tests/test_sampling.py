"""Sampling: filters against a plain loop and outside data, noise that depends on nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax import sampling
from m31jax.model.state import SlotSampling
from m31jax.request import MAX_LOGPROBS
from tests.golden import golden_dir

KEEP = jax.jit(sampling.keep_mask)
DRAW = jax.jit(sampling.draw)
NOISE = jax.jit(sampling.gumbel, static_argnames=("purpose", "width"))


def rows(number, /, **fields):
    """Sampling fields of `number` rows; plain sampling at temperature 1 unless given."""
    seed = fields.pop("seed", np.tile(np.array([[0, 7]], np.uint32), (number, 1)))
    plain = dict(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, count=np.arange(number))
    dtypes = dict(top_k=np.int32, count=np.int32)
    arrays = {
        name: jnp.asarray(np.broadcast_to(value, number), dtypes.get(name, np.float32))
        for name, value in (plain | fields).items()
    }
    return SlotSampling(**arrays, seed=jnp.asarray(seed, jnp.uint32))


def keep(logits, top_k=0, top_p=1.0, min_p=0.0):
    """`keep_mask` with the same filters for every row."""
    count = len(logits)
    options = ((top_k, np.int32), (top_p, np.float32), (min_p, np.float32))
    return np.asarray(
        KEEP(np.asarray(logits, np.float32), *(np.full(count, x, dtype) for x, dtype in options))
    )


def kept_by_a_loop(row, top_k, top_p, min_p):
    """(kept ids, distance of the closest decision): one token after the other, in float64."""
    row = np.asarray(row, np.float64)
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    probs = np.exp(row - row.max())
    limit = top_k if top_k > 0 else len(row)
    left = [i for n, i in enumerate(order) if n < limit and (probs[i] >= min_p or n == 0)]
    margin = min(abs(probs[i] - min_p) for i in order[1:]) if min_p else 1.0
    total = sum(probs[i] for i in left)
    kept, before = set(), 0.0
    for n, i in enumerate(left):
        if n == 0 or top_p >= 1 or before < top_p:
            kept.add(i)
        margin = min(margin, abs(before - top_p)) if n > 0 and top_p < 1 else margin
        before += probs[i] / total
    return kept, margin


# Filters.


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.5, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 1000])
def test_filters_together_are_those_of_a_loop(top_k, top_p, min_p):
    logits = np.random.default_rng(0).standard_normal((16, 97)).astype(np.float32) * 3
    got, checked = keep(logits, top_k, top_p, min_p), 0
    for row, mask in zip(logits, got, strict=True):
        want, margin = kept_by_a_loop(row, top_k, top_p, min_p)
        assert mask[row.argmax()]
        if margin > 1e-6:
            assert set(np.flatnonzero(mask)) == want
            checked += 1
    assert checked >= 8


def test_filters_agree_with_an_outside_implementation():
    """Temperature, top-k, then top-p of what is left, renormalised.

    Which of several equal probabilities are kept at a cut depends on the producer's sort: as many
    must be kept, and the two sets may differ in tokens of one value only.
    """
    golden = np.load(golden_dir() / "dspark" / "sampling_filters.npz")
    logits, top_p, top_k = golden["logits"], golden["top_p"], golden["top_k"]
    scaled = logits / golden["temperature"][:, None]
    both = np.asarray(KEEP(scaled, top_k, top_p, np.zeros(len(logits), np.float32)))
    only = np.asarray(KEEP(scaled, 0 * top_k, top_p, np.zeros(len(logits), np.float32)))
    is_equal = []
    for name, masks in (("probs_dflash", both), ("probs_topp_only_sglang", only)):
        for row, mask, probs in zip(scaled, masks, golden[name], strict=True):
            differ = mask ^ (probs > 0)
            assert mask.sum() == (probs > 0).sum()
            assert len(np.unique(row[differ])) <= 1
            is_equal.append(not differ.any())
    assert sum(is_equal) >= 15  # of 20; one row has 40 equal leaders, one is uniform


def test_the_mass_before_a_token_decides():
    """Probabilities 1/2, 1/4, 1/8, 1/8: exact in binary, so that the bound can be met exactly."""
    logits = np.log2([[0.5, 0.25, 0.125, 0.125]]) * np.log(2)
    for top_p, count in ((0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.875, 3), (0.9, 4)):
        assert keep(logits, top_p=top_p).sum() == count, top_p


def test_the_first_token_always_stays():
    logits = np.random.default_rng(1).standard_normal((4, 33))
    logits[1] = 0
    logits[2, 5] = 1e4
    for options in (dict(top_p=1e-30), dict(top_k=1), dict(min_p=1.0), dict(top_p=0.0)):
        mask = keep(logits, **options)
        assert mask[range(4), logits.argmax(axis=1)].all()
    assert keep(logits, top_p=1e-30).sum(axis=1).tolist() == [1] * 4


def test_ties_stay_in_order_of_their_ids():
    logits = np.zeros((1, 10))
    logits[0, [2, 5, 7]] = 1
    assert np.flatnonzero(keep(logits, top_k=2)[0]).tolist() == [2, 5]
    assert np.flatnonzero(keep(logits, top_k=4)[0]).tolist() == [0, 2, 5, 7]
    assert np.flatnonzero(keep(np.zeros((1, 10)), top_p=0.35)[0]).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("options", [dict(), dict(top_k=0, top_p=1.0, min_p=0.0), dict(top_k=500)])
def test_filters_that_are_off_keep_everything(options):
    logits = np.random.default_rng(2).standard_normal((3, 200)) * 30
    assert keep(logits, **options).all()


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_the_kept_set_does_not_depend_on_the_order_of_the_vocabulary(top_p):
    """Masses are integers, so no order of addition changes a sum: also with a long flat tail."""
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((4, 5000)).astype(np.float32) * np.float32([[0.01], [1], [3], [8]])
    want = keep(logits, top_p=top_p)
    for _ in range(3):
        order = rng.permutation(5000)
        got = keep(logits[:, order], top_p=top_p)
        # equal values may swap places at the cut; nothing else may
        for row in range(4):
            np.testing.assert_array_equal(
                np.sort(logits[row, order][got[row]]), np.sort(logits[row][want[row]])
            )


def test_integer_masses_cover_the_vocabulary():
    """Rounding 200,064 masses of 2^-31 units neither overflows nor loses a share that matters."""
    flat = np.zeros((1, 200_064), np.float32)
    for top_p in (0.25, 0.5, 0.99):
        share = keep(flat, top_p=top_p).mean()
        assert share == pytest.approx(top_p, rel=1e-3)


# Noise and draws.


def test_noise_depends_on_seed_position_and_id_alone():
    seed = np.array([[0, 1], [0, 2], [0, 1], [3, 1]], np.uint32)
    count = np.array([0, 0, 5, 5], np.int32)
    whole = np.asarray(NOISE(seed, count, purpose=0, width=200))
    for width in (8, 199):
        np.testing.assert_array_equal(NOISE(seed, count, purpose=0, width=width), whole[:, :width])
    for order in ([3, 1, 0, 2], [2]):
        part = NOISE(seed[order], count[order], purpose=0, width=200)
        np.testing.assert_array_equal(part, whole[order])
    other = np.asarray(NOISE(seed, count, purpose=1, width=200))
    streams = [*whole, *other]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert (a == b).mean() < 0.01


@pytest.mark.parametrize("word", [0, 0xFF, 0x100, 0x7FFFFFFF, 0xFFFFFE00, 0xFFFFFF00, 0xFFFFFFFF])
def test_noise_is_finite_for_every_word(monkeypatch, word):
    """An infinite noise would emit any token, however unlikely, whenever its word comes up."""
    key_data = jax.random.key_data
    monkeypatch.setattr(jax.random, "key_data", lambda key: jnp.full_like(key_data(key), word))
    noise = sampling.gumbel(np.zeros((1, 2), np.uint32), np.zeros(1, np.int32), 0, 2)
    assert np.isfinite(noise).all()
    assert -4 < float(noise[0, 0]) < 24


def test_noise_is_gumbel():
    """Quantiles of 40,000 values against exp(-exp(-x)); the largest distance is below 1 %."""
    noise = NOISE(np.array([[1, 2]], np.uint32), np.zeros(1, np.int32), purpose=0, width=40_000)
    ordered = np.sort(np.asarray(noise[0], np.float64))
    theory = np.exp(-np.exp(-ordered))
    assert np.abs(theory - (np.arange(40_000) + 0.5) / 40_000).max() < 0.01
    assert len(np.unique(ordered)) > 39_000


LOGITS = np.log(np.array([0.36, 0.22, 0.15, 0.1, 0.07, 0.05, 0.03, 0.02]))
OFF = dict(top_k=0, top_p=1.0, min_p=0.0)
CRITICAL = {1: 10.8, 2: 13.8, 3: 16.3, 4: 18.5, 5: 20.5, 6: 22.5, 7: 24.3}
"""Chi-square that one draw in a thousand exceeds, by degrees of freedom."""


def chi_square(tokens, probs):
    """Statistic of drawn ids against their probabilities, and its degrees of freedom."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any()
    expected = probs[probs > 0] * len(tokens)
    assert expected.min() > 5
    return ((counts[probs > 0] - expected) ** 2 / expected).sum(), len(expected) - 1


@pytest.mark.parametrize(
    "filters",
    [
        dict(),
        dict(temperature=0.7),
        dict(temperature=1.8),
        dict(top_k=3),
        dict(top_p=0.8),
        dict(min_p=0.1),
        dict(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(filters):
    count = 4096
    drawn = DRAW(np.tile(LOGITS.astype(np.float32), (count, 1)), rows(count, **filters))
    scaled = LOGITS / filters.get("temperature", 1.0)
    kept, margin = kept_by_a_loop(scaled, *(filters.get(k, d) for k, d in OFF.items()))
    assert margin > 1e-3
    probs = np.where([i in kept for i in range(8)], np.exp(scaled), 0)
    statistic, freedom = chi_square(np.asarray(drawn.token), probs / probs.sum())
    assert statistic < CRITICAL[freedom]


def test_the_statistic_can_tell():
    """Draws of temperature 1 are not those of temperature 1.2."""
    tokens = np.asarray(DRAW(np.tile(LOGITS.astype(np.float32), (4096, 1)), rows(4096)).token)
    probs = np.exp(LOGITS / 1.2)
    statistic, freedom = chi_square(tokens, probs / probs.sum())
    assert statistic > CRITICAL[freedom]


def test_draws_of_successive_positions_are_independent():
    """Pairs of neighbouring draws fill the 2 x 2 table of a fair coin."""
    tokens = np.asarray(DRAW(np.zeros((4096, 2), np.float32), rows(4096)).token)
    statistic, _ = chi_square(tokens[::2] * 2 + tokens[1::2], np.full(4, 0.25))
    assert statistic < CRITICAL[3]


def test_a_row_draws_the_same_token_in_any_company():
    """Slot, neighbours and their filters, and the number of rows change nothing."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((19, 300)).astype(np.float32) * 2
    fields = dict(
        temperature=rng.uniform(0.2, 2, 19),
        top_p=rng.uniform(0.3, 1, 19),
        top_k=rng.integers(0, 50, 19),
        min_p=rng.uniform(0, 0.1, 19),
        count=rng.integers(0, 1000, 19),
        seed=rng.integers(0, 2**32, (19, 2), np.uint32),
    )
    whole = DRAW(logits, rows(19, **fields))
    for order in ([4], rng.permutation(19)):
        part = DRAW(logits[order], rows(len(order), **{k: v[order] for k, v in fields.items()}))
        for got, want in zip(part, whole, strict=True):
            np.testing.assert_array_equal(got, np.asarray(want)[order])


def test_greedy_rows_take_the_lowest_id_among_equals():
    logits = np.zeros((6, 64), np.float32)
    logits[:, [7, 20, 63]] = 3
    logits[1] = 0
    logits[2, 3] = logits[2, 9] = np.float32(5)
    fields = dict(temperature=[0, 0, 0, 1e-5, 1, 2], top_k=[0, 0, 0, 0, 1, 1])
    drawn = DRAW(logits, rows(6, **fields))
    assert drawn.token.tolist() == [7, 0, 3, 7, 7, 7]
    assert drawn.token.dtype == jnp.int32
    assert np.asarray(sampling.is_greedy(rows(6, **fields))).all()
    assert not np.asarray(sampling.is_greedy(rows(2, top_k=[0, 2]))).any()


def test_greedy_ignores_the_noise_and_the_filters():
    logits = np.random.default_rng(6).standard_normal((6, 64)).astype(np.float32)
    drawn = DRAW(logits, rows(6, temperature=0.0, top_p=0.1, min_p=0.9))
    assert drawn.token.tolist() == logits.argmax(axis=1).tolist()


def test_log_probabilities_are_of_the_raw_logits():
    """Before temperature and filters, also of a token that a filter leaves alone."""
    logits = np.random.default_rng(7).standard_normal((6, 64)).astype(np.float32) * 3
    drawn = DRAW(logits, rows(6, temperature=1.7, top_k=2))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(drawn.logprob, exact[range(6), drawn.token], atol=1e-5)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(drawn.top_ids, order)
    np.testing.assert_allclose(
        drawn.top_logprobs, np.take_along_axis(exact, order, axis=1), atol=1e-5
    )


def test_a_small_vocabulary_lists_all_of_it():
    drawn = DRAW(np.tile(LOGITS.astype(np.float32), (4096, 1)), rows(4096))
    assert drawn.top_ids[:3].tolist() == [list(range(8))] * 3


def test_teeth_of_the_loop():
    """The loop tells a filter that is applied in another order, or not renormalised."""
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept_by_a_loop(row, 2, 0.5, 0.0)[0] == {0}  # 0.4 / 0.7 > 0.5: only after top-k
    assert kept_by_a_loop(row, 0, 0.5, 0.0)[0] == {0, 1}
    mask = functools.partial(keep, row[None])
    assert mask(top_k=2, top_p=0.5).sum() == 1
    assert mask(top_p=0.5).sum() == 2
