"""A tool-calling agent that prefetches its next prompt while its tool runs, and the time that this saves.

    vllm serve ... --enable-auto-tool-choice --tool-call-parser hermes ...   # with lmkv, see docs/agent-api.md
    python examples/agent_prefetch.py --token TOKEN
    python examples/agent_prefetch.py --token TOKEN --others 6   # as many prompts of others in each turn

Each turn the model calls a tool with a word, the tool searches a folder of programs for it, and its result ends the
next prompt. Meanwhile prompts of others take the conversation's place in the GPU's cache and in host memory; it stays
on disk or in a remote store. Turns with and without a prefetch alternate, in conversations of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from openai import OpenAI

from lmkv.agent.client import Client

WORDS = ["lock", "socket", "thread", "pickle", "signal", "decimal"]
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Count the lines of the programs that have a word.",
        "parameters": {
            "type": "object",
            "properties": {"word": {"type": "string", "enum": WORDS}},
            "required": ["word"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CHOICE = {"type": "function", "function": {"name": "search"}}  # so that any model calls it, each time


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--agent", default="http://127.0.0.1:8377", help="the agent API: a URL, or unix:/path")
    parser.add_argument("--token", help="agent_token of the server")
    parser.add_argument("--file", type=Path, help="text to talk about; default: Python's help pages")
    parser.add_argument("--characters", type=int, default=24_000, help="characters of it")
    parser.add_argument(
        "--folder", type=Path, default=Path(os.__file__).parent, help="folder in which the tool searches"
    )
    parser.add_argument("--turns", type=int, default=4, help="turns of each conversation")
    parser.add_argument("--others", type=int, default=0, help="prompts of others in each turn, before the tool runs")
    parser.add_argument("--wait", action="store_true", help="go on when the prefetch has ended, not when the tool has")
    parser.add_argument(
        "--body", type=json.loads, default={}, help="more fields of each of the agent's requests, as JSON"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON too, in the last line")
    return parser.parse_args()


def search(folder: Path, word: str) -> str:
    """The agent's tool, which takes its time."""
    lines = [line for file in folder.rglob("*.py") for line in file.read_text(errors="replace").splitlines()]
    return f"{sum(word in line for line in lines)} of {len(lines)} lines have {word!r}."


@dataclass
class Agent:
    """A conversation. `prefetches`: it prefetches its next prompt; `waits`: it also waits until that is done."""

    llm: OpenAI
    cache: Client
    model: str
    messages: list[Any]
    prefetches: bool
    waits: bool
    body: dict[str, Any]

    def ask(self) -> tuple[float, str]:
        """Have the model call the tool; returns the seconds to the first token, and the request's id."""
        given: dict[str, Any] = {"tools": [SEARCH], "tool_choice": CHOICE, "max_tokens": 128, "temperature": 0}
        given["extra_body"] = self.body
        started, seconds, request, words = time.perf_counter(), 0.0, "", ""
        for event in self.llm.chat.completions.create(model=self.model, messages=self.messages, stream=True, **given):
            seconds, request = seconds or time.perf_counter() - started, event.id
            for part in event.choices[0].delta.tool_calls or []:
                words += part.function.arguments or ""
        call = {"id": request, "type": "function", "function": {"name": "search", "arguments": words}}
        self.messages.append({"role": "assistant", "tool_calls": [call]})
        return seconds, request

    def run_tool(self, folder: Path) -> None:
        """Run the tool, and prefetch the beginning of the next prompt meanwhile: the conversation so far."""
        call = self.messages[-1]["tool_calls"][0]
        with ThreadPoolExecutor() as background:
            tool = background.submit(search, folder, json.loads(call["function"]["arguments"])["word"])
            if self.prefetches:
                self.cache.prefetch(self.messages, tools=[SEARCH], id="agent", wait=60 if self.waits else 0)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": tool.result()})

    def turn(self, folder: Path) -> tuple[float, str]:
        """Seconds to the first token after the tool has ended, and from where the prompt was loaded."""
        self.run_tool(folder)
        seconds, request = self.ask()
        if self.prefetches:
            self.cache.cancel("agent")  # What it keeps in host memory may be evicted again.
        found = self.cache.explain(request)["sources"].items()
        return seconds, ", ".join(f"{tokens:,} from {tier}" for tier, tokens in found if tokens) or "none"


def ask_as_others(llm: OpenAI, model: str, text: str, count: int, turn: str) -> None:
    """Other users' prompts, each with a beginning of its own."""
    for number in range(count):
        llm.completions.create(model=model, prompt=f"{turn} {number} {text}", max_tokens=1)


def main() -> None:
    args = arguments()
    llm = OpenAI(base_url=args.base_url, api_key="none")
    model = llm.models.list().data[0].id
    text = (args.file.read_text(errors="replace") if args.file else "\n".join(topics.values()))[: args.characters]
    times: dict[str, list[float]] = {"without": [], "with": []}
    with Client(args.agent, args.token) as cache:
        agents = {}
        for name in times:
            prompt = {"role": "user", "content": f"I am the agent {name} prefetch.\n{text}\nSearch for what is in it."}
            agents[name] = Agent(llm, cache, model, [prompt], name == "with", args.wait, args.body)
            agents[name].ask()
        for number in range(1, args.turns + 1):
            for name, agent in agents.items():
                ask_as_others(llm, model, text, args.others, f"{number} {name}")
                seconds, loaded = agent.turn(args.folder)
                times[name].append(seconds)
                print(f"turn {number} {name:>7}: TTFT {seconds:.3f} s, tokens loaded: {loaded}", flush=True)
    without, with_it = (statistics.median(found) for found in times.values())
    print(f"Median TTFT without prefetch: {without:.3f} s, with: {with_it:.3f} s ({without / with_it:.1f}x faster)")
    if args.json:
        print(json.dumps({"without": without, "with": with_it}))


if __name__ == "__main__":
    main()
