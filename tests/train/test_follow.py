"""Training while extraction runs: the order is kept, every sample is trained once, and every wait can be ended."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from dflash_offline.cache import Cache, State
from dflash_offline.cache.lock import CacheLock
from dflash_offline.errors import DFlashOfflineError, Interrupted
from dflash_offline.train import arrivals, read_run_log, run_status, train
from dflash_offline.train import launch as launch_module
from dflash_offline.train.arrivals import Arrived
from dflash_offline.train.checkpoint import open_checkpoint
from dflash_offline.train.course import FollowedCourse, followed_schedule, wave_shards, waves_of
from dflash_offline.train.metrics import EvaluateEntry, StepEntry, WaveEntry
from dflash_offline.train.order import TrainingOrder
from dflash_offline.train.order_log import OrderLog, Wave
from dflash_offline.train.replica_run import ReplicaRun
from dflash_offline.train.waves import next_wave
from tests.train.made_up import hidden_states, make_cache, make_recipe

FOLLOW = {"follow": True, "epochs": 2, "log_every": 1, "evaluate_every": 6, "checkpoint_every": 4}


@pytest.fixture(autouse=True)
def polled_often(monkeypatch):
    monkeypatch.setattr(arrivals, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(arrivals, "POLL_SHARE", 0.5)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """A prepared cache of 110 documents without hidden states."""
    return make_cache(tmp_path_factory.mktemp("caches") / "prepared", documents=110, extract=False).path


@pytest.fixture
def growing(prepared, tmp_path) -> Cache:
    """A copy of it, to be extracted."""
    shutil.copytree(prepared, tmp_path / "cache")
    return Cache.open(tmp_path / "cache", threads=1)


def arrival_order(cache):
    """Held-out shards first, training shards in a random order."""
    heldout = cache.manifest.layout.num_heldout_shards
    return [*range(heldout), *(heldout + np.random.default_rng(5).permutation(cache.num_shards - heldout)).tolist()]


def commit(cache, shards, dropped=()):
    """Write shards as extraction does; ``dropped`` samples hold NaN."""
    for shard in shards:
        hidden, listed = hidden_states(cache, shard), []
        for sample in set(cache.shard_samples(shard)) & set(dropped):
            first = int(cache.samples.start[sample]) - shard * cache.shard_tokens
            hidden[first : first + int(cache.samples.length[sample])] = float("nan")
            listed.append({"sample": sample, "row": int(cache.samples.row[sample]), "id": "x", "reason": "not-finite"})
        place = arrival_order(cache).index(shard)
        fields = {"dropped": listed, "run": {"started_at": 1e9 + place, "finished_at": 1e9 + place + 1}}
        cache.write_shard(shard, cache.encoding.to_numpy(cache.encoding.encode(hidden)), fields)


class Extraction(threading.Thread):
    """Commits shards one after another under the cache's lock, then writes the state that says how it ended."""

    def __init__(self, cache, shards=None, *, dropped=(), aside=(), before=lambda shard: None):
        super().__init__(daemon=True)
        self.cache, self.dropped, self.aside, self.before = cache, dropped, aside, before
        self.shards = [s for s in (arrival_order(cache) if shards is None else shards) if s not in aside]
        self.locked = threading.Event()
        self.start()
        self.locked.wait()

    def run(self):
        with CacheLock(self.cache.path):
            self.locked.set()
            for shard in self.shards:
                self.before(shard)
                commit(self.cache, [shard], self.dropped)
            aside = [{"shard": shard, "error": "boom"} for shard in self.aside]
            finished = not set(self.cache.missing_shards()) - set(self.aside)
            if finished or aside:
                self.cache.write_state(State(finished=finished, set_aside=aside, dropped=len(self.dropped)))


def of(run, *kinds):
    return [entry for entry in read_run_log(run) if isinstance(entry, kinds)]


def curve(run):
    return [entry.model_dump(exclude={"run"}) for entry in of(run, StepEntry, EvaluateEntry, WaveEntry)]


def waves_in(run):
    return [Wave.model_validate_json(line) for line in (run / "order.jsonl").read_text().splitlines()]


