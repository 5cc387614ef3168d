"""Healthy while the server has heard from this container's worker lately: `worker_health.py POOL`."""

import base64
import json
import os
import socket
import sys
import urllib.request
from pathlib import Path

pool = sys.argv[1]
auth = Path("/run/secrets/PREFECT_API_AUTH_STRING").read_bytes().strip()
request = urllib.request.Request(
    f"{os.environ['RPG_PROFILE']}/work_pools/{pool}/workers/filter",
    data=b"{}",
    headers={"content-type": "application/json", "authorization": f"Basic {base64.b64encode(auth).decode()}"},
)
with urllib.request.urlopen(request, timeout=10) as answer:
    online = {worker["name"] for worker in json.load(answer) if worker["status"] == "ONLINE"}
sys.exit(f"{socket.gethostname()}-{pool}" not in online)
