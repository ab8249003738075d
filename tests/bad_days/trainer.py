"""The trainer of the bad days: a real process that logs rows and says outside which calls have returned.

    python trainer.py '{"settings": {...}, "ledger": FILE, "first": 1, "pause": 0.01, "restart_pauses": []}'

`settings` go to `nodetrack.init`. Each row has a step and a value that no other row has. The ledger, which is
no part of nodetrack, gets `try STEP VALUE` before `log` is called and `done STEP VALUE` once it has returned,
each by one `write`. `restart_pauses` are those before a delivery process is started again, shorter than
nodetrack's own. What is read on standard input, one word a line: `stop` logging, `health`, `finish`; its end
is `finish`. Answers go to standard output as lines of JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time

import msgspec

import nodetrack
from nodetrack.delivery import process


def main() -> None:
    order = json.loads(sys.argv[1])
    ledger = os.open(order["ledger"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    process.RESTART_PAUSES = tuple(order["restart_pauses"])
    began = time.monotonic()
    run = nodetrack.init(**order["settings"])
    tell(event="begun", run=run.id, attempt=run.attempt, seconds=time.monotonic() - began)
    stopped = threading.Event()
    logging = threading.Thread(target=log_rows, args=(run, ledger, order["first"], order["pause"], stopped))
    logging.start()
    for word in map(str.strip, sys.stdin):
        if word == "stop":
            stopped.set()
            logging.join()
            tell(event="stopped")
        elif word == "health":
            tell(event="health", health=msgspec.to_builtins(run.health()))
        elif word == "finish":
            break
    stopped.set()
    logging.join()
    began = time.monotonic()
    run.finish()
    tell(event="finished", seconds=time.monotonic() - began)


def log_rows(run: nodetrack.Run, ledger: int, value: int, pause: float, stopped: threading.Event) -> None:
    while not stopped.is_set():
        step = run.step
        os.write(ledger, f"try {step} {value}\n".encode())
        run.log({"value": float(value)}, step=step)
        os.write(ledger, f"done {step} {value}\n".encode())
        value += 1
        time.sleep(pause)


def tell(**message: object) -> None:
    os.write(1, json.dumps(message, default=str).encode() + b"\n")


if __name__ == "__main__":
    main()
