"""The page's files: all that it loads comes from the proxy, under a policy that lets nothing else in."""

from __future__ import annotations

import fnmatch
import hashlib
import re
import tomllib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lightning_proxy.features.page.proxy import FILES, POLICY, files, views
from support.paths import ROOT

Running = Callable[..., AbstractAsyncContextManager[Any]]
OURS = [name for name in files() if not name.startswith("vendor/")]
IMPORT = re.compile(r"""(?:from|import)\s*"([^"]+)";""")
LINKED = re.compile(r"""(?:src|href)="(page/[^"]+)\"""")
# Names of XML's vocabularies, the address in uPlot's own notice.
NO_REQUESTS = re.compile(r"https?://(www\.w3\.org/|github\.com/leeoniya/uPlot)")
MOST_LINES = 350


def test_the_policy_lets_only_files_of_the_page_run() -> None:
    rules = dict(rule.split(" ", 1) for rule in POLICY.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    for page in ("index.html", "docs.html"):
        assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=", files()[page].body.decode())


@pytest.mark.parametrize(
    ("name", "media_type"),
    [("app.mjs", "text/javascript"), ("vendor/uplot.js", "text/javascript"), ("page.css", "text/css"),
     ("icon.svg", "image/svg+xml"), ("vendor/uplot.LICENSE.txt", "text/plain")],
)  # fmt: skip
async def test_a_file_has_its_type_and_is_not_sent_twice(
    running: Running, tmp_path: Path, name: str, media_type: str
) -> None:
    async with running(tmp_path) as system:
        async with system.session.get(f"{system.url}/page/{name}") as answer:
            assert answer.content_type == media_type
            assert await answer.read() == (FILES / name).read_bytes()
        known = {"If-None-Match": answer.headers["ETag"]}
        async with system.session.get(f"{system.url}/page/{name}", headers=known) as answer:
            assert (answer.status, await answer.read()) == (304, b"")


def test_the_distribution_has_every_file_of_the_page() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["lightning_proxy"]
    for path in (*(path for path in FILES.rglob("*") if path.is_file()), *views().values()):
        name = path.relative_to(ROOT).as_posix()
        assert any(fnmatch.fnmatch(name, one) and name.count("/") == one.count("/") for one in patterns), name


def test_all_that_a_file_loads_is_there() -> None:
    for name in files():
        text = files()[name].body.decode()
        base = Path(name).parent
        for imported in IMPORT.findall(text) if name.endswith("mjs") else ():
            assert imported.startswith("./"), f"{name}: {imported}"
            assert (base / imported).as_posix() in files(), f"{name}: {imported}"
        for linked in LINKED.findall(text) if name.endswith("html") else ():
            assert linked.removeprefix("page/") in files(), f"{name}: {linked}"


def test_no_file_names_another_host() -> None:
    for name in files():
        if not name.endswith(".txt"):
            text = NO_REQUESTS.sub("", files()[name].body.decode())
            assert re.findall(r"(?:https?:)?//[\w-]+\.[\w.-]+", text) == [], name


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith("mjs")])
def test_our_modules_are_short_and_take_no_text_as_markup_or_code(name: str) -> None:
    text = files()[name].body.decode()
    assert len(text.splitlines()) <= MOST_LINES
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|dangerously|document\.write|\beval\(|new Function", text)


def test_no_module_imports_or_exports_what_nobody_uses() -> None:
    modules = {name: files()[name].body.decode() for name in OURS if name.endswith("mjs")}
    for name, text in modules.items():
        for imported in re.findall(r"\w+", " ".join(re.findall(r"import \{([^}]*)\} from", text))):
            assert len(re.findall(rf"\b{imported}\b", text)) > 1, f"{name}: {imported}"
        for exported in re.findall(r"export (?:async )?(?:const|function|class) (\w+)", text):
            others = (other for at, other in modules.items() if at != name)
            assert any(re.search(rf"\b{exported}\b", other) for other in others), f"{name}: {exported}"


def test_each_view_has_a_letter_of_its_own() -> None:
    of_page = re.findall(r"\bView: \w+, key: \"(\w)\"", files()["app.mjs"].body.decode())
    of_rooms = [
        key for path in views().values() for key in re.findall(r'^export const key = "(\w)"', path.read_text(), re.M)
    ]
    assert (len(of_page), len(of_rooms)) == (6, len(views()))
    assert len({*of_page, *of_rooms}) == len(of_page) + len(of_rooms)


def test_other_people_s_files_are_those_that_are_listed() -> None:
    listed = dict(re.findall(r"^\| `([^`]+)` .*`([0-9a-f]{64})` \|$", (FILES / "vendor/README.md").read_text(), re.M))
    vendored = {name.removeprefix("vendor/"): file for name, file in files().items() if name.startswith("vendor/")}
    code = {name: hashlib.sha256(file.body).hexdigest() for name, file in vendored.items() if ".LICENSE" not in name}
    assert code == listed
    assert sum(len(vendored[name].body) for name in code) < 72_000
