"""Writers of a tuning database that are killed while they write:

    python database_writers.py FOLDER TASKS.json KILLS WRITERS SEED

TASKS.json is a list of [workload line, payload].  Writers are forks of this process, which never imports TVM, so that a
new one is there in a millisecond.  Every writer notes in a file of its own what it is about to commit and what it has
committed.  Prints {"begun": [[id, task]], "done": [id]}.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

from tvm_comfuse.tuning.database.store import Store

#: seconds a writer is left alone, at most; a commit takes about as long
LIFE = 0.01
#: everything is read after this many kills
LOOK_EVERY = 25
#: seconds between the pieces that a line is written in; many kills then fall into a line
PAUSE = 0.0002
#: least bytes of a piece; otherwise it is a third of what is left
PIECE = 64
#: seconds between two commits of a writer, at most; others then get the lock, which is not a fair one
REST = 0.004


def main() -> None:
    folder, tasks = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    kills, count, seed = map(int, sys.argv[3:])
    chance = random.Random(seed)
    warnings.simplefilter("ignore")
    logs = folder.with_name("logs")
    logs.mkdir()
    writers: list[int] = []
    born = 0
    for killed in range(kills):
        while len(writers) < count:
            writers.append(start(folder, tasks, born, logs))
            born += 1
        time.sleep(chance.uniform(0, LIFE))
        kill(writers.pop(chance.randrange(count)))
        if killed % LOOK_EVERY == 0:
            Store(folder).entries()
    for writer in writers:
        kill(writer)
    Store(folder).entries()
    words = [line.split() for log in sorted(logs.iterdir()) for line in log.read_text().splitlines()]
    begun = [[int(word[1]), int(word[2])] for word in words if word[0] == "begun"]
    json.dump({"begun": begun, "done": [int(word[1]) for word in words if word[0] == "done"]}, sys.stdout)


def kill(writer: int) -> None:
    """End a writer wherever it is."""
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)


def start(folder: Path, tasks: list, number: int, logs: Path) -> int:
    """Fork a writer; its process id."""
    process = os.fork()
    if process:
        return process
    log = os.open(logs / str(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    chance = random.Random(number)
    write = os.write

    def write_piece(descriptor: int, data: bytes) -> int:
        time.sleep(PAUSE)
        return write(descriptor, data[: max(PIECE, len(data) // 3)])

    os.write = write_piece
    store = Store(folder)
    for count in range(10**6):
        name, task = number * 10**6 + count, chance.randrange(len(tasks))
        workload, (trace, _, target, arguments) = tasks[task]
        write(log, f"begun {name} {task}\n".encode())
        # the time names the record
        store.commit(workload, [trace, [(name + 1) * 1e-9], target, arguments], {"task": task})
        write(log, f"done {name}\n".encode())
        time.sleep(chance.uniform(0, REST))
    os._exit(0)


if __name__ == "__main__":
    main()