def trainable(cache):
    return (cache.samples.split == 0) & (cache.samples.anchors > 0)


def until(condition, seconds=100):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def steps_in(run):
    log = run / "log.jsonl"
    return log.read_bytes().count(b'"kind": "step"') if log.is_file() else 0


@pytest.fixture(scope="module")
def whole(prepared, tmp_path_factory):
    """A run that followed extraction without interruption: its cache, folder and summary."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(prepared, folder / "cache")
    cache = Cache.open(folder / "cache", threads=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrivals, "POLL_SECONDS", 0.01)
        extraction = Extraction(cache)
        summary = train(make_recipe(cache.path, folder / "run", training=FOLLOW), progress=False)
    extraction.join()
    return cache, folder / "run", summary


# ---- the order alone -----------------------------------------------------------------------------------------------


def made_up_order(shards=23, lanes=3, rows_per_step=2, seed=0):
    rng = np.random.default_rng(seed)
    n = shards * 9
    return TrainingOrder(
        index=np.arange(n) * 2 + 1,
        shard=np.sort(np.arange(n) % shards) + 4,
        lengths=rng.integers(8, 60, n),
        blocks=rng.integers(1, 9, n),
        context_tokens=128,
        anchor_slots=32,
        rows_per_step=rows_per_step,
        lanes=lanes,
        window_shards=2,
        seed=seed,
    )


def followed(order, arrived, epochs=2, max_steps=None, dropped=None, set_aside=()):
    """The course after every shard has come, one by one, and its waves."""
    waves, there = [], []
    course = FollowedCourse(order, followed_schedule(order, epochs, max_steps), max_steps, lambda number: None)
    for shard in [*arrived, None]:
        there += [] if shard is None else [shard]
        over = shard is None
        seen = Arrived(tuple(there), dropped or {}, tuple(set_aside) if over else (), over)
        while not (waves and waves[-1].last) and (wave := next_wave(order, waves, seen)) is not None:
            waves.append(wave)
            course.add(wave)
    assert waves[-1].last
    return course, waves


def trained(course, order, world=1):
    """How often each (epoch, sample) is planned, over all replicas."""
    shard_of = np.zeros(int(order.index.max()) + 1, np.int64)
    shard_of[order.index] = order.shards[np.searchsorted(order.shards, order.shards)][order._shard_number]
    count, steps = Counter(), set()
    for replica in range(world):
        planned = list(course.planned(0, shard_of, replica, world))
        steps.add(len(planned))
        count.update((step.epoch, int(sample)) for step in planned for row in step.rows for sample in row)
    assert steps == {course.total_steps}
    return count


@pytest.mark.parametrize("rows_per_step", [1, 2, 7])
@pytest.mark.parametrize("world", [1, 3])
def test_waves_hold_every_sample_once_in_the_steps_of_the_plan(rows_per_step, world):
    order = made_up_order(rows_per_step=rows_per_step)
    arrived = np.random.default_rng(1).permutation(order.shards).tolist()
    course, waves = followed(order, arrived)
    assert [shard for wave in waves for shard in wave.shards] == arrived
    assert [len(wave.shards) for wave in waves] == [wave_shards(order)] * 3 + [23 - 3 * wave_shards(order)]
    assert len(waves) == waves_of(order)
    count = trained(course, order, world)
    assert count == Counter({(epoch, int(sample)): 1 for epoch in range(2) for sample in order.index})
    planned = followed_schedule(order, 2, None)
    assert course.total_steps <= planned.total_steps and course.left_out() == {}
    if rows_per_step > 1:
        assert course.total_steps == planned.total_steps
        assert course.order is order, "later epochs have the usual order"


def test_the_course_depends_on_the_order_of_arrival_alone():
    order = made_up_order()
    arrived = np.random.default_rng(2).permutation(order.shards).tolist()
    one, _ = followed(order, arrived)
    waves, there = [], Arrived(tuple(arrived), {}, (), True)
    while not (waves and waves[-1].last):
        waves.append(next_wave(order, waves, there))  # all had come before the first look
    schedule = followed_schedule(order, 2, None)
    other = FollowedCourse(order, schedule, None, lambda number: None, waves)
    shard_of = np.zeros(1000, np.int64)
    rows = [[row.tolist() for step in course.planned(0, shard_of) for row in step.rows] for course in (one, other)]
    assert rows[0] == rows[1]
    resumed = [[row.tolist() for row in step.rows] for step in other.planned(5, shard_of)]
    assert [row for step in resumed for row in step] == rows[0][
        sum(len(s.rows) for s in list(one.planned(0, shard_of))[:5]) :
    ]
    other_arrival, _ = followed(order, arrived[::-1])
    assert [row.tolist() for step in other_arrival.planned(0, shard_of) for row in step.rows] != rows[0]


def test_lost_shards_and_samples_shorten_the_run_and_the_last_wave_is_never_empty():
    order = made_up_order(shards=14)
    *arrived, lost = np.random.default_rng(3).permutation(order.shards).tolist()
    gone = order.index[order.samples_of(np.array(arrived[-1:]))].tolist()  # the last to come has no good sample
    dropped = {arrived[-1]: tuple(gone), arrived[0]: (int(order.index[order.samples_of(np.array(arrived[:1]))][0]), 0)}
    course, waves = followed(order, arrived, dropped=dropped, set_aside=[lost])
    assert waves[-1].last and waves[-1].set_aside == [lost] and len(waves) == 2
    assert course.left_out() == {"shard-set-aside": 9, "not-finite": 10}
    count = trained(course, order)
    away = {*gone, dropped[arrived[0]][0], *order.index[order.samples_of(np.array([lost]))].tolist()}
    expected = set(order.index.tolist()) - away
    assert count == Counter({(epoch, sample): 1 for epoch in range(2) for sample in expected})
    planned = followed_schedule(order, 2, None).total_steps
    assert course.total_steps < planned
    assert course.rate_steps(0) == planned, "known before the first step"
    assert course.rate_steps(course.total_steps - 1) == course.total_steps
    with pytest.raises(DFlashOfflineError, match="no training sample is left"):
        next_wave(order, [], Arrived((), {}, tuple(order.shards.tolist()), True))


def test_more_steps_than_the_limit_are_not_planned():
    order = made_up_order()
    for limit in (1, 5, 30):
        course, _ = followed(order, order.shards.tolist(), max_steps=limit)
        assert sum(1 for _ in course.planned(0, np.zeros(1000, np.int64))) == course.total_steps == limit


def test_the_order_log_keeps_whole_lines_and_refuses_other_ones(tmp_path):
    log = OrderLog(tmp_path)
    for number in range(3):
        log.append(Wave(wave=number, shards=[number], dropped=[]))
    prefix = log.prefix(2)
    log.close()
    path = tmp_path / "order.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"wave": 3, "sha')  # cut off by a crash
    log = OrderLog(tmp_path)
    assert [wave.shards for wave in log.waves] == [[0], [1], [2]]
    log.check(prefix)
    log.close()
    assert path.read_bytes().endswith(b"\n")
    path.write_bytes(path.read_bytes().replace(b'"shards":[1]', b'"shards":[9]'))
    with pytest.raises(DFlashOfflineError, match="first 2 lines are not those"):
        OrderLog(tmp_path).check(prefix)
    path.write_bytes(b'{"wave": 0}\n')
    with pytest.raises(DFlashOfflineError, match=r"order\.jsonl is damaged \(line 1"):
        OrderLog(tmp_path)


# ---- whole runs ----------------------------------------------------------------------------------------------------


def same_run(run, whole, bits=True):
    _, other, _ = whole
    assert [wave.shards for wave in waves_in(run)] == [wave.shards for wave in waves_in(other)]
    if bits:
        assert curve(run) == curve(other)
        ours, theirs = open_checkpoint(run).weights(), open_checkpoint(other).weights()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for mine, wanted in zip(of(run, StepEntry), of(other, StepEntry), strict=True):
        assert (mine.step, mine.epoch, mine.samples, mine.tokens, mine.blocks) == (
            (wanted.step, wanted.epoch, wanted.samples, wanted.tokens, wanted.blocks)
        )
        assert mine.loss == pytest.approx(wanted.loss, rel=2e-4)


def test_a_run_that_follows_trains_every_sample_once_an_epoch(whole):
    cache, run, summary = whole
    wanted = trainable(cache)
    assert summary["samples"] == 2 * wanted.sum()
    assert summary["tokens"] == 2 * cache.samples.length[wanted].sum()
    waves, said = waves_in(run), of(run, WaveEntry)
    assert len(waves) > 2 and [wave.last for wave in waves] == [False] * (len(waves) - 1) + [True]
    assert [shard for wave in waves for shard in wave.shards] == [
        shard for shard in arrival_order(cache) if not cache.is_heldout(shard)
    ]
    assert [entry.wave for entry in said] == list(range(len(waves)))
    assert sum(entry.samples for entry in said) == wanted.sum()
    assert [entry.step for entry in said] == [sum(e.steps for e in said[:i]) for i in range(len(said))]
    evaluations = of(run, EvaluateEntry)
    assert evaluations and {entry.documents for entry in evaluations} == {int((cache.samples.split == 1).sum())}
    assert run_status(run)["state"] == "finished"
    assert train(make_recipe(cache.path, run, training=FOLLOW), progress=False)["already_finished"]
    state = open_checkpoint(run).state
    assert state["order_log"]["bytes"] == len((run / "order.jsonl").read_bytes())


def test_training_begins_before_extraction_ends_and_counts_the_wait(growing, tmp_path, caplog):
    run, gone_on = tmp_path / "run", threading.Event()
    last = arrival_order(growing)[-1]
    extraction = Extraction(growing, before=lambda shard: shard == last and gone_on.wait(100))

    def go_on():
        until(lambda: steps_in(run) >= 3)
        time.sleep(0.5)
        gone_on.set()

    threading.Thread(target=go_on, daemon=True).start()
    with caplog.at_level(logging.INFO, logger="dflash_offline"):
        summary = train(make_recipe(growing.path, run, training=FOLLOW), progress=True)
    extraction.join()
    assert summary["samples"] == 2 * trainable(growing).sum()
    assert max(entry.run["waiting_share"] for entry in of(run, StepEntry)) > 0.5
    said = [record.getMessage() for record in caplog.records if "waiting for extraction" in record.getMessage()]
    assert any(f"of {growing.num_shards - growing.manifest.layout.num_heldout_shards} in all" in text for text in said)
    assert "nobody is extracting" not in caplog.text


def test_stopped_and_gone_on_at_every_wave_it_is_the_same_run_bit_for_bit(growing, whole, tmp_path):
    """Extraction and training are both stopped in turn: training waits, is stopped, and goes on with more shards."""
    run, order, rng = tmp_path / "run", arrival_order(growing), np.random.default_rng(7)
    recipe = make_recipe(growing.path, run, training=FOLLOW)
    there, stops, waited = growing.manifest.layout.num_heldout_shards, 0, 0
    commit(growing, order[:there])
    while True:
        more = min(len(order), there + int(rng.integers(2, 6)))
        Extraction(growing, order[there:more]).join()
        there = more
        stop, seen = threading.Event(), steps_in(run)

        def end(stop=stop, seen=seen, steps=int(rng.integers(1, 6))):
            limit = time.monotonic() + 1.0  # it may be waiting for shards by then
            while steps_in(run) < seen + steps and time.monotonic() < limit:
                time.sleep(0.005)
            stop.set()

        if there < len(order):
            threading.Thread(target=end, daemon=True).start()
        try:
            train(recipe, progress=False, stop_event=stop)
            break
        except Interrupted as interrupted:
            stops, waited = stops + 1, waited + ("waiting for extraction" in str(interrupted))
    assert stops >= 3 and waited >= 1
    same_run(run, whole)


def train_until_killed(recipe):
    """In a process of its own."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    train(recipe, progress=False)


