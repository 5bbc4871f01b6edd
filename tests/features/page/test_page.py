"""The page's files, all of the proxy's own, under a policy that lets nothing else in; its feeds share their looks."""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import re
import tomllib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.page.proxy import FILES, POLICY, files
from lightning_proxy.store.sqlite.database import SqliteDatabase
from support.paths import ROOT

Running = Callable[..., AbstractAsyncContextManager[Any]]
TEXTS = {name: body.decode() for name, body in files().items()}
OURS = {name: text for name, text in TEXTS.items() if name.endswith("mjs") and not name.startswith("vendor/")}
MARKUP = r"innerHTML|outerHTML|insertAdjacent|dangerously|document\.write|\beval\(|new Function"


def test_the_policy_lets_only_files_of_the_page_run() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", TEXTS["index.html"])


async def test_a_file_has_its_type_and_is_not_sent_twice(running: Running, tmp_path: Path) -> None:
    types = {"app.mjs": "text/javascript", "page.css": "text/css", "icon.svg": "image/svg+xml"}
    async with running(tmp_path) as system:
        for name, media_type in types.items():
            async with system.session.get(f"{system.url}/page/{name}") as answer:
                assert answer.content_type == media_type
                assert answer.headers["Content-Security-Policy"] == POLICY
                assert answer.headers["X-Content-Type-Options"] == "nosniff"
                assert await answer.read() == (FILES / name).read_bytes()
            known = {"If-None-Match": answer.headers["ETag"]}
            async with system.session.get(f"{system.url}/page/{name}", headers=known) as answer:
                assert (answer.status, await answer.read()) == (304, b"")


def test_the_distribution_has_every_file_of_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["lightning_proxy"]
    for path in (*(path for path in FILES.rglob("*") if path.is_file()), *ROOT.glob("features/*/views/*")):
        name = path.relative_to(ROOT).as_posix()
        assert any(fnmatch.fnmatch(name, one) and name.count("/") == one.count("/") for one in patterns), name


def test_all_that_a_file_loads_or_names_is_a_file_of_the_page() -> None:
    for name, text in TEXTS.items():
        asked = re.findall(r'(?:from|import)\s*"([^"]+)";', text) if name.endswith("mjs") else []
        linked = re.findall(r'(?:src|href)="page/([^"]+)"', text) if name.endswith("html") else []
        assert [one for one in asked if not one.startswith("./")] == [], name
        assert {(Path(name).parent / one).as_posix() for one in asked} | set(linked) <= TEXTS.keys(), name
        if not name.endswith(".txt"):
            hosts = re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+[\w/]*", text)
            assert [one for one in hosts if "//www.w3.org/" not in one] == [], name


def test_our_modules_take_no_text_as_markup_or_code_and_export_nothing_that_nobody_uses() -> None:
    for name, text in OURS.items():
        assert not re.search(MARKUP, text), name
        for imported in re.findall(r"\w+", " ".join(re.findall(r"import \{([^}]*)\} from", text))):
            assert len(re.findall(rf"\b{imported}\b", text)) > 1, f"{name}: {imported}"
        for exported in re.findall(r"export (?:async )?(?:const|function|class) (\w+)", text):
            others = (other for at, other in OURS.items() if at != name)
            assert any(re.search(rf"\b{exported}\b", other) for other in others), f"{name}: {exported}"


def test_other_people_s_files_are_those_that_are_listed() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", (FILES / "vendor/README.md").read_text(), re.M))
    vendored = {name.removeprefix("vendor/"): body for name, body in files().items() if name.startswith("vendor/")}
    code = {name: hashlib.sha256(body).hexdigest() for name, body in vendored.items() if ".LICENSE" not in name}
    assert code == listed


@pytest.mark.sqlite
async def test_many_feeds_look_at_the_store_as_often_as_one(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, quick = 0, SqliteDatabase.quick

    async def counted(database: SqliteDatabase, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await quick(database, *args)

    monkeypatch.setattr(SqliteDatabase, "quick", counted)
    async with running(tmp_path) as system, AsyncExitStack() as stack:
        found = []
        for feeds in (1, 40):
            for _ in range(feeds):
                answer = await stack.enter_async_context(system.session.get(f"{system.url}/feed"))
                assert (await answer.content.readline()).startswith(b"id: ")
            before = looks
            await asyncio.sleep(2)
            found.append(looks - before)
        assert found[1] < 3 * found[0]
