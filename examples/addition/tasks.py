"""Write the task files: `python tasks.py DIRECTORY [--seed N] [--held-out N]` makes train.jsonl and held_out.jsonl."""

import argparse
import json
import random
from pathlib import Path


def split(seed: int, held_out: int) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """All 100 pairs of one-digit numbers, shuffled and divided: (train, held out)."""
    digits = range(10)
    pairs: list[dict[str, object]] = [{"task_id": f"add-{a}-{b}", "a": a, "b": b} for a in digits for b in digits]
    random.Random(seed).shuffle(pairs)
    return pairs[held_out:], pairs[:held_out]


def write(path: Path, tasks: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--held-out", type=int, default=20)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    train, held_out = split(options.seed, options.held_out)
    write(options.directory / "train.jsonl", train)
    write(options.directory / "held_out.jsonl", held_out)


if __name__ == "__main__":
    main()