def test_killed_at_random_moments_it_is_the_same_run_bit_for_bit(growing, whole, tmp_path, from_a_server):
    run, rng, order = tmp_path / "run", np.random.default_rng(11), arrival_order(growing)
    recipe = make_recipe(growing.path, run, training={**FOLLOW, "checkpoint_every": 2})
    there = len(order) // 2
    Extraction(growing, order[:there]).join()
    for kill in range(3):
        child = from_a_server.Process(target=train_until_killed, args=(recipe,))
        child.start()
        if kill == 0:
            until(lambda: steps_in(run) >= 3)
        else:
            extraction = Extraction(growing, order[there : there + 4])
            seen, wanted = steps_in(run), int(rng.integers(1, 4))
            limit = time.monotonic() + 1.5
            while steps_in(run) < seen + wanted and time.monotonic() < limit:
                time.sleep(0.002)
            extraction.join()
            there += 4
        child.kill()
        child.join()
    Extraction(growing, order[there:]).join()
    train(recipe, progress=False)
    _, other, _ = whole
    kept = [[e for e in curve(folder) if e["kind"] != "evaluate"] for folder in (run, other)]
    assert kept[0] == kept[1]
    same_run(run, whole, bits=False)


@pytest.fixture
def from_a_server(monkeypatch):
    """Replicas come from a server that has imported everything once."""
    preload = ["dflash_offline.train.loop", "transformers.models.qwen3.modeling_qwen3", "pandas", "torch.distributed"]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preload)
    monkeypatch.setitem(launch_module.launch.__kwdefaults__, "context", "forkserver")
    return context


