"""moe_route: CELLS against a float64 loop, ties, the bias that only chooses, saturated gates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m31jax.ops import moe_route as op
from tests.ops import checks, loops

STEM = "moe_route"
RUN = jax.jit(op.moe_route, static_argnames=("experts_per_token",))


@checks.cells(STEM)
def test_reference_is_the_formula(cell):
    ids, weights = loops.moe_route(**checks.inputs(STEM, cell))
    out = checks.run(STEM, cell)
    np.testing.assert_array_equal(out.ids, ids)
    loops.close(out.weights, weights, 64)
    assert out.ids.dtype == jnp.int32


@checks.implementations(STEM)
def test_implementation_agrees(cell, impl):
    checks.assert_agrees(STEM, cell, impl)


def _without_bias():
    return RUN(**checks.inputs(STEM, 1) | dict(bias=None))


def _weights_with_bias():
    """The mistake of weighing by what chose."""
    args, right = checks.inputs(STEM, 1), checks.run(STEM, 1)
    scores = jax.nn.sigmoid(args["x"] @ args["router"].T) + args["bias"]
    chosen = jnp.take_along_axis(scores, right.ids, axis=1)
    return right._replace(weights=chosen / chosen.sum(axis=1, keepdims=True))


WRONG = {
    "no bias": _without_bias,
    "bias in the weights": _weights_with_bias,
    "not normalised": lambda: checks.run(STEM, 1)._replace(weights=checks.run(STEM, 1).weights * 2),
    "weights of another order": lambda: checks.run(STEM, 1)._replace(
        weights=checks.run(STEM, 1).weights[:, ::-1]
    ),
    "experts in another order": lambda: checks.run(
        STEM, 1, router=checks.inputs(STEM, 1)["router"][::-1]
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_teeth(wrong):
    checks.assert_teeth(STEM, 1, wrong())


@checks.cells(STEM)
def test_two_runs_agree(cell):
    checks.assert_repeats(STEM, cell)


def test_ties_take_the_lower_expert():
    """Experts 1, 2, 5 and 6 score the same, all above the others."""
    best = np.array([0, 1, 1, 0, 0, 1, 1, 0], np.float32)
    router = jnp.asarray(best[:, None] * np.ones((8, 16), np.float32))
    for count, ids in ((1, [1]), (2, [1, 2]), (3, [1, 2, 5]), (6, [0, 1, 2, 3, 5, 6])):
        out = RUN(jnp.ones((1, 16)), router, None, experts_per_token=count)
        assert out.ids[0].tolist() == ids
    everywhere = RUN(jnp.ones((3, 16)), jnp.zeros((8, 16)), jnp.ones(8), experts_per_token=4)
    assert everywhere.ids.tolist() == [[0, 1, 2, 3]] * 3
    np.testing.assert_array_equal(everywhere.weights, np.full((3, 4), 0.25))


@pytest.mark.parametrize(("logit", "total"), [(-1e4, 0), (-90, 0), (-40, 1), (20, 1), (1e4, 1)])
def test_saturated_gates_give_finite_weights(logit, total):
    """A sum of sigmoids that is 0 in float32 gives weights of 0 rather than 0 / 0."""
    out = RUN(jnp.full((1, 16), float(logit)), jnp.ones((8, 16)) / 16, None, experts_per_token=2)
    assert out.ids[0].tolist() == [0, 1]
    assert float(out.weights.sum()) == pytest.approx(total)


def test_loud_rows_stay_alone():
    x = checks.inputs(STEM, 2)["x"]
    loud, plain = checks.run(STEM, 2, x=x.at[3].set(jnp.nan)), checks.run(STEM, 2)
    others = np.delete(np.arange(len(x)), 3)
    for part, want in zip(loud, plain, strict=True):
        assert checks.same_bits(part[others], want[others])


def test_the_product_is_float32_grade():
    """Two experts a relative 2^-16 apart, which TF32 or bfloat16 operands cannot tell."""
    router = np.ones((4, 256), np.float32)
    router[2] += 2.0**-16
    x = checks.normal(0, 1, 256) ** 2 / 256
    assert RUN(x, jnp.asarray(router), None, experts_per_token=1).ids.tolist() == [[2]]


@checks.row_counts("float32", "bfloat16")
def test_rows_do_not_depend_on_their_number(variant, counts):
    checks.assert_row_counts(
        lambda x, rest: op.moe_route(x, *rest, experts_per_token=3),
        checks.normal(0, checks.ALL_ROWS, 192, dtype=variant),
        [checks.weight(1, 16, 192).data, checks.normal(2, 16)],
        counts,
    )
