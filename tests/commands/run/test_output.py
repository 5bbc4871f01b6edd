"""Programs' logs are bounded in size, and redacted as records are."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_proxy.commands.run.output import ProgramLog, redaction
from lightning_proxy.commands.run.run import RunOptions
from lightning_proxy.commands.run.runner import runner_for
from lightning_proxy.core.config.root import Config
from support.control_api import ControlApi, Program, run_all, task

SECRET = "sk-" + "A1b2C3d4" * 4
KEY = "-----BEGIN PRIVATE KEY-----\nMIIEabc\n-----END PRIVATE KEY-----"
TEXT = f"""
import sys
print("begins", flush=True)
print("key", {SECRET!r})
print({KEY!r})
sys.stdout.write("x" * 300_000 + "\\n")
sys.stderr.write("ends with {SECRET}")
sys.exit(3)
"""


async def test_a_log_has_no_secret(proxy: ControlApi, tmp_path: Path, program: Program) -> None:
    (tmp_path / "agent.py").write_text(TEXT)
    config = Config.model_validate({**program.settings, "recording": {"redact": {"secrets": True}}})
    preload = ["json"] if program.kind == "preload" else []
    runner = runner_for(config, [sys.executable, str(tmp_path / "agent.py")], preload, print)
    (result,) = await run_all(proxy, runner, [task(1)], RunOptions(logs=tmp_path / "logs"))
    log = tmp_path / "logs" / "r0.log"
    text = log.read_text()
    assert text.startswith("begins\nkey [redacted]\n[redacted]\n") and text.endswith("ends with [redacted]")
    assert result.reason == "exit code 3: ends with [redacted]"
    assert log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("most", [200, 1000, 10_000])
def test_what_is_kept_is_the_beginning_and_the_end(tmp_path: Path, size: int, most: int) -> None:
    log = ProgramLog(tmp_path / "log", most=most)
    said = "".join(f"{n}\n" for n in range(5000)).encode()
    for at in range(0, len(said), size):
        log.write(said[at : at + size])
    log.close()
    kept = (tmp_path / "log").read_bytes()
    before, mark, after = kept.partition(b"\n[")
    number, _, after = after.partition(b" bytes left out]\n")
    assert mark and said.startswith(before) and said.endswith(after) and len(kept) <= most
    assert len(before) + int(number) + len(after) == len(said)


def test_a_short_log_is_whole_and_there_at_once(tmp_path: Path) -> None:
    log = ProgramLog(tmp_path / "log", lambda text: text.replace("secret", "x"))
    log.write(b"a sec")
    log.write(b"ret\nand \xff")
    assert (tmp_path / "log").read_bytes() == b"a x\n"
    log.close()
    assert (tmp_path / "log").read_bytes() == b"a x\nand \xff"


def test_a_key_that_comes_in_pieces_is_taken_out_whole(tmp_path: Path) -> None:
    config = Config.model_validate({"recording": {"redact": {"secrets": True}}})
    log = ProgramLog(tmp_path / "log", redaction(config))
    for piece in KEY.splitlines(keepends=True):
        log.write(piece.encode())
    log.write(b"\nafter\n")
    log.close()
    assert (tmp_path / "log").read_text() == "[redacted]\nafter\n"
