"""A call in a process of its own, so that what a foreign library does to that process is an error here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from typing import Any


class ChildDied(Exception):
    """The process ended before it answered; `how` is for people: "of SIGSEGV", "with status 3"."""

    def __init__(self, how: str):
        super().__init__(f"the process died {how}")
        self.how = how


def call_in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, all of which can be pickled, in a fresh interpreter; what it raises is raised here.

    Raises:
      ChildDied: there was no answer.
    """
    context = multiprocessing.get_context("spawn")  # a fork would take over the locks of threads that it does not have
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, arguments), daemon=True)
    child.start()
    sender.close()
    try:
        is_result, answer = receiver.recv()
    except EOFError:
        child.join()
        raise ChildDied(_how(child.exitcode)) from None
    child.join()
    if is_result:
        return answer
    raise answer


def _answer(sender, function: Callable[..., Any], arguments: tuple) -> None:
    try:
        sender.send((True, function(*arguments)))
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # the parent has had it too, and says so
    except Exception as error:
        error.add_note(traceback.format_exc())  # which does not travel
        sender.send((False, error))


def _how(status: int | None) -> str:
    return f"of {signal.Signals(-status).name}" if status is not None and status < 0 else f"with status {status}"
