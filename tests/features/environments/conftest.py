"""Working directories with kinds of environments in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.played_kinds import played_kind

GENERATORS = '''
import os, random, subprocess, threading, time
from dataclasses import dataclass

DATASETS = {}
SEEN = b"SECRET" in open("/proc/self/environ", "rb").read()  # as the package is imported

@dataclass
class SumConfig:
    most: int = 1000
    seed: int = 0
    size: int = 500

class Sums:
    __doc__ = "Sees secrets" if SEEN else "Adds two numbers"

    def __init__(self, config):
        self.config = config

    def __len__(self):
        return self.config.size

    def __getitem__(self, index):
        a, b = (self.config.seed + index) % self.config.most, 1
        return {"question": f"{a} + {b}?", "answer": str(a + b), "metadata": {}}

    def score_answer(self, answer, entry):
        if answer == "explode":
            raise RuntimeError("no such score")
        if answer == "sleep":
            child = subprocess.Popen(["sleep", "60"], start_new_session=True)
            print(f"child {child.pid} in {os.getcwd()} ", flush=True)
            time.sleep(60)
        if answer == "thread":
            started = []
            thread = threading.Thread(target=lambda: started.append(subprocess.Popen(["sleep", "60"])))
            thread.start()
            thread.join()
            time.sleep(0.3)
            return float(started[0].poll() is None)
        if answer == "secrets":
            now = b"SECRET" in open("/proc/self/environ", "rb").read()
            return float("SECRET" in str(os.environ)) + SEEN + now
        if answer == "folder":
            return float(len(os.listdir(".")) == 0 and os.environ["HOME"] == os.getcwd())
        return float(answer == entry["answer"])

class Drawn(Sums):
    """Draws words"""

    def __getitem__(self, index):
        word = "".join({*"abcdefghijklmnop"}) + str(random.random())
        return {"question": word, "answer": word, "metadata": {}}

class Slow(Sums):
    """Never ends"""

    def __getitem__(self, index):
        open(__file__ + ".pid", "w").write(str(os.getpid()))
        time.sleep(60)

class Open(Sums):
    """Has many answers"""

    def __getitem__(self, index):
        return super().__getitem__(index) | {"answer": None}

DATASETS["open"] = (Open, SumConfig)
DATASETS["sums"] = (Sums, SumConfig)
DATASETS["drawn"] = (Drawn, SumConfig)
DATASETS["slow"] = (Slow, SumConfig)
'''
REASONING_GYM = {
    "reasoning_gym/factory.py": GENERATORS,
    "reasoning_gym/utils.py": (
        "import re\n"
        "SYSTEM_PROMPTS = {'default': 'Put it into <answer> tags.'}\n"
        "def extract_answer(text):\n"
        "    found = re.findall('<answer>(.*?)</answer>', text)\n"
        "    return found[-1] if found else None\n"
    ),
    "reasoning_gym/__init__.py": (
        "from .factory import DATASETS\n"
        "def create_dataset(name, **settings):\n"
        "    generator, config = DATASETS[name]\n"
        "    return generator(config(**settings))\n"
    ),
}


@pytest.fixture
def generators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working directory with a played reasoning_gym: `sums` asks for a sum, `drawn` for a word."""
    monkeypatch.chdir(tmp_path)
    played_kind("reasoning_gym", REASONING_GYM)
    yield
