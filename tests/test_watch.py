"""The live view: plain lines off a terminal, a redrawn view on one, and an end when the job has ended."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from dflash_offline.errors import UsageError
from dflash_offline.train import train
from dflash_offline.watch import show, stage_of, watch
from tests.train.made_up import make_cache, make_recipe


class Clock:
    """Time that passes only by sleeping, when something may happen."""

    def __init__(self, *events):
        self.now, self.events, self.slept = 1_000.0, list(events), []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept.append(seconds)
        if self.events:
            self.events.pop(0)()


def watched(path: Path, clock: Clock, terminal: bool = False, **settings):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100)
    status = watch(path, console=console, clock=clock, sleep=clock.sleep, **settings)
    return status, console.file.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watched")
    cache = make_cache(folder / "cache", documents=30)
    train(make_recipe(cache.path, folder / "run", training={"max_steps": 6}), progress=False)
    return folder / "run"


def test_a_finished_run_is_said_once(run):
    clock = Clock()
    status, text = watched(run, clock)
    assert clock.slept == [] and status["state"] == "finished"
    (line,) = text.splitlines()
    assert line.startswith("finished · step 6/6 · loss ") and f"loss {status['loss']:.3f}" in line
    assert "checkpoint step-000006" in line


def test_a_run_is_followed_from_start_to_end(run, tmp_path):
    """The log grows, a checkpoint comes, the lock is held until the last: lines only when there is news."""
    import shutil

    from dflash_offline.cache.lock import CacheLock

    grown = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(grown / "locks", ignore_errors=True)
    lines = (grown / "log.jsonl").read_text().splitlines(keepends=True)
    checkpoints = tmp_path / "later"
    (grown / "checkpoints").rename(checkpoints)
    (grown / "log.jsonl").write_text("")
    lock = CacheLock(grown, role="train")
    lock.acquire()
    kinds = [json.loads(line)["kind"] for line in lines]
    first = kinds.index("step") + 1

    def end():
        (grown / "log.jsonl").write_text("".join(lines))
        checkpoints.rename(grown / "checkpoints")
        lock.release()

    clock = Clock(
        lambda: (grown / "log.jsonl").write_text("".join(lines[:first])),
        lambda: None,
        lambda: (grown / "log.jsonl").write_text("".join(lines[:first]) + lines[-1][:9]),
        end,
    )
    _, text = watched(grown, clock, interval=7.0)
    assert clock.slept == [7.0] * 4
    said = text.splitlines()
    assert [line.split(" · ")[1] for line in said] == ["step 0/6", "step 3/6", "step 6/6"]
    assert [line.split(" · ")[0] for line in said] == ["running", "running", "finished"]


def test_an_interrupted_run_ends_the_watch(run, tmp_path):
    import shutil

    cut = shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(cut / "checkpoints")
    status, text = watched(cut, Clock())
    assert status["state"] == "interrupted" and text.startswith("interrupted · ")


def test_a_cache_is_followed_and_refreshes_are_bounded(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=20, finish=False)
    missing = cache.path / "receipts" / "000001.json"
    receipt = missing.read_bytes()
    missing.unlink()
    status, text = watched(cache.path, Clock())
    assert stage_of(status) == "stopped" and f"shards {cache.num_shards - 1}/{cache.num_shards}" in text
    for path in (cache.path / "receipts").glob("*.json"):
        path.rename(tmp_path / path.name)
    clock = Clock()
    status, text = watched(cache.path, clock, refreshes=3)
    assert stage_of(status) == "prepared" and len(clock.slept) == 2 and len(text.splitlines()) == 1

    def all_done():
        missing.write_bytes(receipt)
        for path in tmp_path.glob("0*.json"):
            path.rename(cache.path / "receipts" / path.name)

    status, text = watched(cache.path, Clock(all_done))
    assert stage_of(status) == "complete"
    assert [line.split(" · ")[0] for line in text.splitlines()] == ["prepared", "complete"]


def test_on_a_terminal_the_view_is_redrawn_with_a_bar_and_the_workers(run, tmp_path):
    _, text = watched(run, Clock(), terminal=True)
    assert "100.0 %" in text and "\x1b[" in text and "finished" in text and "held out" in text
    cache = make_cache(tmp_path / "cache[red]", documents=20)
    _, text = watched(cache.path, Clock(), terminal=True)
    assert "complete" in text and "[red]" in text, "folder names are no markup"


def test_wrong_use(tmp_path):
    with pytest.raises(UsageError, match="above 0"):
        watch(tmp_path, interval=0)
    with pytest.raises(UsageError, match="not a cache"):
        watch(tmp_path, console=Console(file=io.StringIO()))


def test_status_says_everything_once_for_people(run):
    """``status`` without options: the view itself, whole paths also where the output is narrow."""
    console = Console(file=io.StringIO(), width=60)
    status = show(run, console=console, clock=Clock())
    text = console.file.getvalue()
    assert text.startswith(f"finished  {run}\n") and "100.0 %" in text
    assert re.search(rf"^loss +{status['loss']:.3f}", text, re.MULTILINE)
    cache = Path(status["cache"])
    console = Console(file=io.StringIO(), width=60)
    status = show(cache, console=console, clock=Clock())
    assert f"{status['target']}, layers" in console.file.getvalue()
    assert "times smaller than bf16" in console.file.getvalue()
