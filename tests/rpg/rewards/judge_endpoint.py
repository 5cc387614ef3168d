"""An OpenAI-compatible endpoint on loopback that replies as a script says."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Script = Callable[[dict[str, Any]], str | tuple[int, dict[str, str], str]]
"""From a request's body to the text of the reply, or to a status, headers and a body."""


class JudgeEndpoint:
    """Its address, and the requests it got."""

    def __init__(self, script: Script, port: int = 0) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._send(200, {}, json.dumps({"data": []}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with endpoint._lock:
                    endpoint.requests.append(body)
                    endpoint.keys.append(self.headers["Authorization"])
                    endpoint._at_once += 1
                    endpoint.most_at_once = max(endpoint.most_at_once, endpoint._at_once)
                said = endpoint.script(body)
                with endpoint._lock:
                    endpoint._at_once -= 1
                if isinstance(said, tuple):
                    self._send(*said)
                    return
                usage = {"prompt_tokens": 100, "completion_tokens": 10}
                content = {"choices": [{"message": {"role": "assistant", "content": said}}], "usage": usage}
                self._send(200, {}, json.dumps(content))

            def _send(self, status: int, headers: dict[str, str], text: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@contextmanager
def judging(script: Script, port: int = 0) -> Iterator[JudgeEndpoint]:
    endpoint = JudgeEndpoint(script, port)
    try:
        yield endpoint
    finally:
        endpoint.close()


def key_in(request: dict[str, Any]) -> str:
    """The key of the question's own lines."""
    found = re.search(r"VERDICT-([0-9a-f]{12}):", request["messages"][0]["content"])
    assert found, request
    return found[1]


def answer_in(request: dict[str, Any], name: str = "answer") -> str:
    """The answer that is to be judged."""
    key = key_in(request)
    text = request["messages"][-1]["content"]
    return str(text.split(f"--- {name} {key} begins ---\n")[1].split(f"\n--- {name} {key} ends ---")[0])


def verdict(request: dict[str, Any], said: object) -> str:
    return f"It follows the rubric in part.\nVERDICT-{key_in(request)}: {said}"
