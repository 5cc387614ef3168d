"""A Prefect server that asks for a password, and what its API answers."""

import base64
import json
import urllib.request
from typing import Any

from pipelines.home.home import Home
from pipelines.launchers.network import bound_port
from pipelines.prefect.server.api import SERVER_COMMAND, wait_until_healthy
from pipelines.prefect.server.settings import embedded_environment
from pipelines.processes.supervisor import start

PASSWORD = "admin:correct horse"


class Server:
    """One process of the API, over the Prefect database of a home."""

    def __init__(self, home: Home) -> None:
        listener, self.held = bound_port()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
        self.home = home
        home.prefect.mkdir(parents=True, exist_ok=True)
        settings = embedded_environment(home, self.url) | {"PREFECT_SERVER_API_AUTH_STRING": PASSWORD}
        self.log = home.logs / "server.log"
        with listener:
            self.process = start(SERVER_COMMAND, self.log, environment=settings, standard_input=listener.fileno())
        wait_until_healthy(self.url, self.process, self.log)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.held.close()

    def call(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Returns the API's answer; None if it is empty."""
        headers = {
            "content-type": "application/json",
            "authorization": "Basic " + base64.b64encode(PASSWORD.encode()).decode(),
        }
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def flow_run(self, flow_run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.call(f"/flow_runs/{flow_run_id}")
        return found
