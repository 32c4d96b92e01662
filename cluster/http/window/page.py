"""Serves the page that shows all this to people, and the script of `/docs`: files, nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

_FOLDER = Path(__file__).parent / "assets"
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(service: object, request: Request) -> Response:
    """The live page: what is kept, what runs, why a request took as long as it did."""
    return FileResponse(_FOLDER / "index.html", media_type="text/html", headers=HEADERS)


async def script(service: object, request: Request) -> Response:
    """The page's script."""
    return FileResponse(_FOLDER / "app.js", media_type="text/javascript", headers=HEADERS)


async def style(service: object, request: Request) -> Response:
    """The page's style."""
    return FileResponse(_FOLDER / "app.css", media_type="text/css", headers=HEADERS)


async def docs_script(service: object, request: Request) -> Response:
    """The script of the page `/docs`."""
    return FileResponse(_FOLDER / "docs.js", media_type="text/javascript", headers=HEADERS)
