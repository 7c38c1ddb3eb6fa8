"""A signal is never lost: what it could not interrupt any more ends, and then nothing else begins."""

import os
import signal

import pytest

from dflash_offline.errors import Interrupted
from dflash_offline.extract.signals import StopSignals

NUMBERS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("number", NUMBERS)
def test_work_that_ends_although_a_signal_came_is_followed_by_nothing_else(number):
    before = signal.getsignal(number)
    done = []
    with pytest.raises(Interrupted, match="complete"):
        with StopSignals() as signals:
            os.kill(os.getpid(), number)
            done.append("work")
        done.append("what follows")
    assert done == ["work"] and signals.count == 1
    assert signal.getsignal(number) is before


def test_an_error_of_the_work_is_not_replaced():
    with pytest.raises(ValueError, match="own"), StopSignals():
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("its own")


def test_without_a_signal_nothing_is_raised():
    with StopSignals() as signals:
        pass
    assert signals.count == 0


@pytest.mark.parametrize("number", NUMBERS)
def test_with_nothing_in_flight_a_signal_stops_at_once(number):
    with pytest.raises(KeyboardInterrupt), StopSignals(raise_at_once=True):
        os.kill(os.getpid(), number)
        raise AssertionError("it went on")
