"""What a user installs: built as a release is, put into a fresh environment without extras, and used."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from contract.system import CLI, Process, Served, free_port, played, write_config
from contract.vllm import PlayedVllm
from support.paths import ROOT, TOPS

COPIED = re.compile(r"^COPY (?!--)(.+) (\S+)$", re.MULTILINE)  # what an image is built of is enough to build
MODULES = ("__init__.py", "__main__.py", "cli.py", "py.typed")


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
    program, port = str(fresh / "lightning-proxy"), free_port()
    with played(vllm := PlayedVllm(tmp_path)) as upstream:
        write_config(tmp_path, f"{upstream}/v1", port)
        server = Process(tmp_path, "serve")
        server.argv = [program, *server.argv[len(CLI) :]]
        proxy = Served(f"http://127.0.0.1:{port}", tmp_path, vllm, server=server)
        try:
            proxy.start()
            assert proxy.chat("r1", stream=True).status == 200
            assert proxy.post("/reward", {"rollout_id": "r1", "reward": 1}).status == 200
            command = [program, "--config", str(proxy.config), "rollouts", "list", "--json"]
            listed = subprocess.run(command, capture_output=True, text=True, check=True)
        finally:
            proxy.client.close()
            server.end()
    (rollout,) = json.loads(listed.stdout)["data"]
    assert (rollout["rollout_id"], rollout["reward"], rollout["calls"]) == ("r1", 1, 1)


def test_a_command_that_needs_an_extra_names_it(fresh: Path, tmp_path: Path) -> None:
    for command, extras in (("train", "[train]"), ("vllm", "[vllm]"), ("up", "[vllm]")):
        asked = [str(fresh / "lightning-proxy"), command, "--model", "any"]
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and extras in done.stderr and "Traceback" not in done.stderr
