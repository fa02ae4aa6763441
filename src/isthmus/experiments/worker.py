"""A worker process of `isthmus.experiments.batch`: reads one run per JSON line and answers with its outcome."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    questions: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin, questions), daemon=True).start()

    from isthmus.experiments.batch import Job, run_job
    from isthmus.experiments.config import settings_from_toml

    while True:
        question = json.loads(questions.get())
        outcome = run_job(Job(settings_from_toml(question["config"]), Path(question["folder"]), question["models"]))
        answers.write(json.dumps({"status": outcome.status, "result": outcome.result, "reason": outcome.reason}) + "\n")
        answers.flush()


def _listen(stdin: TextIO, questions: queue.SimpleQueue[str]) -> None:
    for line in stdin:
        questions.put(line)
    os._exit(0)  # the parent is gone or has no more work; an unfinished run can be resumed


if __name__ == "__main__":
    main()
