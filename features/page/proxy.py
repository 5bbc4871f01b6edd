"""Serves the page: `GET /` and `GET /docs`, and the files that they are made of.

They need no key; the routes that they read do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from ...core.errors import NotFound
from ...proxy.hooks import ProxyPlugin
from .. import FEATURES
from . import feed, texts

router = APIRouter(include_in_schema=False)
FILES = Path(__file__).parent / "files"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
}


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page, as it is sent."""

    body: bytes
    media_type: str
    etag: str


@cache
def files() -> Mapping[str, File]:
    """Return the page's files by their paths, and features' views. They are read once; no other file is served."""
    ours = {path.relative_to(FILES).as_posix(): path for path in sorted(FILES.rglob("*")) if path.suffix in TYPES}
    found = {name: _file(name, path.read_bytes()) for name, path in (ours | views()).items()}
    return found | {"views.mjs": _file("views.mjs", _all_of(views()))}


def views() -> dict[str, Path]:
    """Return the files of the views that features bring, in their order."""
    folders = [Path(__file__).parents[1] / feature for feature in FEATURES]
    return {path.name: path for folder in folders for path in sorted(folder.glob("views/*.mjs"))}


def _all_of(names: Iterable[str]) -> bytes:
    """A module that imports the features' views, by their names."""
    imports = [f'import * as view{n} from "./{name}";' for n, name in enumerate(names)]
    listed = ", ".join(f"{name.partition('.')[0]}: view{n}" for n, name in enumerate(names))
    return "\n".join([*imports, f"export const ROOMS = {{ {listed} }};", ""]).encode()


def _file(name: str, body: bytes) -> File:
    return File(body, TYPES[Path(name).suffix], f'"{hashlib.sha256(body).hexdigest()[:32]}"')


@router.get("/")
async def get_page(request: Request) -> Response:
    """The page itself."""
    return _answer(request, "index.html")


@router.get("/docs")
async def get_docs(request: Request) -> Response:
    """The routes, as /openapi.json describes them."""
    return _answer(request, "docs.html")


@router.get("/page/{name:path}")
async def get_file(request: Request, name: str) -> Response:
    """A file that the page loads."""
    return _answer(request, name)


def _answer(request: Request, name: str) -> Response:
    file = files().get(name)
    if file is None:
        raise NotFound(f"no route {request.method} {request.url.path}")
    headers = HEADERS | {"ETag": file.etag}
    if file.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers=headers, media_type=file.media_type)


class PagePlugin(ProxyPlugin):
    """Serves the page at `/`, its events at `/feed`, and what was sampled as text."""

    routers = (feed.router, router, texts.router)


plugin = PagePlugin
