"""Signals while a sweep runs, beyond the Ctrl-C of the table of outcomes."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from bench.cli.interrupts import stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_asks_the_run_to_stop(number):
    stop = threading.Event()
    with stop_on_signals(stop):
        os.kill(os.getpid(), number)
        assert stop.wait(200)


def test_a_signal_that_was_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        stop = threading.Event()
        with stop_on_signals(stop):
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.wait(0.1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals(threading.Event()):
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
