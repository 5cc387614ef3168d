"""`python -m pipelines.web`: serves the record of RPG_HOME at RPG_WEB_HOST (127.0.0.1) and RPG_WEB_PORT (4202)."""

import os
import sys

from pipelines.home.home import Home
from pipelines.web.serve import DEFAULT_PORT, serve
from specs.errors import SpecError, render

if __name__ == "__main__":
    try:
        serve(
            Home.from_environment(),
            os.environ.get("RPG_WEB_HOST") or "127.0.0.1",
            int(os.environ.get("RPG_WEB_PORT") or DEFAULT_PORT),
        )
    except SpecError as error:
        sys.exit(render(error.issues))
