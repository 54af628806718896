"""A process that imports what scripts need, once, and forks each of their ranks: ``python forking.py``.

Asked and answered in lines of JSON by ``processes.Ready``, which says what is asked and keeps the time.
"""

import atexit
import importlib
import json
import os
import pathlib
import sys
import traceback
import types

TASKS = pathlib.Path("/proc/self/task")


def become(script, args, environment, folder, output):
    """In a fork: what ``python script args`` would be, in this environment and folder, to its own end."""
    os.setsid()
    nothing, words = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(nothing, 0), os.dup2(words, 1), os.dup2(words, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv = [script, *args]
    sys.path[0] = str(pathlib.Path(script).parent)
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    exec(compile(pathlib.Path(script).read_bytes(), script, "exec"), main.__dict__)


def ended(**rank):
    """Become a rank, and end as Python ends, but for tearing down every module: a second of each rank."""
    code = 0
    try:
        become(**rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


def serve():
    """Answer each line, until there is none."""
    for line in sys.stdin:
        asked = json.loads(line)
        sys.path[0] = asked["beside"]
        for name in asked["imports"]:
            importlib.import_module(name)
        threads = list(TASKS.iterdir()) if TASKS.is_dir() else []
        assert len(threads) < 2, f"{asked['imports']} started threads, which a fork would lack"
        pids = []
        for rank in asked["ranks"]:
            pid = os.fork()
            if pid == 0:
                ended(**rank)
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(codes), flush=True)
    os._exit(0)


if __name__ == "__main__":
    serve()
