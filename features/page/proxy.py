"""Serves the page: `GET /`, and the files that it is made of.

They need no key; the routes that they read do.
"""

from __future__ import annotations

import hashlib
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


@cache
def files() -> dict[str, bytes]:
    """Return the page's files by their paths, and the views that features bring. No other file is served."""
    own = {path.relative_to(FILES).as_posix(): path for path in sorted(FILES.rglob("*")) if path.suffix in TYPES}
    views = [path for name in FEATURES for path in sorted(FILES.parents[1].glob(f"{name}/views/*.mjs"))]
    imports = "".join(f'import * as {path.stem} from "./{path.name}";\n' for path in views)
    rooms = f"{imports}export const ROOMS = {{ {', '.join(path.stem for path in views)} }};\n"
    read = {name: path.read_bytes() for name, path in (own | {path.name: path for path in views}).items()}
    return read | {"views.mjs": rooms.encode()}


@router.get("/")
@router.get("/page/{name:path}")
async def get_file(request: Request, name: str = "index.html") -> Response:
    """The page itself, or a file that it loads."""
    body = files().get(name)
    if body is None:
        raise NotFound(f"no route {request.method} {request.url.path}")
    etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = HEADERS | {"ETag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=TYPES[Path(name).suffix])


class PagePlugin(ProxyPlugin):
    """Serves the page at `/`, its events at `/feed`, and what was sampled as text."""

    routers = (feed.router, router, texts.router)


plugin = PagePlugin
