"""After warm_up nothing compiles, whatever the load; what does is counted and named."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import monitoring

from m31jax import SamplingParams, compiles
from tests import engines


def engine():
    return engines.mini(max_seq_len=128)


def random_load(seed: int) -> None:
    """Requests of all lengths and kinds on more slots than there are; some are cut off."""
    rng = np.random.default_rng(seed)
    prompts, params = [], []
    for i in range(24):
        length = int(rng.integers(1, 120))
        prompts.append(engines.prompt(length, seed=i))
        one = SamplingParams(max_tokens=int(rng.integers(1, 129 - length)), seed=i)
        one = replace(one, temperature=float(rng.choice([0, 0.3, 1, 2])), n=int(rng.integers(1, 3)))
        if rng.random() < 0.5:
            one = replace(one, top_p=0.8, top_k=int(rng.integers(0, 9)), min_p=0.05)
        if rng.random() < 0.3:
            one = replace(one, logprobs=int(rng.integers(0, 21)), stop_token_ids=[3, 4])
        params.append(one)
    cut = [engine().stream(engines.prompt(100 - 9 * i), SamplingParams()) for i in range(4)]
    for count, stream in enumerate(cut):
        for _ in range(count):
            next(stream)
    engine().generate(prompts, params, progress=False)
    for stream in cut:
        stream.close()
    engine().generate(prompts[:1], params[:1])


def test_a_random_load_compiles_nothing():
    variants = engine().warm_up()
    assert variants == 4  # one decode width greedy and not, two prefill widths; one page bucket
    random_load(0)
    random_load(1)
    assert engine().late_compiles == ()


def test_a_late_compile_is_counted_once_and_named():
    engine().warm_up()

    def a_shape_nobody_warmed(x):
        return x * 3 + 1

    late = jax.jit(a_shape_nobody_warmed)
    x = np.arange(7717, dtype=np.float32)
    late(x)
    late(x)
    assert len(engine().late_compiles) == 1
    assert "a_shape_nobody_warmed" in engine().late_compiles[0]
    jnp.multiply(np.zeros(7727, np.float32), np.zeros(7727, np.float32))  # eager
    assert len(engine().late_compiles) == 2
    assert "multiply" in engine().late_compiles[1]
    engine().warm_up()
    assert engine().late_compiles == ()


def test_before_warm_up_nothing_is_late():
    assert engines.mini(max_seq_len=96).late_compiles == ()


def test_the_counter_listens_to_the_events_of_jax():
    """No step of the engine reports to it: any compilation in the process is seen."""
    counter = compiles.counter()
    assert compiles.counter() is counter
    before = counter.count
    monitoring.record_event_duration_secs(
        "/jax/core/compile/backend_compile_duration", 0.5, fun_name="told"
    )
    monitoring.record_event_duration_secs("/jax/other/event", 0.5, fun_name="not this")
    assert counter.names_since(before) == ("told",)