def test_it_goes_on_with_other_numbers_of_replicas(growing, whole, tmp_path, from_a_server):
    """Two replicas are stopped while they wait, one goes on, and three end it."""
    run, order = tmp_path / "run", arrival_order(growing)
    half = growing.manifest.layout.num_heldout_shards + 8
    Extraction(growing, order[:half]).join()
    stop = threading.Event()

    def end():
        until(lambda: third_wave_is_done(run))
        time.sleep(0.5)  # by now it waits, as a rule
        stop.set()

    threading.Thread(target=end, daemon=True).start()
    with pytest.raises(Interrupted, match=r"step \d+ of \d+ is in .*the same command goes on"):
        train(make_recipe(growing.path, run, training={**FOLLOW, "cpu_replicas": 2}), progress=False, stop_event=stop)
    stop = threading.Event()
    Extraction(growing, order[half:])

    def end_soon():
        seen = steps_in(run)
        until(lambda: steps_in(run) >= seen + 2)
        stop.set()

    threading.Thread(target=end_soon, daemon=True).start()
    with pytest.raises(Interrupted, match=r"step \d+ of \d+ is in"):
        train(make_recipe(growing.path, run, training=FOLLOW), progress=False, stop_event=stop)
    train(make_recipe(growing.path, run, training={**FOLLOW, "cpu_replicas": 3}), progress=False)
    same_run(run, whole, bits=False)


