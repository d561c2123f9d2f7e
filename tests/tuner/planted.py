"""Processes with planted faults. A candidate's ``threads``, which the C target ignores, says which fault it has."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

from tl_backend.configs.decode import DecodeConfig
from tl_backend.ops.compiled import KERNELS
from tl_backend.tuner import worker

FINE, CRASHES, HANGS, WRONG, CRASHES_LATER, FORGETS_ROWS, CHANGES = range(1, 8)
FOR_EVER = 3600.0


def begin(connection: Connection) -> None:
    """As ``worker.begin``, with the faults."""
    chooser_of, rounds = worker.Session._chooser, worker.Session.rounds

    def chooser(self: worker.Session, candidate: worker.Candidate) -> Any:
        fault = _threads(candidate)
        found = chooser_of(self, candidate)
        if fault == CRASHES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if fault == HANGS:
            time.sleep(FOR_EVER)
        if fault in (WRONG, FORGETS_ROWS, CHANGES):
            for key in candidate.artifacts:
                KERNELS._kernels[key] = _broken(KERNELS._kernels[key], fault)
        return found

    def rounds_with_faults(self: worker.Session, request: worker.Rounds) -> Any:
        if any(_threads(candidate) == CRASHES_LATER for candidate in request.candidates):
            os._exit(3)  # Without a word whose launch it was.
        return rounds(self, request)

    worker.Session._chooser = chooser
    worker.Session.rounds = rounds_with_faults
    worker.begin(connection)


def _threads(candidate: worker.Candidate) -> int:
    config = candidate.config
    return config.tile.threads if candidate.kind == "decode" else config.threads


def _broken(kernel: Any, fault: int) -> Any:
    calls = []

    def launch(*arguments: Any) -> None:
        calls.append(1)
        scale = {WRONG: 1.1, CHANGES: 1 + 1e-6 * len(calls)}.get(fault, 1.0)
        if fault != FORGETS_ROWS:
            kernel(*[value * scale if isinstance(value, float) else value for value in arguments])

    return launch


def compile_with_faults(connection: Connection) -> None:
    """Compiles nothing: a key's config says what happens."""
    connection.send(None)
    while True:
        key = connection.recv()
        threads = key.config.tile.threads if isinstance(key.config, DecodeConfig) else key.config.threads
        if threads == CRASHES:
            os.kill(os.getpid(), signal.SIGKILL)
        if threads == HANGS:
            time.sleep(FOR_EVER)
        connection.send((("library", os.getpid()), None) if threads == FINE else (None, "error: no such instruction"))


def dies_at_once(connection: Connection) -> None:
    """A process that cannot work at all."""
    os._exit(1)
