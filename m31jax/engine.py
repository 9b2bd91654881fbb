"""Engine: one model's parameters, state and compiled steps. Load, generate, score, pure steps."""

import dataclasses
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from sharding import mesh as meshes

from . import compiles, observe, text
from .checkpoint import loader
from .deployment import Deployment
from .errors import RequestError, TargetError
from .finish import Finish, Step
from .model.decoder import Decoder
from .model.state import DecodeState
from .ops.op import ROW_TILE
from .request import Completion, Request, SamplingParams, TokenLogprob, Usage
from .runner import DRAWING, SUPPORTED, Delivery, Runner, Timing, prefill_buckets, slot_sampling
from .sampling import Drawn
from .scheduler import Scheduler
from .steps import Prefix, Steps, page_buckets

Prompt = str | Sequence[int]


class Engine:
    """One loaded model. Make it with `Engine.load`; one thread at a time may use it.

    Attributes:
      config, target, numerics: the checkpoint, the machine, the number formats.
      params: the sharded parameters, a pytree; the first argument of the pure steps.
      tokenizer: None when the directory has no tokenizer files.
      memory: the plan that fixed slots, pages and the longest context.
      deployment: all that was decided before weights were read.
    """

    def __init__(
        self,
        deployment: Deployment,
        mesh: Mesh,
        leaves: dict[str, Array],
        tokenizer: text.Tokenizer | None,
    ) -> None:
        config, target, memory = deployment.config, deployment.target, deployment.memory
        self.config, self.target, self.numerics = config, target, deployment.numerics
        self.memory, self.mesh, self.tokenizer = memory, mesh, tokenizer
        self.deployment = deployment
        graph, self.params = nnx.split(Decoder(config, target, self.numerics, leaves))
        specs = jax.tree.map(lambda a: a.sharding.spec, self.params)
        self.steps = Steps(graph, specs, mesh, memory.spec)
        spec = memory.spec
        self.scheduler = Scheduler(
            spec.slots,
            spec.num_pages,
            config.page_size,
            memory.max_seq_len,
            deployment.prefill_chunk,
        )
        rows = -(-spec.slots // ROW_TILE) * ROW_TILE
        decode_rows = sorted({r for r in target.row_buckets if r < rows} | {rows})
        self._prefill_rows = prefill_buckets(deployment.prefill_chunk, ROW_TILE)
        self.runner = Runner(
            self.steps, self.params, self.scheduler, self._prefill_rows, decode_rows
        )
        self.scratch: dict[int, Steps] = {}
        self._inbox: dict[str, list[Delivery]] = {}
        self._compiled_by_warm_up: int | None = None

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        tp: int = 1,
        target: str | None = None,
        mesh: Mesh | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        index_dtype: str | None = None,
        activation_quant: str | None = None,
        drafter: str | Path | None = "auto",
        draft_tokens: int | None = None,
        max_slots: int = 8,
        max_seq_len: int | None = None,
        num_pages: int | None = None,
        prefill_chunk: int | None = None,
        progress: bool = True,
    ) -> "Engine":
        """Load a checkpoint directory.

        Args:
          model_dir: Hugging Face layout, an Orbax conversion, or `tiny`, the bundled one.
          tp: tensor-parallel width. target: its name; None chooses by this machine.
          mesh: of one axis "tp"; None takes the first `tp` devices.
          dtype: float32 or bfloat16. kv_dtype, index_dtype: f32, bf16, fp8 or nvfp4.
          activation_quant: vendor or none.
          drafter, draft_tokens: this build has no drafter; a `dspark/` folder needs `drafter=None`.
          max_slots: requests that decode at once.
          max_seq_len: longest context in tokens. num_pages: of the pool, the guard included.
          prefill_chunk: most prompt tokens of one step.
          progress: bars on stderr.
        Raises:
          ConfigError, CheckpointError, TargetError: nothing stays allocated.
        """
        deployment = Deployment.resolve(
            model_dir,
            tp=tp,
            target=target,
            dtype=dtype,
            kv_dtype=kv_dtype,
            index_dtype=index_dtype,
            activation_quant=activation_quant,
            drafter=drafter,
            draft_tokens=draft_tokens,
            max_slots=max_slots,
            max_seq_len=max_seq_len,
            num_pages=num_pages,
            prefill_chunk=prefill_chunk,
        )
        path, config = deployment.path, deployment.config
        tokenizer = text.Tokenizer.from_dir(path)
        if tokenizer is not None:
            tokenizer.check_vocab_size(config.vocab_size)
        if mesh is None:
            mesh = device_mesh(tp)
        elif mesh.shape.get(meshes.TP) != tp:
            raise TargetError(f"mesh {dict(mesh.shape)} has no axis tp of size tp={tp}")
        compiles.counter()
        leaves = loader.load(path, config, mesh, dtype=deployment.numerics.dtype, progress=progress)
        return cls(deployment, mesh, leaves, tokenizer)

    # Completions

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Complete every prompt; more prompts than slots take turns.

        Args:
          prompts: token ids, or text if there is a tokenizer.
          params: one for all, or one per prompt.
          progress: a bar on stderr when there is more than one prompt.
        Returns:
          `n` completions per prompt, in prompt order.
        Raises:
          RequestError: any prompt or field that cannot be served; then none has run.
        """
        requests = self._requests(prompts, params)
        before = dataclasses.replace(self.runner.timing)
        done: dict[str, Completion] = {}
        parts: dict[str, list[Delivery]] = {r.request_id: [] for r in requests}
        self._add_all(requests)
        is_shown = progress and len(requests) > 1
        try:
            with tqdm(
                total=len(requests), desc="generate", file=sys.stderr, disable=not is_shown
            ) as bar:
                while len(done) < len(requests):
                    self._pump()
                    for request in requests:
                        new = self._inbox.get(request.request_id)
                        if not new:
                            continue
                        parts[request.request_id] += new
                        new.clear()
                        if parts[request.request_id][-1].progress.step.finish_reason is not None:
                            done[request.request_id] = _completion(
                                request, parts[request.request_id]
                            )
                            del self._inbox[request.request_id]
                            bar.update()
        finally:
            self._forget(requests)
        stats = _stats(before, self.runner.timing)
        for completion in done.values():
            completion.stats = stats
        return [done[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Step]:
        """The tokens of one completion as they come; closing the iterator ends the request.

        Raises:
          RequestError: at once, not at the first piece.
        """
        requests = self._requests([prompt], params)
        if len(requests) != 1:
            raise RequestError(f"n={len(requests)} samples cannot be streamed as one; use n=1")
        self._add_all(requests)
        pieces = self._stream(requests[0])
        next(pieces)  # enters its `try`: closed before the first piece, it still ends the request
        return pieces

    def _stream(self, request: Request) -> Iterator[Step]:
        try:
            yield Step((), "")
            while True:
                for delivery in self._inbox[request.request_id]:
                    yield delivery.progress.step
                    if delivery.progress.step.finish_reason is not None:
                        return
                self._inbox[request.request_id].clear()
                self._pump()
        finally:
            self._forget([request])

    def _pump(self) -> None:
        """One step of the runner; what it brought goes to each request's inbox."""
        for delivery in self.runner.step() or ():
            inbox = self._inbox.get(delivery.progress.request.request_id)
            if inbox is not None:
                inbox.append(delivery)

    def _add_all(self, requests: Sequence[Request]) -> None:
        added: list[Request] = []
        try:
            for request in requests:
                tokenizer = self.tokenizer
                detokenizer = None if tokenizer is None else text.Detokenizer(tokenizer)
                self.runner.add(
                    request, Finish(request.params, self.config.eos_token_ids, detokenizer)
                )
                self._inbox[request.request_id] = []
                added.append(request)
        except RequestError:
            self._forget(added)
            raise

    def _forget(self, requests: Sequence[Request]) -> None:
        """End what still runs of these requests and drop their inboxes."""
        for request in requests:
            self.runner.abort(request.request_id)
            self._inbox.pop(request.request_id, None)

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        if isinstance(prompts, str):
            raise RequestError("prompts is a str; pass a list of prompts")
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise RequestError(f"{len(params)} params for {len(prompts)} prompts; pass one of each")
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            ids = self.encode(prompt)
            for sample in range(one.n):
                name = uuid.uuid4().hex
                request = Request(name, ids, one, sample)  # pyright: ignore[reportArgumentType]
                request.validate_for(
                    self.config,
                    self.memory.max_seq_len,
                    self.tokenizer is not None,
                    SUPPORTED,
                )
                requests.append(request)
        return requests

    def encode(self, prompt: Prompt) -> Sequence[int]:
        """Token ids of a prompt; RequestError for text without a tokenizer."""
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise RequestError(
                "the prompt is text and this model directory has no tokenizer.json; pass token ids "
                "(--prompt-ids), or add the tokenizer files"
            )
        return self.tokenizer.encode(prompt)

    # Whole passes

    def score(self, ids: Sequence[int]) -> np.ndarray:
        """Target logits at every position, float32 [T, V]. No sampling; no request is touched."""
        return observe.score(self, ids)

    def trace(self, ids: Sequence[int]) -> dict[str, np.ndarray]:
        """One forward pass, layer by layer, as numpy arrays.

        Returns:
          hidden [L+1, T, D]; attn_out, mlp_out [L, T, D]; block_table int32 [Ls, I, T, U],
          ascending, then -1; router_ids, router_weights [Lm, T, X]; logits [T, V].
        """
        return observe.trace(self, ids)

    # The machine

    def warm_up(self) -> int:
        """Compile every bucket; returns the number of variants. Later compiles count as late."""
        variants = self.runner.warm_up()
        self._compiled_by_warm_up = compiles.counter().count
        return variants

    @property
    def late_compiles(self) -> tuple[str, ...]:
        """Functions that this process compiled after `warm_up`; empty before it."""
        if self._compiled_by_warm_up is None:
            return ()
        return compiles.counter().names_since(self._compiled_by_warm_up)

    def explain(self) -> dict[str, Any]:
        """Target, implementations, switches, number formats, buckets and the memory plan."""
        return self.deployment.explain()

    # Pure functions for a loop of one's own. State is donated: use the returned one.

    def init_state(self) -> DecodeState:
        """A state in which every slot owns pages for the longest context.

        Raises:
          TargetError: the pool is too small for that; names the sizes that fit.
        """
        spec = self.memory.spec
        needed = 1 + spec.slots * spec.pages_per_slot
        if spec.num_pages < needed:
            raise TargetError(
                f"{spec.slots} slots of {spec.max_seq_len} tokens need num_pages={needed}, the "
                f"pool has {spec.num_pages}; load with a smaller max_seq_len or max_slots, or use "
                "generate"
            )
        state = self.steps.init_state()
        table = np.arange(1, needed, dtype=np.int32).reshape(spec.slots, spec.pages_per_slot)
        placed = jax.device_put(table, state.page_table.sharding)
        return dataclasses.replace(state, page_table=placed)

    def prefill(
        self,
        params: Any,
        state: DecodeState,
        slot: int,
        ids: Sequence[int],
        sampling: SamplingParams | None = None,
    ) -> tuple[DecodeState, Array]:
        """Run a whole prompt in one slot; (state, the first token, int32 scalar).

        `sampling` None is greedy. The prompt is cut into chunks and padded to buckets inside.

        Raises:
          RequestError: a bad prompt or slot, or a sampling field beside those that choose a token
            (`max_tokens` is passed over: the caller's loop decides where to end).
        """
        asked = sampling or SamplingParams(temperature=0.0)
        unused = sorted(set(asked.non_default_fields()) - DRAWING - {"max_tokens"})
        if unused:
            raise RequestError(
                f"{', '.join(unused)}: prefill and step only draw tokens; leave it out and apply "
                "it in your own loop, or use generate"
            )
        asked = dataclasses.replace(asked, max_tokens=1)
        request = Request("prefill", ids, asked)  # pyright: ignore[reportArgumentType]
        request.validate_for(self.config, self.memory.max_seq_len, True, SUPPORTED)
        slot = self._slot(slot)
        row = state.page_table[slot]
        state = self.steps.admit(state, np.int32(slot), row, slot_sampling(request.params))
        drawn = None
        for start, chunk, count in observe.chunks(request.prompt_ids, self._prefill_rows):
            end = start + count
            state, drawn = self.steps.prefill(
                params,
                state,
                np.int32(slot),
                chunk,
                np.int32(start),
                np.int32(count),
                np.bool_(end == len(request.prompt_ids)),
                pages=self.page_bucket(end),
            )
        assert drawn is not None
        return state, drawn.token[0]

    def step(
        self,
        params: Any,
        state: DecodeState,
        *,
        context: int | None = None,
        is_greedy: bool = False,
    ) -> tuple[DecodeState, Drawn]:
        """One token for every active slot; row b of the result is slot b's.

        Args:
          context: no slot is longer than this many tokens; None: the longest possible.
          is_greedy: every active slot is greedy, so a smaller step gives the same tokens.
        """
        spec = self.memory.spec
        rows = -(-spec.slots // ROW_TILE) * ROW_TILE
        slots = np.full(rows, -1, np.int32)
        slots[: spec.slots] = np.arange(spec.slots)
        pages = spec.pages_per_slot if context is None else self.page_bucket(context + 1)
        return self.steps.decode(params, state, slots, pages=pages, is_greedy=is_greedy)

    def free(self, state: DecodeState, slot: int) -> DecodeState:
        """The state with one slot empty; its pages stay its own."""
        return self.steps.free(state, np.int32(self._slot(slot)))

    def extract(self, state: DecodeState, slot: int) -> Prefix:
        """Every lane of one slot, detached. Waits for the slot's length."""
        length = int(state.lengths[self._slot(slot)])
        return self.steps.extract(state, np.int32(slot), pages=self.page_bucket(length + 1))

    def insert(self, state: DecodeState, prefix: Prefix, slot: int) -> DecodeState:
        """Put what `extract` gave into a slot, which then goes on where the other stood."""
        return self.steps.insert(state, prefix, np.int32(self._slot(slot)))

    def page_bucket(self, tokens: int) -> int:
        """Page-table width to compile for a context of `tokens`."""
        spec = self.memory.spec
        needed = min(-(-tokens // self.config.page_size), spec.pages_per_slot)
        return next(width for width in page_buckets(spec.pages_per_slot) if width >= needed)

    def _slot(self, slot: int) -> int:
        if not 0 <= slot < self.memory.spec.slots:
            raise RequestError(f"slot={slot} is not in 0..{self.memory.spec.slots - 1}")
        return slot


def device_mesh(tp: int) -> Mesh:
    """The first `tp` devices; TargetError if there are fewer."""
    try:
        return meshes.make_mesh(tp, jax.devices())
    except ValueError as error:
        raise TargetError(str(error)) from error


def _completion(request: Request, parts: list[Delivery]) -> Completion:
    steps = [part.progress.step for part in parts]
    ids = [token for step in steps for token in step.token_ids]
    logprobs: list[TokenLogprob] | None = None
    if request.params.logprobs is not None:
        logprobs = [entry for part in parts for entry in part.logprobs or ()]
    reason = steps[-1].finish_reason
    assert reason is not None
    return Completion(
        token_ids=ids,
        text="".join(step.text for step in steps),
        finish_reason=reason,
        stop_reason=steps[-1].stop_reason,
        logprobs=logprobs,
        usage=Usage(len(request.prompt_ids), len(ids)),
    )


def _stats(before: Timing, after: Timing) -> dict[str, Any]:
    steps = after.decode_steps - before.decode_steps
    stats: dict[str, Any] = {"steps": steps}
    if steps:
        verify = (after.decode_s - before.decode_s) / steps
        stats["verify_us"] = round(verify * 1e6, 1)
    return stats
