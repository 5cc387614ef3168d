"""A process that calls one function: `python -m rpg.tools.function_worker`. Requests and answers are lines of JSON.

The first line names the function: {"path", "module", "name"}. Each later one has the arguments of a call by name, and
is answered by {"answer"} or {"error"}.
"""

import importlib
import json
import os
import sys
from operator import attrgetter
from typing import Any


def main() -> None:
    """Answers calls until its input ends. Output that the function prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    about = json.loads(sys.stdin.readline())
    sys.path[:] = about["path"]
    function = attrgetter(about["name"])(importlib.import_module(about["module"]))
    for line in sys.stdin:
        print(json.dumps(answer_of(function, json.loads(line))), file=answers, flush=True)


def answer_of(function: Any, arguments: dict[str, Any]) -> dict[str, str]:
    """Returns the function's answer, unchanged if it is a text and else as JSON, or the function's error."""
    from pydantic import TypeAdapter, ValidationError, validate_call

    try:
        value = validate_call(function)(**arguments)
    except ValidationError as error:
        first = error.errors()[0]
        return {"error": f"{'.'.join(map(str, first['loc']))}: {first['msg']}"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"answer": value if isinstance(value, str) else TypeAdapter(type(value)).dump_json(value).decode()}


if __name__ == "__main__":
    main()