def third_wave_is_done(run):
    """Whether the steps of waves 0 to 2 are done: of eight shards, the last two are kept for the wave after them."""
    waves = of(run, WaveEntry) if (run / "log.jsonl").is_file() else []
    return len(waves) == 3 and steps_in(run) >= sum(entry.steps for entry in waves)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("first", ["heldout", "training", "later"])
def test_a_signal_ends_every_wait(growing, tmp_path, monkeypatch, number, first):
    run, heldout, waits = tmp_path / "run", growing.manifest.layout.num_heldout_shards, threading.Event()
    say = ReplicaRun._say_what_is_waited_for
    monkeypatch.setattr(ReplicaRun, "_say_what_is_waited_for", lambda self: (say(self), waits.set()))
    commit(growing, arrival_order(growing)[: {"heldout": 0, "training": heldout, "later": heldout + 8}[first]])
    recipe = make_recipe(growing.path, run, training=FOLLOW)

    def send():
        if first == "training":
            until(lambda: (run / "order.jsonl").is_file())
        if first == "later":
            until(lambda: third_wave_is_done(run))
        if first == "heldout":
            time.sleep(0.3)
        else:
            waits.clear()
            waits.wait(100)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    began = time.monotonic()
    with pytest.raises(Interrupted, match="the same command goes on") as caught:
        train(recipe, progress=False)
    assert time.monotonic() - began < 60
    if first == "later":
        assert "stopped while waiting for extraction; step" in str(caught.value)
        assert open_checkpoint(run).step == steps_in(run)


