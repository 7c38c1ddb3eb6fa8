"""The arithmetic of the progress line, with a clock that the test turns."""

from __future__ import annotations

import logging
import os

import pytest

from dflash_offline.extract.messages import LineReader, send
from dflash_offline.extract.progress import (
    LOG_SECONDS,
    Display,
    Meter,
    ReplicaView,
    byte_quantity,
    duration,
    quantity,
)


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ready_meter(clock: Clock, **counts: int) -> Meter:
    meter = Meter(total_shards=10, total_tokens=10_000, clock=clock, **counts)
    meter.replicas = [ReplicaView(device="cpu (1 threads)", doing="shard 3", since=clock())]
    return meter


def test_rate_counts_this_run_only_and_time_left_follows_from_it(clock):
    meter = ready_meter(clock, done_shards=4, done_tokens=4_000)
    clock.seconds += 10
    meter.shard_done(0, tokens=1_000, written=50_000_000)
    assert meter.mean_tokens_per_second() == pytest.approx(100)
    assert meter.now() == (pytest.approx(100), pytest.approx(5e6))
    assert meter.seconds_left() == pytest.approx(50)
    line = meter.line()
    assert "shards 5/10" in line and "tokens 5k/10k (50.0 %)" in line and "ETA 0:00:50" in line
    assert "100 tokens/s now, 100 mean" in line and "50 MB written, 5 MB/s" in line


def test_rate_now_forgets_what_ended_more_than_a_minute_ago(clock):
    meter = ready_meter(clock)
    clock.seconds += 30
    meter.shard_done(0, tokens=6_000, written=1)
    clock.seconds += 100
    meter.shard_done(0, tokens=600, written=1)
    assert meter.now()[0] == pytest.approx(10)
    assert meter.mean_tokens_per_second() == pytest.approx(6_600 / 130)


def test_no_rate_yet_gives_no_time_left(clock):
    meter = Meter(total_shards=1, total_tokens=10, clock=clock)
    assert meter.seconds_left() is None
    assert "ETA ?" in meter.line()


def test_line_says_when_the_disk_is_the_slower_one(clock):
    meter = ready_meter(clock)
    clock.seconds += 100
    meter.replicas[0].waited = 4.0
    assert "waiting for the disk" not in meter.line()
    meter.replicas[0].waited = 25.0
    assert "waiting for the disk 25 % of the time" in meter.line()


def test_replica_line_says_what_it_does_and_how_fast(clock):
    meter = ready_meter(clock)
    clock.seconds += 10
    meter.shard_done(0, tokens=2_000, written=1)
    assert meter.replica_line(0) == "  replica 0 cpu (1 threads): shard 3 · 1 shards · 200 tokens/s"


def test_without_a_terminal_the_state_goes_to_the_log_every_half_minute(clock, caplog):
    display = Display(ready_meter(clock), progress=True)
    with caplog.at_level(logging.INFO, "dflash_offline.extract"):
        display.update()
        assert not caplog.records
        clock.seconds += LOG_SECONDS
        display.update()
        assert [record.message for record in caplog.records] == [display.meter.line(), display.meter.replica_line(0)]
        display.update()
        assert len(caplog.records) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3_661, "1:01:01"), (90_061, "1 d 1:01:01")]
)
def test_duration(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"), [(7, "7"), (999.6, "1k"), (1_000, "1k"), (45_612, "45.6k"), (1.234e6, "1.23M"), (5e13, "50T")]
)
def test_quantity(number, text):
    assert quantity(number) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (812, "812 B"), (3_456, "3.46 kB"), (640_000, "640 kB"), (1.25e9, "1.25 GB"), (1.12e14, "112 TB")],
)
def test_byte_quantity(number, text):
    assert byte_quantity(number) == text


def test_messages_arrive_whole_however_they_are_cut_and_a_half_one_of_a_dead_writer_is_dropped():
    read_end, write_end = os.pipe()
    reader = LineReader(read_end)
    assert reader.messages() == [] and not reader.closed
    with os.fdopen(write_end, "w") as stream:
        send(stream, {"type": "job", "shard": 7, "text": "zwei\nZeilen"})
        stream.write('{"type": "jo')
        stream.flush()
        assert reader.messages() == [{"type": "job", "shard": 7, "text": "zwei\nZeilen"}]
        stream.write('b", "shard": 8}\n{"type": "cut')
    assert reader.messages() == [{"type": "job", "shard": 8}]
    assert reader.closed
    reader.close()
