"""Kinds of environments with a played package in place of the real one, made without pip."""

from __future__ import annotations

import venv
from collections.abc import Mapping
from pathlib import Path

import tenacity

from lightning_proxy.features.environments.source import KindsEnvironment

# In place of the real one, which takes a second of work to import.
OPENAI = """
import json, types, urllib.request

class OpenAI:
    def __init__(self, *, base_url, api_key, default_headers, http_client):
        self.url = base_url + "/chat/completions"
        self.headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key, **default_headers}
        self.chat = self.completions = self

    def create(self, **body):
        request = urllib.request.Request(self.url, json.dumps(body).encode(), self.headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return json.loads(answer.read(), object_hook=lambda found: types.SimpleNamespace(**found))

class DefaultHttpxClient:
    def __init__(self, trust_env): ...
    def close(self): ...

DefaultAsyncHttpxClient = DefaultHttpxClient
"""
PLAYED = {"openai/__init__.py": OPENAI, "openai/resources.py": ""}


def played_kind(kind: str, modules: Mapping[str, str]) -> None:
    """Make `.venv-environments/KIND` in the working directory. `modules`: the files of the played package.

    The client of OpenAI is played, too; without its folder there, it is the real one.
    """
    made = KindsEnvironment(kind)
    venv.create(made.directory, symlinks=True)
    (packages,) = made.directory.glob("lib/python*/site-packages")
    for name, text in {**PLAYED, **modules}.items():
        path = packages / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (packages / "ours.pth").write_text(str(Path(tenacity.__file__).parents[1]))  # and the real openai
    made.finish()