def test_lost_samples_and_shards_are_counted_and_not_trained(growing, tmp_path):
    heldout, order = growing.manifest.layout.num_heldout_shards, arrival_order(growing)
    aside, first = order[-2], order[heldout]
    usable = [s for s in growing.shard_samples(first) if trainable(growing)[s]]
    extraction = Extraction(growing, dropped=usable[:2], aside=(aside,))
    recipe = make_recipe(growing.path, tmp_path / "run", training={**FOLLOW, "allow_set_aside": True})
    summary = train(recipe, progress=False)
    extraction.join()
    lost = int(trainable(growing)[list(growing.shard_samples(aside))].sum())
    left_out = {"shard-set-aside": lost, "not-finite": 2}
    assert summary["samples_left_out"] == left_out
    assert of(tmp_path / "run", WaveEntry)[-1].samples_left_out == left_out
    assert summary["samples"] == 2 * (trainable(growing).sum() - lost - 2)
    assert waves_in(tmp_path / "run")[-1].set_aside == [aside]
    assert summary["steps"] == of(tmp_path / "run", StepEntry)[-1].step
    assert run_status(tmp_path / "run")["state"] == "finished"


@pytest.mark.parametrize("replicas", [None, 2])
def test_extraction_that_gave_up_ends_the_run_and_keeps_what_is_done(growing, tmp_path, from_a_server, replicas):
    run, (*_, late, aside) = tmp_path / "run", arrival_order(growing)
    extraction = Extraction(
        growing, aside=(aside,), before=lambda shard: shard == late and until(lambda: steps_in(run) > 0)
    )
    recipe = make_recipe(growing.path, run, training={**FOLLOW, "cpu_replicas": replicas})
    with pytest.raises(DFlashOfflineError, match=f"(?s)set aside 1 shards.*{aside}.*boom.*allow_set_aside") as caught:
        train(recipe, progress=False)
    extraction.join()
    assert not isinstance(caught.value, Interrupted)
    assert open_checkpoint(run).step == steps_in(run) > 0


def test_nobody_at_work_is_told_once_and_waited_for(growing, tmp_path, caplog):
    run, heldout = tmp_path / "run", growing.manifest.layout.num_heldout_shards
    commit(growing, arrival_order(growing)[: heldout + 2])

    def come_back():
        until(lambda: "nobody is extracting" in caplog.text)
        Extraction(growing, arrival_order(growing)[heldout + 2 :])

    threading.Thread(target=come_back, daemon=True).start()
    recipe = make_recipe(growing.path, run, training={**FOLLOW, "epochs": 1})
    assert train(recipe, progress=False)["samples"] == trainable(growing).sum()
    assert caplog.text.count("nobody is extracting") == 1


def test_without_follow_an_unfinished_cache_is_refused_and_a_followed_run_goes_on_with_a_finished_one(
    growing, whole, tmp_path
):
    run, order = tmp_path / "run", arrival_order(growing)
    half = growing.manifest.layout.num_heldout_shards + 8
    commit(growing, order[:half])
    stop = threading.Event()
    threading.Thread(target=lambda: (until(lambda: steps_in(run) >= 2), stop.set()), daemon=True).start()
    with pytest.raises(Interrupted):
        train(make_recipe(growing.path, run, training=FOLLOW), progress=False, stop_event=stop)
    plain = make_recipe(growing.path, run, training={**FOLLOW, "follow": False})
    with pytest.raises(DFlashOfflineError, match="not finished"):
        train(plain, progress=False)
    Extraction(growing, order[half:]).join()
    train(plain, progress=False)
    same_run(run, whole)


def test_an_order_log_that_is_lost_is_refused(growing, tmp_path):
    run, stop = tmp_path / "run", threading.Event()
    commit(growing, arrival_order(growing))
    recipe = make_recipe(growing.path, run, training=FOLLOW)
    threading.Thread(target=lambda: (until(lambda: steps_in(run) >= 2), stop.set()), daemon=True).start()
    with pytest.raises(Interrupted):
        train(recipe, progress=False, stop_event=stop)
    (run / "order.jsonl").unlink()
    with pytest.raises(DFlashOfflineError, match=r"order\.jsonl is damaged"):
        train(recipe, progress=False)
