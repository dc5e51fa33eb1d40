"""An agent that prefetches its next prompt while its tool runs, and the time to the first token that this saves.

    vllm serve ... --kv-transfer-config ...                  # with agent_listen and agent_token, see docs/agent-api.md
    python examples/agent_prefetch.py --token TOKEN
    python examples/agent_prefetch.py --token TOKEN --others 6   # as many prompts of others in each turn

Each turn the model is asked about a long text, a tool runs, and its answer is added to the conversation. What others
ask meanwhile takes the conversation's place in the GPU's cache and in host memory; it stays on disk or in a remote
store. Turns with and without a prefetch alternate, in conversations of their own.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

from openai import OpenAI

from lmkv.agent.client import Client

Messages = list[dict[str, str]]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--agent", default="http://127.0.0.1:8377", help="the agent API: a URL, or unix:/path")
    parser.add_argument("--token", help="agent_token of the server")
    parser.add_argument("--file", type=Path, help="text to ask about; default: Python's help pages")
    parser.add_argument("--characters", type=int, default=24_000, help="how much of it")
    parser.add_argument("--turns", type=int, default=4, help="of each conversation")
    parser.add_argument("--tool-seconds", type=float, default=2.0, help="how long the tool takes at least")
    parser.add_argument("--others", type=int, default=0, help="prompts of others in each turn, before the tool runs")
    return parser.parse_args()


def first_token(llm: OpenAI, model: str, messages: Messages) -> tuple[float, str]:
    """Seconds to the first event of the answer, and the answer."""
    started, seconds, text = time.perf_counter(), 0.0, ""
    stream = llm.chat.completions.create(model=model, messages=messages, max_tokens=8, temperature=0, stream=True)
    for event in stream:
        if event.choices:
            seconds = seconds or time.perf_counter() - started
            text += event.choices[0].delta.content or ""
    return seconds, text


def run_tool(seconds: float) -> str:
    """A tool that takes its time: here, a program that counts its modules."""
    code = f"import sys, time; time.sleep({seconds}); print(len(sys.modules), 'modules')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def ask_as_others(llm: OpenAI, model: str, text: str, count: int, turn: str) -> None:
    """Other users' prompts, each with a beginning of its own."""
    for number in range(count):
        first_token(llm, model, [{"role": "user", "content": f"{turn} {number} {text}"}])


def main() -> None:
    args = arguments()
    llm = OpenAI(base_url=args.base_url, api_key="none")
    model = llm.models.list().data[0].id
    text = (args.file.read_text(errors="replace") if args.file else "\n".join(topics.values()))[: args.characters]
    conversations: dict[str, Messages] = {
        name: [{"role": "user", "content": f"This is the agent {name} prefetch.\n{text}\nWhat is next?"}]
        for name in ("without", "with")
    }
    times: dict[str, list[float]] = {name: [] for name in conversations}
    with Client(args.agent, args.token) as cache, ThreadPoolExecutor() as background:
        for messages in conversations.values():
            messages.append({"role": "assistant", "content": first_token(llm, model, messages)[1]})
        for turn in range(args.turns):
            for name, messages in conversations.items():
                ask_as_others(llm, model, text, args.others, f"{turn} {name}")
                tool = background.submit(run_tool, args.tool_seconds)
                prefetch = background.submit(cache.prefetch, list(messages), wait=60) if name == "with" else None
                messages.append({"role": "user", "content": f"The tool says: {tool.result()}. What is next?"})
                seconds, answer = first_token(llm, model, messages)
                messages.append({"role": "assistant", "content": answer})
                times[name].append(seconds)
                found = f", {prefetch.result()['ready_tokens']:,} tokens prefetched" if prefetch else ""
                print(f"turn {turn + 1} {name:>7}: TTFT {seconds:.3f} s{found}", flush=True)
    without, with_it = (statistics.median(times[name]) for name in ("without", "with"))
    print(f"Median TTFT without prefetch: {without:.3f} s, with: {with_it:.3f} s ({without / with_it:.1f}x faster)")


if __name__ == "__main__":
    main()
