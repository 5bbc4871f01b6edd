"""Prints how many lines the core and the whole product have: `python tests/support/lines.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_rooms import PRODUCT, ROOT, TOPS, side_room


def lines(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def main() -> None:
    core = []
    for path in PRODUCT:
        top, *inside = path.relative_to(ROOT).with_suffix("").parts
        if top in ("proxy", "trainer") and not side_room(top, tuple(inside)):
            core.append(path)
    listed = subprocess.run(["git", "ls-files", *TOPS], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    others = [ROOT / name for name in listed.split() if not name.endswith(".py")]
    print(f"core     {lines(core):6} lines in {len(core)} files (proxy/ and trainer/ without side rooms)")
    print(f"product  {lines([*PRODUCT, *others]):6} lines in {len(PRODUCT) + len(others)} files")


if __name__ == "__main__":
    main()
