"""Processes that go wrong in place of ``random_check.serve``: what the watchdog of ``random_batches`` must notice."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection

from tests.gpu.random_check import Outcome

AT = 3  # The batch where it happens.


def _serve(connection: Connection, go_wrong: object) -> None:
    connection.recv()
    connection.send(0)
    while (number := connection.recv()) is not None:
        if number == AT and callable(go_wrong):
            go_wrong()
        connection.send(Outcome(apart=0.0))
    connection.send({"prefill": 1})


def hang(connection: Connection) -> None:
    _serve(connection, lambda: time.sleep(600))


def crash(connection: Connection) -> None:
    _serve(connection, os.abort)
