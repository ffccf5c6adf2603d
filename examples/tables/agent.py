"""A small agent that fills tables of digits; the black-box harness of the demo.

It knows nothing of Gyre: like any client of the Anthropic Messages API it takes ANTHROPIC_BASE_URL
and ANTHROPIC_AUTH_TOKEN from its environment. It reads spec.json in its working directory and works
as coding agents
do: several turns with a tool whose delay is long-tailed, one file delegated to a sub-agent, and a
compaction that replaces the history by the model's own summary.

    cd WORKSPACE && python agent.py

Standard library only, so that it starts quickly. Exit status 1 means the API failed it.
"""

import http.client
import json
import os
import random
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

SYSTEM = "You fill tables."
SUB_AGENT_SYSTEM = "You fill one table."


class Client:
    """One keep-alive connection to the Messages API, always streaming."""

    def __init__(self, base_url, token, max_tokens):
        address = urlsplit(base_url)
        self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=300)
        self.headers = {"content-type": "application/json", "authorization": f"Bearer {token}"}
        self.max_tokens = max_tokens

    def ask(self, system, messages, headers=None):
        """Send the conversation; returns the answer's text, checking that the stream is well
        formed."""
        body = {"model": "policy", "max_tokens": self.max_tokens, "stream": True, "system": system}
        body["messages"] = messages
        self.connection.request(
            "POST", "/v1/messages", json.dumps(body), self.headers | (headers or {})
        )
        response = self.connection.getresponse()
        if response.status != 200:
            sys.exit(f"HTTP {response.status}: {response.read(500).decode(errors='replace')}")
        text, stopped = [], False
        for line in response:
            if not line.startswith(b"data: "):
                continue
            event = json.loads(line[6:])
            if event["type"] == "error":
                sys.exit(f"the stream failed: {event}")
            if event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
                text.append(event["delta"]["text"])
            stopped = stopped or event["type"] == "message_stop"
        if not stopped:
            sys.exit("the stream ended before message_stop")
        return "".join(text)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": [{"type": "text", "text": text}]}


def save(name, text, delay_s):
    """The agent's tool: write a file, taking the time that real tools take."""
    Path(name).write_text(text, encoding="utf-8", errors="replace")
    time.sleep(min(delay_s * random.paretovariate(1.3), 40 * delay_s))
    return f"{name} saved."


def main():
    spec = json.loads(Path("spec.json").read_text())
    client = Client(
        os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_AUTH_TOKEN"], spec["max_tokens"]
    )
    *own, delegated = spec["files"]
    messages, news = [], ""
    for turn, name in enumerate(own):
        if turn == spec["compact_after"]:
            summary = client.ask(
                SYSTEM,
                [*messages, user("Summarise.")],
                {"x-claude-code-request-class": "compaction"},
            )
            messages = [user(f"So far: {summary}"), assistant("Ready.")]
        messages.append(user(f"{news} Write {name}.".strip()))
        answer = client.ask(SYSTEM, messages)
        messages.append(assistant(answer))
        news = save(name, answer, spec["tool_delay_s"])
    answer = client.ask(
        SUB_AGENT_SYSTEM, [user(f"Write {delegated}.")], {"x-claude-code-agent-id": "table-writer"}
    )
    save(delegated, answer, spec["tool_delay_s"])


if __name__ == "__main__":
    main()
