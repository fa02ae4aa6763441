"""``isthmus watch``: a run that goes on, in a browser on this machine."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from isthmus.errors import ConfigError, DataError, check_run_folder

NAME = "watch"
HOST = "127.0.0.1"
"""Never another: the page tells scores, and nobody has to log in."""


def command(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run, while it goes on or afterwards.")],
    port: Annotated[int, typer.Option(help="Port on this machine; 0 = any that is free.", min=0, max=65535)] = 0,
) -> None:
    """Show a run in a browser while it goes on: where it stands, scores and losses by round. Only this machine can
    reach the page; Ctrl-C ends it.
    """
    server = serve(run_dir, port)
    print(f"http://{HOST}:{server.server_address[1]}/  (this machine only; Ctrl-C ends it)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


def serve(run_dir: Path, port: int = 0) -> ThreadingHTTPServer:
    """A server of the live page, on the loopback interface."""
    if not run_dir.exists():
        check_run_folder(run_dir)
    from isthmus.report.live import live_page

    live_page(run_dir)  # refuse what is no run before a browser asks

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # A web page elsewhere could have its name point here: only requests for this machine are answered.
            host = self.headers.get("Host", "").rpartition(":")[0]
            if self.path != "/" or host not in (HOST, "localhost"):
                self.send_error(404)
                return
            try:
                page = live_page(run_dir).encode()
            except DataError as error:
                self.send_error(503, str(error)[:80])
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are no news."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise ConfigError(f"port {port} cannot be used ({error.strerror}): choose another with --port") from None
