"""Runs scripts in forks of one process that has the slow imports behind it.

One request per line of stdin, as JSON: words (script and arguments), cwd, env, out and err (files); one exit code per
line of stdout.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from typing import Any, NoReturn

import bridge.front
import bridge.training.loop  # noqa: F401  imports torch and Megatron Core


def run(request: dict[str, Any]) -> NoReturn:
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT), number)
    sys.argv = request["words"]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  as the interpreter itself would
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # noqa: T201
