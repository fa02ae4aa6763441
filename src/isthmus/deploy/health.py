"""``/healthz`` and ``/metrics`` of a hub or a site, on loopback: for the monitoring of the machine it runs on.

Served by ``isthmus server start --metrics PORT`` and ``isthmus client start --metrics PORT``, in a thread of the
supervisor, which outlives its parent process. The format is Prometheus' text format. Names of organisations, rounds,
bytes and times are shown, nothing of the data. Nothing is listened for on other interfaces.
"""

from __future__ import annotations

import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from isthmus.errors import ConfigError

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
HOSTS = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])?(:[0-9]{1,5})?")
"""Names by which a question may call this server: a page in a browser of this machine calls it by another, which it has
made to mean 127.0.0.1, and would read the answer.
"""
ASKED_WITHIN = 10.0
"""Seconds until a connection that asks nothing is closed: each holds a thread of the keeper."""
Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Metric:
    """A number with its meaning; several with different labels share a name."""

    name: str
    help: str
    kind: str
    values: Mapping[Labels, float]


@dataclass(frozen=True)
class Health:
    """What is measured now. ``problems`` are reasons why something does not work; none means healthy."""

    problems: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def gauge(name: str, help: str, values: Mapping[str, float] | float, label: str = "organisation") -> Metric:
    """A metric with one label, or with none."""
    given: dict[Labels, float] = {(): values} if isinstance(values, int | float) else {}
    if not isinstance(values, int | float):
        given = {((label, key),): value for key, value in values.items()}
    return Metric(f"isthmus_{name}", help, "counter" if name.endswith("_total") else "gauge", given)


def to_text(metrics: Iterable[Metric]) -> str:
    """Prometheus' text format."""
    lines = []
    for metric in metrics:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        for labels, value in sorted(metric.values.items()):
            inside = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels)
            lines.append(f"{metric.name}{{{inside}}} {value:.10g}" if inside else f"{metric.name} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


class HealthServer:
    """Answers ``GET /healthz`` (200 or 503, JSON) and ``GET /metrics``; everything else is 404."""

    def __init__(self, port: int, measure: Callable[[], Health]) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = ASKED_WITHIN

            def do_GET(self) -> None:
                try:
                    code, kind, text = _answer(self.path, self.headers.get("Host", ""), measure)
                except Exception as error:  # a file that is being replaced, say: the next question is answered
                    logger.warning("health: %s", error)
                    code, kind, text = 503, "application/json", json.dumps({"healthy": False, "problems": ["see log"]})
                content = text.encode()
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """A line per question would drown the log."""

        try:
            self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--metrics {port} cannot be used ({error}): choose a free port") from None
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _answer(path: str, host: str, measure: Callable[[], Health]) -> tuple[int, str, str]:
    if not HOSTS.fullmatch(host):
        return 403, "text/plain", "ask for localhost\n"
    if path not in ("/healthz", "/metrics"):
        return 404, "text/plain", "ask for /healthz or /metrics\n"
    found = measure()
    if path == "/metrics":
        healthy = gauge("healthy", "1 if nothing is wrong, else 0", 0.0 if found.problems else 1.0)
        return 200, "text/plain; version=0.0.4", to_text([healthy, *found.metrics])
    content = {"healthy": not found.problems, "problems": list(found.problems), **found.facts}
    return 503 if found.problems else 200, "application/json", json.dumps(content) + "\n"
