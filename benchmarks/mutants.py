"""Is the referee sharp? Plants small faults in a copy of the product, and says which the tests catch.

Ten faults in each of ten places, each in a copy of its own; `tests/contract` and `tests/reference` alone are run
against it. A fault is caught if a test fails. Some faults change nothing that anybody could see: those that survive
are printed, to be judged by a reader. `python benchmarks/mutants.py`: hours. `--only loss --faults 2`: minutes.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
REFERENCE = "tests/reference"


@dataclass(frozen=True)
class Place:
    """A place of the product to plant faults in. `tests`: those that promise what it does."""

    name: str
    file: str
    tests: tuple[str, ...]


def of_contract(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/contract/test_{name}.py" for name in names)


PLACES = [
    Place("transcript", "proxy/dialects/stream.py", of_contract("tokens", "cases", "broken_upstreams", "transparency")),
    Place("tokens", "core/tokens.py", of_contract("cases", "tokens", "transitions", "reports")),
    Place(
        "group commit",
        "proxy/gateway/recorder.py",
        of_contract("durability", "control", "redaction", "data", "cases", "training"),
    ),
    Place("returns", "core/returns.py", (*of_contract("rollouts", "reports"), REFERENCE)),
    Place("strategies", "trainer/credit/strategies.py", (REFERENCE,)),
    Place("samples", "trainer/rows/samples.py", of_contract("reports", "training")),
    Place("loss", "trainer/step/losses.py", (REFERENCE,)),
    Place("publish", "trainer/publish.py", of_contract("training", "durability")),
    Place("limits", "proxy/access/limits.py", (*of_contract("tenants"), "tests/proxy/access/test_keys.py")),
]

FLIPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip


def faults(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node with each small fault that it can have."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            yield ast.Compare(node.left, [FLIPPED[type(op)]()], node.comparators)  # type: ignore[list-item]
        case ast.BoolOp() | ast.BinOp() if type(node.op) in FLIPPED:
            yield type(node)(**{**dict(ast.iter_fields(node)), "op": FLIPPED[type(node.op)]()})
        case ast.UnaryOp(op=ast.Not()):
            yield node.operand
        case ast.IfExp():
            yield ast.IfExp(node.test, node.orelse, node.body)
        case ast.If(test=test):
            yield ast.If(ast.UnaryOp(ast.Not(), test), node.body, node.orelse)
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Dict(keys, values):
            for i in range(len(keys)):
                yield ast.Dict(keys[:i] + keys[i + 1 :], values[:i] + values[i + 1 :])
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign():
            yield ast.Pass()


class Planter(ast.NodeTransformer):
    """Numbers the faults of a tree, and plants the one that is wanted."""

    def __init__(self, wanted: int) -> None:
        self.count, self._wanted = 0, wanted

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, ast.ImportFrom | ast.arguments):  # imports, defaults
            return node
        if isinstance(node, ast.AnnAssign):  # but for its type
            node.value = node.value and self.visit(node.value)
            return node
        if isinstance(node, ast.keyword) and node.arg in ("strict", "slots", "frozen"):  # nobody could see it
            return node
        node = self.generic_visit(node)
        for fault in faults(node):
            self.count += 1
            if self.count == self._wanted:
                return ast.copy_location(fault, node)
        return node


def planted(source: str, number: int) -> tuple[str, int]:
    """Return the source with a fault of this number, and how many faults it could have."""
    planter = Planter(number)
    tree = ast.fix_missing_locations(planter.visit(ast.parse(source)))
    return ast.unparse(tree), planter.count


def caught(copy: Path, tests: tuple[str, ...]) -> str | None:
    """Return the test that fails in a copy, or None."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*pytest, "-m", "not long and not vllm", *tests], cwd=copy, timeout=900, check=False,
            capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(copy / "package")},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "they do not end"
    if done.returncode == 0:
        return None
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0] if failed else f"exit code {done.returncode}"


def copied(to: Path) -> Path:
    """Copy what git knows; `package/lightning_proxy` is imported in place of the installed one."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, names):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, to / name)
    (to / "package").mkdir()
    (to / "package/lightning_proxy").symlink_to(to)
    return to


def main() -> None:
    """Print a table: of each place the faults that were caught, and then those that survived."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--only", help="one place, by its name")
    options.add_argument("--faults", type=int, default=10)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    survived = []
    print("| place | file | faults | caught |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        copy = copied(Path(directory))
        for place in [one for one in PLACES if given.only in (None, one.name)]:
            if failed := caught(copy, place.tests):
                raise SystemExit(f"without a fault, too: {failed}")
            source = (ROOT / place.file).read_text()
            plain, most = planted(source, 0)
            chosen = random.Random(given.seed).sample(range(1, most + 1), min(given.faults, most))
            count = 0
            for number in chosen:
                (copy / place.file).write_text(planted(source, number)[0])
                test = caught(copy, place.tests)
                count += test is not None
                if test is None:
                    lines = difflib.unified_diff(
                        plain.split("\n"), planted(source, number)[0].split("\n"), n=0, lineterm=""
                    )
                    survived.append("\n".join([place.file, *list(lines)[2:]]))
            (copy / place.file).write_text(source)
            print(f"| {place.name} | `{place.file}` | {len(chosen)} | {count} |", flush=True)
    print("\nSurvived:\n\n" + "\n\n".join(survived) if survived else "\nNone survived.")


if __name__ == "__main__":
    main()
