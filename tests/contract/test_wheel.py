"""What a user installs: built as a release is, put into a fresh environment without extras, and used."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from contract.system import free_port, served, wait_until
from support.models import save_spelling_model
from support.paths import EXAMPLES, ROOT, TOPS

COPIED = re.compile(r"^COPY (?!--)(.+) (\S+)$", re.MULTILINE)  # what an image is built of is enough to build
MODULES = ("__init__.py", "__main__.py", "cli.py", "py.typed")
FOLDER = Path(__file__).parent
FIVE = (ROOT / "README.md").read_text().partition("## Five steps")[2].partition("\n## ")[0]
STEPS = re.split(r"^\*\*\d\. ", FIVE, flags=re.MULTILINE)[1:]
ADDITION = EXAMPLES / "addition"
MODEL = "~/.cache/lightning-proxy/SmolLM2-135M-Instruct"


def shipped() -> set[str]:
    """Every file of the package, the data that its modules read included."""
    files = [path for top in TOPS for path in (ROOT / top).rglob("*") if path.is_file()]
    files += [path for path in (ROOT / "examples" / "addition").iterdir() if path.suffix in (".jsonl", ".md", ".py")]
    return {*MODULES, *(str(path.relative_to(ROOT)) for path in files if path.suffix != ".pyc")}


def uv(*arguments: str | Path) -> None:
    """The one on PATH, or that of `make setup`, as in the Makefile."""
    program = shutil.which("uv") or Path(sys.prefix) / ".uv" / "bin" / "uv"
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and return the wheel that is built from it."""
    clean, out = tmp_path_factory.mktemp("checkout"), tmp_path_factory.mktemp("dist")
    for sources, target in COPIED.findall((ROOT / "deploy" / "Dockerfile").read_text()):
        for source in map(ROOT.joinpath, sources.split()):
            if source.is_dir():
                shutil.copytree(source, clean / target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, clean / target)
    uv("build", "--quiet", "--out-dir", out, clean)
    (found,) = out.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def fresh(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel and what it requires, without extras."""
    environment = tmp_path_factory.mktemp("fresh") / "venv"
    uv("venv", "--quiet", "--python", sys.executable, environment)
    uv("pip", "install", "--quiet", "--python", environment / "bin" / "python", wheel)
    return environment / "bin"


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    held = {name.removeprefix("lightning_proxy/") for name in names if ".dist-info/" not in name}
    assert held == shipped()


def test_a_fresh_environment_serves_and_records_a_call(fresh: Path, tmp_path: Path) -> None:
    program = str(fresh / "lightning-proxy")
    with served(tmp_path, program=[program]) as proxy:
        assert proxy.chat("r1", stream=True).status == 200
        proxy.reward("r1", 1)
        listing = [program, "--config", str(proxy.config), "rollouts", "list", "--json"]
        listed = subprocess.run(listing, capture_output=True, text=True, check=True)
    (rollout,) = json.loads(listed.stdout)["data"]
    assert (rollout["rollout_id"], rollout["reward"], rollout["calls"]) == ("r1", 1, 1)
    for command, extras in (("train", "[train]"), ("vllm", "[vllm]"), ("up", "[vllm]")):
        done = subprocess.run([program, command, "--model", "any"], cwd=fresh, capture_output=True, text=True)
        assert done.returncode == 1 and extras in done.stderr and "Traceback" not in done.stderr


def commands(step: int) -> list[str]:
    return re.findall(r"^\$ (.+)$", STEPS[step - 1], re.M)


def test_the_agent_that_is_shown_is_the_one_that_runs() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", STEPS[2], re.S)
    assert shown == (ADDITION / "agent.py").read_text()


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_its_steps_train_and_measure_the_base_model_and_the_trained_one(tmp_path: Path) -> None:
    """Their small form: a tiny model, one pass over 8 tasks, two held-out ones."""
    place = tmp_path / "examples" / "addition"
    shutil.copytree(ADDITION, place)
    for name, lines in (("tasks.jsonl", 8), ("held_out.jsonl", 2)):
        kept = (place / name).read_text().splitlines(keepends=True)[:lines]
        (place / name).write_text("".join(kept))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    model, ports = save_spelling_model(tmp_path / "model", letters="0123456789+="), (free_port(), free_port())
    env = os.environ | {
        "LIGHTNING_PROXY__PORT": str(ports[0]), "LIGHTNING_VLLM__PORT": str(ports[1]),
        "LIGHTNING_UPSTREAMS": json.dumps([{"name": "policy", "base_url": f"http://127.0.0.1:{ports[1]}/v1"}]),
        "LIGHTNING_VLLM__MAX_MODEL_LEN": "256", "LIGHTNING_VLLM__KV_CACHE_GIB": "1",
    }  # fmt: skip

    def typed(lines: list[str], log: Path) -> subprocess.Popen[bytes]:
        script = "\n".join(["set -e", ". .venv/bin/activate", *lines]).replace(MODEL, str(model))
        with log.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-c", script], cwd=tmp_path, env=env, stdout=file, stderr=file, start_new_session=True
            )

    def says(text: str, seconds: float) -> None:
        wait_until(lambda: system.poll() is not None or text in first.read_text(), seconds, text)

    def done(*lines: str) -> str:
        assert typed([*lines], second).wait(300) == 0, second.read_text()
        return second.read_text()

    first, second = tmp_path / "first.log", tmp_path / "second.log"
    system = typed(commands(2), first)
    try:
        says("ready: OPENAI_BASE_URL", 480)
        told = done(*(re.sub(r"--repeat \d+", "--repeat 1", line) for line in commands(4)))
        assert re.search(r"^64 rollouts, mean reward 0\.\d+, 0 failed", told, re.M), told
        says("version 1", 300)
        told = done(commands(4)[0], *commands(5))
        for row in ("0", r"live \(1\)"):
            assert re.search(rf"^{row} .* \d+ % \(\d+ to \d+\)", told, re.M), told
    finally:
        os.killpg(system.pid, signal.SIGINT)
        system.wait(60)


def test_each_test_that_the_table_of_promises_names_is_there() -> None:
    lines = [line for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| ")]
    missing = []
    for name, test in re.findall(r"`([\w/]+\.py)::(\w+)`", "\n".join(lines)):
        file = (FOLDER.parent if "/" in name else FOLDER) / name
        if not name.startswith("features/") or file.parent.exists():
            missing += [] if file.exists() and f"def {test}(" in file.read_text() else [f"{name}::{test}"]
    assert missing == []
    bare = [line for line in lines if "::test_" not in line and not line.startswith("| promise ")]
    assert bare == [], "a promise without a test"
