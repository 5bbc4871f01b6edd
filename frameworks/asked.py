"""What the programs here are asked: by their arguments, and their environment."""

import json
import os
import sys

QUESTIONS: list[str] = sys.argv[1:]  # of one conversation, in order
API = os.environ.get("API", "responses")  # or chat, of frameworks that have both
STREAM = bool(os.environ.get("STREAM"))
HEADERS: dict[str, str] = json.loads(os.environ.get("HEADERS", "{}"))  # with every request of the agent
