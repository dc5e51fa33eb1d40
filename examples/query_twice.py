"""Ask a running vLLM server the same long question twice and compare the times to the first token.

    python examples/query_twice.py                    # about the manual page of bash
    python examples/query_twice.py --file FILE        # about a text of your own
    python examples/query_twice.py --prefix again     # cold again: a prompt is found by its beginning

The server's own prefix cache answers the second query as long as the prompt is still there, otherwise lmkv does. To
see lmkv alone, start the server with `--no-enable-prefix-caching`, or let `--between` other prompts evict this one. A
server with `--enable-prompt-tokens-details` says how many tokens it did not compute.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

from openai import APIConnectionError, NotFoundError, OpenAI

QUESTION = "Summarize this text in two sentences."


@dataclass(frozen=True)
class Answer:
    """`cached_tokens` is None unless the server was started with `--enable-prompt-tokens-details`."""

    text: str
    ttft: float
    prompt_tokens: int
    cached_tokens: int | None


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base-url", default="http://localhost:8000/v1", help="address of the server's OpenAI API, which ends with /v1"
    )
    parser.add_argument("--file", type=Path, help="text to ask about; default: what `man bash` prints")
    parser.add_argument("--characters", type=int, default=70_000, help="how much of the text to send")
    parser.add_argument("--prefix", default="", help="put before the text")
    parser.add_argument("--max-tokens", type=int, default=100, help="tokens to generate at most")
    parser.add_argument("--between", type=int, default=0, help="other prompts to send in between")
    return parser.parse_args()


def long_text(file: Path | None) -> str:
    """The file, or the manual page of bash, or where that is not installed Python's own help pages."""
    if file:
        return file.read_text(errors="replace")
    page = ""
    if shutil.which("man"):
        page = subprocess.run(["man", "bash"], capture_output=True, text=True, check=False).stdout
    return page or "\n".join(topics.values())


def ask(client: OpenAI, model: str, prompt: str, max_tokens: int) -> Answer:
    """Stream the answer; the time to the first token is when its first event arrives here."""
    started = time.perf_counter()
    ttft, text, usage = None, "", None
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            ttft = ttft or time.perf_counter() - started
            text += event.choices[0].delta.content or ""
        usage = event.usage or usage
    if ttft is None or usage is None:
        raise RuntimeError("the server sent no answer")
    details = usage.prompt_tokens_details
    return Answer(text, ttft, usage.prompt_tokens, details.cached_tokens if details else None)


def show(name: str, answer: Answer) -> None:
    known = "" if answer.cached_tokens is None else f", {answer.cached_tokens:,} tokens not computed"
    print(f"{name} TTFT: {answer.ttft:.3f} s{known}", flush=True)


def main() -> None:
    args = arguments()
    client = OpenAI(base_url=args.base_url, api_key="none")
    try:
        model = client.models.list().data[0].id
    except (APIConnectionError, NotFoundError) as error:
        raise SystemExit(f"{args.base_url} is no OpenAI API ({error}): give --base-url http://HOST:PORT/v1") from None
    prompt = f"{args.prefix}{long_text(args.file)[: args.characters]}\n\n{QUESTION}"

    cold = ask(client, model, prompt, args.max_tokens)
    print(f"{model}, a prompt of {cold.prompt_tokens:,} tokens: {cold.text!r}")
    show("Cold", cold)
    for number in range(args.between):
        ask(client, model, f"{number} {prompt}", 1)
    warm = ask(client, model, prompt, args.max_tokens)
    show("Warm", warm)
    print(f"TTFT improvement: {cold.ttft - warm.ttft:.3f} s ({cold.ttft / warm.ttft:.1f}x faster)")
    print(f"Answers are equal: {'yes' if cold.text == warm.text else 'no'}")


if __name__ == "__main__":
    main()
