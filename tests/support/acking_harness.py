"""A harness that notes every answer it has read to its end: what the store may never lose."""

import json
import os
import urllib.request


def call(messages):
    """One streamed call; returns (message id, text)."""
    body = {"model": "m", "max_tokens": 12, "stream": True, "messages": messages}
    request = urllib.request.Request(
        os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
        json.dumps(body).encode(),
        {
            "authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"],
            "content-type": "application/json",
        },
    )
    text, identity, stopped = "", None, False
    with urllib.request.urlopen(request, timeout=60) as response:
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line[5:])
                identity = event["message"]["id"] if event["type"] == "message_start" else identity
                text += (
                    event["delta"].get("text", "") if event["type"] == "content_block_delta" else ""
                )
                stopped |= event["type"] == "message_stop"
    assert stopped
    return identity, text


history = [{"role": "user", "content": "begin"}]
for _ in range(6):
    identity, text = call(history)
    with open(os.environ["ACKS"], "a") as file:
        file.write(identity + "\n")
    history += [{"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]
with open("done.txt", "w") as file:
    file.write("done")
