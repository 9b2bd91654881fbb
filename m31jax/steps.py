"""The jitted steps: pure functions of (params, state, rows), under `shard_map`, state donated.

Each function is compiled once per bucket: row count, page-table columns, and whether all rows are
greedy. Below `shard_map` the model sees one shard.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int32

from sharding import collectives
from sharding.mesh import TP

from . import sampling
from .errors import TargetError
from .model import state as states
from .model.attention import Rows
from .model.decoder import Decoder, LayerTrace
from .model.state import DecodeState, SlotSampling, StateSpec
from .sampling import Drawn

FIRST_PAGE_BUCKET = 32


def page_buckets(pages_per_slot: int) -> tuple[int, ...]:
    """Page-table widths to compile: 32, 128, 512, ... up to all columns.

    The width follows the longest live context, never the configured maximum, so a short request
    costs the same on a server that allows a million tokens.
    """
    widths = [FIRST_PAGE_BUCKET]
    while widths[-1] < pages_per_slot:
        widths.append(widths[-1] * 4)
    return (*widths[:-1], pages_per_slot)


class Prefix(NamedTuple):
    """Everything one slot holds, detached: what `extract` gives and `insert` takes.

    Lanes are [L, n, ...] whole pages, in context order.
    """

    lanes: dict[str, Array]
    length: Int32[Array, ""]
    next_token: Int32[Array, ""]
    is_active: Array
    sampling: SlotSampling


class Observed(NamedTuple):
    """Logits of every row of a chunk and, if asked for, what each layer did."""

    logits: Array
    embedded: Array | None
    layers: list[LayerTrace] | None


@dataclass(frozen=True, eq=False)
class Steps:
    """The compiled functions of one engine.

    Attributes:
      graph: of the split Decoder. param_specs: PartitionSpecs, one tree with the parameters.
    """

    graph: nnx.GraphDef[Decoder]
    param_specs: Any
    mesh: Mesh
    spec: StateSpec

    # Public functions. `pages` and `is_greedy` are static and choose the compiled variant.

    @functools.cached_property
    def init_state(self) -> Callable[[], DecodeState]:
        """() -> a zeroed state."""
        shapes, _ = states.abstract(self.spec)
        return jax.jit(
            lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes),
            out_shardings=self._placement,
        )

    @functools.cached_property
    def decode(self) -> Callable[..., tuple[DecodeState, Drawn]]:
        """(params, state, slots int32 [R], *, pages, is_greedy) -> (state, drawn of R rows).

        One token for each listed slot; -1 is padding. An inactive or full slot is left as it is.
        """

        def local(params: Any, state: DecodeState, slots: Array, *, pages: int, is_greedy: bool):
            slot = jnp.maximum(slots, 0)
            is_live = (slots >= 0) & state.is_active[slot]
            is_live &= state.lengths[slot] < self.spec.max_seq_len
            position = jnp.where(is_live, state.lengths[slot], -1)
            rows = Rows(state.next_token[slot], slot, position)
            model = nnx.merge(self.graph, params)
            h, lanes, _ = model(rows, state.lanes, state.page_table[:, :pages])
            drawn = _draw(model.logits(h), _take(state.sampling, slot), is_greedy)
            at = jnp.where(is_live, slot, self.spec.slots)  # out of range: dropped
            counts = state.sampling.count.at[at].add(1, mode="drop")
            state = replace(
                state,
                lanes=lanes,
                lengths=state.lengths.at[at].add(1, mode="drop"),
                next_token=state.next_token.at[at].set(drawn.token, mode="drop"),
                sampling=state.sampling._replace(count=counts),
            )
            return state, drawn

        return self._jit(local, (PartitionSpec(),), ("pages", "is_greedy"))

    @functools.cached_property
    def prefill(self) -> Callable[..., tuple[DecodeState, Drawn]]:
        """(params, state, slot, ids [C], start, count, is_last, *, pages) -> (state, 1 drawn row).

        Appends `count` prompt tokens at positions start.. of `slot`. The token drawn from the last
        of them becomes the slot's next token, and the slot active, if `is_last`.
        """

        def local(
            params: Any,
            state: DecodeState,
            slot: Array,
            ids: Array,
            start: Array,
            count: Array,
            is_last: Array,
            *,
            pages: int,
        ):
            model = nnx.merge(self.graph, params)
            rows = _chunk(slot, ids, start, count)
            h, lanes, _ = model(rows, state.lanes, state.page_table[:, :pages])
            last = jax.lax.dynamic_slice_in_dim(h, jnp.maximum(count, 1) - 1, 1)
            drawn = _draw(model.logits(last), _take(state.sampling, slot[None]), False)
            done = is_last.astype(jnp.int32)
            counts = state.sampling.count.at[slot].add(done)
            token = jnp.where(is_last, drawn.token[0], state.next_token[slot])
            state = replace(
                state,
                lanes=lanes,
                lengths=state.lengths.at[slot].set(start + count),
                next_token=state.next_token.at[slot].set(token),
                is_active=state.is_active.at[slot].set(is_last),
                sampling=state.sampling._replace(count=counts),
            )
            return state, drawn

        return self._jit(local, (PartitionSpec(),) * 5, ("pages",))

    @functools.cached_property
    def observe(self) -> Callable[..., tuple[DecodeState, Observed]]:
        """(params, state, rows, *, pages, is_traced) -> (state with the rows in it, observed).

        The same forward pass as every other step, for any rows, with their logits instead of
        tokens.
        """

        def local(params: Any, state: DecodeState, rows: Rows, *, pages: int, is_traced: bool):
            model = nnx.merge(self.graph, params)
            h, lanes, traces = model(rows, state.lanes, state.page_table[:, :pages])
            logits = collectives.all_gather_last(model.logits(h), TP)
            state = replace(state, lanes=lanes)
            if not is_traced:
                return state, Observed(logits, None, None)
            layers = [_whole(trace) for trace in traces]
            return state, Observed(logits, model.embed(rows.token), layers)

        return self._jit(local, (PartitionSpec(),), ("pages", "is_traced"))

    @functools.cached_property
    def admit(self) -> Callable[..., DecodeState]:
        """(state, slot, page_row [J], the slot's sampling) -> state with it empty and claimed."""

        def admit(state: DecodeState, slot: Array, row: Array, one: SlotSampling) -> DecodeState:
            return replace(
                state,
                page_table=state.page_table.at[slot].set(row),
                lengths=state.lengths.at[slot].set(0),
                next_token=state.next_token.at[slot].set(0),
                is_active=state.is_active.at[slot].set(False),
                sampling=_put(state.sampling, slot, one),
            )

        return self._jit_host(admit)

    @functools.cached_property
    def free(self) -> Callable[..., DecodeState]:
        """(state, slot) -> state with the slot inactive and empty; its page row stays."""

        def free(state: DecodeState, slot: Array) -> DecodeState:
            return replace(
                state,
                lengths=state.lengths.at[slot].set(0),
                is_active=state.is_active.at[slot].set(False),
            )

        return self._jit_host(free)

    @functools.cached_property
    def extract(self) -> Callable[..., Prefix]:
        """(state, slot, *, pages) -> Prefix of the slot's first `pages` pages. Donates nothing."""

        def extract(state: DecodeState, slot: Array, *, pages: int) -> Prefix:
            at = state.page_table[slot, :pages]
            return Prefix(
                {name: lane[:, at] for name, lane in state.lanes.items()},
                state.lengths[slot],
                state.next_token[slot],
                state.is_active[slot],
                _take(state.sampling, slot),
            )

        return jax.jit(extract, static_argnames="pages")

    @functools.cached_property
    def insert(self) -> Callable[..., DecodeState]:
        """(state, prefix, slot) -> state; copies the prefix's pages into those the slot owns."""

        def insert(state: DecodeState, prefix: Prefix, slot: Array) -> DecodeState:
            _check_prefix(prefix, self.spec)
            count = next(iter(prefix.lanes.values())).shape[1]
            at = state.page_table[slot, :count]
            at = jnp.where(at == states.GUARD_PAGE, self.spec.num_pages, at)  # dropped
            lanes = {
                name: lane.at[:, at].set(prefix.lanes[name], mode="drop")
                for name, lane in state.lanes.items()
            }
            return replace(
                state,
                lanes=lanes,
                lengths=state.lengths.at[slot].set(prefix.length),
                next_token=state.next_token.at[slot].set(prefix.next_token),
                is_active=state.is_active.at[slot].set(prefix.is_active),
                sampling=_put(state.sampling, slot, prefix.sampling),
            )

        return self._jit_host(insert)

    @functools.cached_property
    def _placement(self) -> DecodeState:
        _, specs = states.abstract(self.spec)
        return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

    def _jit_host(self, change: Callable[..., DecodeState]) -> Callable[..., DecodeState]:
        """Jit a change of slots that runs no model; the state is donated and stays placed."""
        return jax.jit(change, donate_argnums=0, out_shardings=self._placement)

    def _jit(self, local: Callable[..., Any], rest: tuple, static: tuple[str, ...]) -> Any:
        """Jit `local(params, state, *rest, **static)` under shard_map, the state donated."""
        _, state_specs = states.abstract(self.spec)

        def step(*args: Any, **options: Any):
            return jax.shard_map(
                functools.partial(local, **options),
                mesh=self.mesh,
                in_specs=(self.param_specs, state_specs, *rest),
                out_specs=(state_specs, PartitionSpec()),
                check_vma=False,  # results are equal on all ranks by construction, not by proof
            )(*args)

        return jax.jit(step, static_argnames=static, donate_argnums=1)


def _check_prefix(prefix: Prefix, spec: StateSpec) -> None:
    """TargetError unless the prefix has every lane of this state, each as this state stores it."""
    pages = {lane.shape[1] for lane in prefix.lanes.values()}
    wanted = {
        name: (shape[0], *shape[2:], str(dtype))
        for name, (shape, dtype, _) in states.lane_shapes(spec).items()
    }
    found = {
        name: (lane.shape[0], *lane.shape[2:], str(lane.dtype))
        for name, lane in prefix.lanes.items()
    }
    if found != wanted:
        raise TargetError(
            f"the prefix has lanes {found}, this engine stores {wanted} (layers, one page, dtype); "
            "insert what extract gave on an engine of the same model, formats and tp"
        )
    if len(pages) != 1 or max(pages) > spec.pages_per_slot:
        raise TargetError(
            f"the prefix has {sorted(pages)} pages, a slot of this engine has at most "
            f"{spec.pages_per_slot}; load with a larger max_seq_len, or extract fewer"
        )


def _whole(trace: LayerTrace) -> LayerTrace:
    """A layer's trace with the block tables of all ranks' index heads."""
    if trace.block_table is None:
        return trace
    table = jax.lax.all_gather(trace.block_table, TP, axis=1, tiled=True)
    return trace._replace(block_table=table)


def _chunk(slot: Array, ids: Array, start: Array, count: Array) -> Rows:
    """Rows of `count` prompt tokens of one slot; the rest of the bucket is padding."""
    place = jnp.arange(ids.shape[0], dtype=jnp.int32)
    position = jnp.where(place < count, start + place, -1)
    return Rows(ids, jnp.broadcast_to(slot, ids.shape), position)


def _draw(logits: Array, rows: SlotSampling, is_greedy: bool) -> Drawn:
    """Tokens from this shard's logits: only arg-maxima travel if every row is greedy."""
    if is_greedy:
        token, _ = collectives.argmax_sharded(logits, TP)
        return Drawn(token)
    return sampling.draw(collectives.all_gather_last(logits, TP), rows)


def _take(fields: SlotSampling, slot: Array) -> SlotSampling:
    return SlotSampling(*(field[slot] for field in fields))


def _put(fields: SlotSampling, slot: Array, one: SlotSampling) -> SlotSampling:
    return SlotSampling(*(f.at[slot].set(x) for f, x in zip(fields, one, strict=True)))
