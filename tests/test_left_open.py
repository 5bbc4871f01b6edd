"""The checks that the tests' own conftest makes: what is left open is found and named, other machines are not asked."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.left_open import MARK, Elsewhere, LeftOpen, watch


def test_files_pipes_and_processes_that_are_left_are_named(tmp_path: Path) -> None:
    left = LeftOpen()
    with (tmp_path / "kept").open("w") as file:
        command = [sys.executable, "-c", "print(flush=True); input()"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.readline()  # it runs
            found = left.at_last(0)
        assert file.name in found[0]
        assert any(f"process {process.pid}" in line for line in found)
        assert any("pipe:" in line for line in found)
    assert left.at_last() == []


@pytest.mark.parametrize("host", ["8.8.8.8", "example.com"])
def test_other_machines_are_not_asked(host: str) -> None:
    asked: list[str] = []
    watch(asked)
    with pytest.raises(Elsewhere, match=host):
        socket.create_connection((host, 80))
    assert [line.split()[1] for line in asked] == [host]
    watch([])


def test_this_machine_is_asked() -> None:
    asked: list[str] = []
    watch(asked)
    with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()):
        watch([])
    assert asked == []


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all tests")
def test_a_file_is_one_group_of_pytest_xdist(request: pytest.FixtureRequest) -> None:
    """pytest 9.2 dropped what pytest-xdist 3.8 writes groups to: every shared vLLM would start in every process."""
    assert request.node.nodeid.endswith("@tests/test_left_open.py")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_of_tests_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(
        "import subprocess, sys, time\n"
        "from support.left_open import start_reaper\n"
        "start_reaper()\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    command = [sys.executable, str(tmp_path / "run.py")]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        run.kill()
    deadline = time.monotonic() + 30
    while (runs := _runs(child)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not runs


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_a_test_starts_has_the_mark_of_its_run() -> None:
    child = subprocess.run([sys.executable, "-c", f"import os; print(os.environ['{MARK}'])"], capture_output=True)
    assert child.stdout.strip(), child.stderr


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # one that nobody has waited for has none
    except OSError:
        return False
