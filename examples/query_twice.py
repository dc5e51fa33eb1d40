"""Ask a running vLLM server the same long question twice and compare the times to the first token.

    python examples/query_twice.py --base-url http://localhost:8000/v1 --context-tokens 8000

Works with any vLLM server. What answers the second query depends on the server: its own prefix cache as long
as the context is still there, otherwise lmkv. To see lmkv alone, start the server with
`--no-enable-prefix-caching`, or let `--between` other contexts drive this one out.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass

from openai import OpenAI

TOKEN_IDS = range(100, 1000)
"""Ordinary tokens of nearly every vocabulary; as ids, so that a context has exactly the length asked for."""


@dataclass(frozen=True)
class Answer:
    """`cached_tokens` is None unless the server was started with `--enable-prompt-tokens-details`."""

    text: str
    ttft: float
    cached_tokens: int | None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--model", help="default: the server's first")
    parser.add_argument("--context-tokens", type=int, default=8000)
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to generate")
    parser.add_argument("--between", type=int, default=0, help="other contexts to send in between")
    parser.add_argument("--seed", type=int, help="same seed, same contexts; default: new ones each time")
    return parser.parse_args()


def ask(client: OpenAI, model: str, context: list[int], max_tokens: int) -> Answer:
    """Stream the answer; the first token's time is when its text arrives here."""
    started = time.perf_counter()
    ttft, text, cached = None, "", None
    stream = client.completions.create(
        model=model,
        prompt=context,
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            ttft = ttft or time.perf_counter() - started
            text += event.choices[0].text
        if event.usage and event.usage.prompt_tokens_details:
            cached = event.usage.prompt_tokens_details.cached_tokens
    if ttft is None:
        raise RuntimeError("the server sent no token")
    return Answer(text, ttft, cached)


def show(name: str, answer: Answer) -> None:
    known = "" if answer.cached_tokens is None else f", {answer.cached_tokens:,} tokens not computed"
    print(f"{name} TTFT: {answer.ttft:.3f} s{known}", flush=True)


def main() -> None:
    args = arguments()
    client = OpenAI(base_url=args.base_url, api_key=args.api_key)
    model = args.model or client.models.list().data[0].id
    choose = random.Random(args.seed)
    contexts = [choose.choices(TOKEN_IDS, k=args.context_tokens) for _ in range(args.between + 1)]

    cold = ask(client, model, contexts[0], args.max_tokens)
    show("Cold", cold)
    for other in contexts[1:]:
        ask(client, model, other, args.max_tokens)
    warm = ask(client, model, contexts[0], args.max_tokens)
    show("Warm", warm)
    print(f"Speedup (cold / warm): {cold.ttft / warm.ttft:.2f}")
    print(f"Answers are equal: {'yes' if cold.text == warm.text else 'no'}")


if __name__ == "__main__":
    main()
