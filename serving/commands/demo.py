"""`m31jax demo`: text from the bundled checkpoint, with nothing to configure."""

import time

import click

from .options import answer_json, json_option, load_engine, say
from .prompts import encode, join_ids

PROMPT = "Tell me a story about a lighthouse."


@click.command("demo", short_help="Generate text, with nothing to configure.")
@click.option("--prompt", default=PROMPT, show_default=True, metavar="TEXT")
@click.option(
    "--max-tokens",
    type=int,
    default=64,
    show_default=True,
    metavar="N",
    help="Most tokens to generate.",
)
@json_option
def command(prompt: str, max_tokens: int, as_json: bool) -> None:
    """Stream a completion of the bundled checkpoint, then print its speed.

    \b
    Examples:
      m31jax demo
      m31jax demo --prompt "Once upon a time" --max-tokens 16 --json
    """
    from m31jax import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    engine = load_engine("tiny", {})
    if engine.tokenizer is None:
        say("no tokenizer is bundled: ids stand for text, and the prompt's bytes for its ids")
        ids = [byte % engine.config.vocab_size for byte in prompt.encode()]
    else:
        ids = encode(engine, prompt, is_raw=False)
    say("compiling ...")
    engine.generate([ids], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))

    tokens: list[int] = []
    pieces: list[str] = []
    finish_reason = None
    start = time.perf_counter()
    for step in engine.stream(ids, params):
        if engine.tokenizer is None:
            piece = ("," if tokens else "") + join_ids(step.token_ids)
        else:
            piece = step.text
        tokens += step.token_ids
        pieces.append(piece)
        finish_reason = step.finish_reason
        if not as_json:
            click.echo(piece, nl=False)
    seconds = time.perf_counter() - start
    speed = len(tokens) / seconds
    if as_json:
        answer_json(
            {
                "prompt_ids": ids,
                "token_ids": tokens,
                "text": "".join(pieces),
                "finish_reason": finish_reason,
                "usage": {"prompt_tokens": len(ids), "completion_tokens": len(tokens)},
                "stats": {"seconds": seconds, "tokens_per_s": speed},
            }
        )
    else:
        click.echo()
        say(f"{len(tokens)} tokens in {seconds:.2f} s, the prompt included: {speed:.1f} tokens/s")
