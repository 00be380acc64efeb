"""The script of docs/how-to/alerts.md sends what the services want, here to a local server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.tutorials.pages import blocks_of

ALERTS = Path(__file__).parents[2] / "docs/how-to/alerts.md"
JOB = {"job": "run17", "name": "night", "time": 1767225600.0}
FAILED = {"sentence": "rank 1 failed", "over": False}
INCIDENT = {"event": "incident", **JOB, "incident": FAILED}
AGAIN = {"event": "incident", **JOB, "incident": {**FAILED, "over": True}}


class Service:
    """A server that keeps the bodies that it receives."""

    def __init__(self) -> None:
        received: list[Any] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(202)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Print nothing."""

        self.received = received
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, daemon=True)
    thread.start()
    yield service
    service.server.shutdown()
    thread.join()
    service.server.server_close()


def sent(service: Service, folder: Path, to: str, event: dict[str, Any]) -> list[Any]:
    """What the script sends for this event."""
    (block,) = (block for block in blocks_of(ALERTS) if block.path == "alert.py")
    script = folder / "alert.py"
    script.write_text(block.text, encoding="utf-8")
    subprocess.run(
        [sys.executable, "-S", str(script), to],
        input=json.dumps(event),
        env={"ALERT_URL": service.url, "ALERT_KEY": "key"},
        text=True,
        check=True,
        timeout=60,
    )
    return service.received


def test_a_chat_gets_a_sentence(service: Service, tmp_path: Path) -> None:
    end = {"event": "end", **JOB, "exit_code": 1, "reason": "no restarts left"}
    sent(service, tmp_path, "slack", INCIDENT)
    sent(service, tmp_path, "slack", AGAIN)
    assert sent(service, tmp_path, "slack", end) == [
        {"text": "night: rank 1 failed"},
        {"text": "night trains again"},
        {"text": "night ended with exit code 1: no restarts left"},
    ]


def test_a_card_and_an_alert_that_is_resolved(service: Service, tmp_path: Path) -> None:
    hang = {"event": "hang", **JOB, "over": False, "verdict": {"sentence": "rank 2 is idle"}}
    (card,) = sent(service, tmp_path, "teams", hang)
    (text,) = card["attachments"][0]["content"]["body"]
    assert text["text"] == "night hangs: rank 2 is idle"
    sent(service, tmp_path, "pagerduty", INCIDENT)
    sent(service, tmp_path, "pagerduty", AGAIN)
    alert, resolved = service.received[1:]
    assert (alert["event_action"], resolved["event_action"]) == ("trigger", "resolve")
    assert alert["dedup_key"] == resolved["dedup_key"] == "elasticrun/run17"
    assert alert["payload"]["summary"] == "night: rank 1 failed"


def test_the_end_of_a_hang_is_no_message(service: Service, tmp_path: Path) -> None:
    over = {"event": "hang", **JOB, "over": True, "verdict": {"sentence": "rank 2 is idle"}}
    assert sent(service, tmp_path, "slack", over) == []
