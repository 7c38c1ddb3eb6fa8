"""A bar on a terminal, plain lines elsewhere."""

import io
import logging
import sys

import pytest

from dflash_offline.extract.progress import LOG_SECONDS
from dflash_offline.train.metrics import StepEntry
from dflash_offline.train.progress import Display


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def entry(step: int) -> StepEntry:
    rates = {"tokens_per_second": 1234.0, "blocks_per_second": 50.0, "tflops": 0.5, "matrix_share": 0.25}
    return StepEntry(
        step=step,
        epoch=0,
        loss=2.5,
        cross_entropy=2.5,
        accuracy=0.25,
        accuracy_by_position=[0.25],
        expected_acceptance_length=1.5,
        learning_rate=1e-3,
        gradient_norm=1.0,
        samples=1,
        tokens=1,
        blocks=1,
        anchors_per_token=1.0,
        token_fill=1.0,
        slot_fill=1.0,
        run={**rates, "seconds": 1.0, "waiting_share": 0.0, "memory": 10**9},
    )


def show(progress: bool, steps: int = 40) -> None:
    clock = Clock()
    with Display(steps + 10, 10, progress, clock) as display:
        for step in range(11, steps + 11):
            clock.now += LOG_SECONDS / 10
            display.step(steps + 10)
            display.entry(entry(step), None)


def test_a_log_has_a_line_now_and_then_and_one_at_the_end(caplog, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with caplog.at_level(logging.INFO, logger="dflash_offline"):
        show(progress=True)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" ")[1] for line in lines] == ["20/50", "30/50", "40/50", "50/50"]
    assert "loss 2.500" in lines[0] and lines[0].endswith("ETA 0:01:30") and lines[-1].endswith("ETA 0:00:00")
    assert sys.stderr.getvalue() == ""


def test_a_terminal_has_a_bar_and_no_lines(caplog, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with caplog.at_level(logging.INFO, logger="dflash_offline"):
        show(progress=True)
    assert "50/50" in terminal.getvalue() and "loss 2.500" in terminal.getvalue() and not caplog.records


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_without_progress_nothing_is_shown(caplog, monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    with caplog.at_level(logging.INFO, logger="dflash_offline"):
        show(progress=False)
    assert sys.stderr.getvalue() == "" and not caplog.records
