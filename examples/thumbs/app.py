"""A chat page whose users' thumbs train the model behind it: the server, which alone talks to the proxy with a key."""

from __future__ import annotations

import json
import os
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

PROXY = os.environ.get("LIGHTNING_URL", "http://127.0.0.1:8080")
KEY = os.environ.get("LIGHTNING_API_KEY", "none")
PORT = int(os.environ.get("PORT", "5000"))
PAGE = Path(__file__).with_name("page.html").read_text().replace("PROXY", PROXY)

conversations: dict[str, list[dict[str, str]]] = {}


def post(path: str, body: Any) -> tuple[Any, Any]:
    """Return the JSON and the headers of the proxy's answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(PROXY + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer), answer.headers


def answer(asked: dict[str, str]) -> dict[str, str]:
    """Let the model answer in a conversation, which is a rollout, and get a key for a thumb on this answer."""
    name = asked["conversation"] if asked["conversation"] in conversations else uuid4().hex
    messages = [*conversations.get(name, ()), {"role": "user", "content": asked["text"]}]
    said, headers = post(f"/rollouts/{name}/v1/chat/completions", {"model": "policy", "messages": messages})
    text = said["choices"][0]["message"]["content"] or ""
    made, _ = post(f"/rollouts/{name}/calls/{headers['X-Call-Id']}/reward-key", {})
    conversations[name] = [*messages, {"role": "assistant", "content": text}]
    return {"conversation": name, "text": text, "key": made["key"]}


class Chat(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(PAGE, "text/html")

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        try:
            self.reply(json.dumps(answer(asked)), "application/json")
        except OSError as error:  # the proxy's own refusals, too
            self.reply(str(error), "text/plain", 502)

    def reply(self, text: str, kind: str, status: int = 200) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with ThreadingHTTPServer(("127.0.0.1", PORT), Chat) as server:
        print(f"http://127.0.0.1:{PORT}")
        server.serve_forever()
