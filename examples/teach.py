"""A teacher for an example, served as OpenAI's API: `PYTHONPATH=examples/NAME python examples/teach.py PORT TASKS`.

It stands in for a larger model. `teacher.reply` of the example says the next message of a conversation about a task,
which is known by its question; TASKS is the file that holds them.
"""

import argparse
import json
import random
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import teacher

Json = dict[str, Any]


class Teacher(BaseHTTPRequestHandler):
    tasks: list[Json]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        source = random.Random(json.dumps(request["messages"]))  # who asks the same is told the same
        message = {"role": "assistant", "content": None} | teacher.reply(request, self.task_of(request), source)
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        self.respond({"id": "chat", "object": "chat.completion", "created": 0, "model": request["model"],
                      "choices": [choice], "usage": usage})  # fmt: skip

    def do_GET(self) -> None:
        self.respond({"object": "list", "data": [{"id": "teacher", "object": "model"}]})

    def task_of(self, request: Json) -> Json:
        """The task whose question, the longest of all, is in the conversation."""
        text = "\n".join(str(message["content"]) for message in request["messages"])
        return max((task for task in self.tasks if task["question"] in text), key=lambda task: len(task["question"]))

    def respond(self, body: Json) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("tasks", type=Path)
    options = parser.parse_args()
    Teacher.tasks = [json.loads(line) for line in options.tasks.read_text().splitlines()]
    ThreadingHTTPServer(("127.0.0.1", options.port), Teacher).serve_forever()


if __name__ == "__main__":
    main()
