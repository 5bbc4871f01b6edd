"""The statements of the store and of features, wherever they stand in their modules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from lightning_proxy import store
from lightning_proxy.store.reports import NEWEST
from lightning_proxy.store.rollouts import ROLLOUT_FILTERS, page_of

TEMPLATE = re.compile(r"\{\w+\}")
ORDINARY = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|WITH RECURSIVE)\s")


def pages() -> dict[str, str]:
    """The statements that are put together when they are run, by what they filter."""
    names = ("", "status", "task_id", "mode", "key_id", "agent")
    return {f"page by {name or 'nothing'}": page_of([name]) for name in names} | {
        f"tasks by {name or 'nothing'}": NEWEST.format(filters=ROLLOUT_FILTERS.get(name, ""))
        for name in ("", "mode", "task_id", "key_id")
    }


def statements() -> Iterator[tuple[str, str]]:
    """Every statement of the store: module constants by name, those that stand in a method by their first words."""
    folder = Path(store.__path__[0])
    for path in sorted(path for top in ("store", "features") for path in (folder.parent / top).rglob("*.py")):
        parts_of_path = path.relative_to(folder.parent).with_suffix("").parts
        if "postgres" in parts_of_path:  # ways of one database to say the same
            continue
        if not ORDINARY.search(path.read_text()):  # it may need an extra
            continue
        module = import_module(".".join(("lightning_proxy", *parts_of_path)))
        tree = ast.parse(path.read_text())
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        texts = [(name, text) for name, text in vars(module).items() if isinstance(text, str)]
        several = [(name, texts) for name, texts in vars(module).items() if isinstance(texts, tuple)]
        texts += [(f"{name} {n}", one) for name, all_ in several for n, one in enumerate(all_) if isinstance(one, str)]
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            for node in ast.walk(function):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    texts.append((node.value[:60], node.value))
        whole = ((name, text) for name, text in texts if not TEMPLATE.search(text))
        yield from ((name, text) for name, text in whole if ORDINARY.match(text))
