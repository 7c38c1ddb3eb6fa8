"""Several replicas, each in a process of its own: the same losses, every sample once, and no hang when one fails."""

import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dflash_offline.cache.lock import lock_holders
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError
from dflash_offline.train import launch as launch_module
from dflash_offline.train import read_run_log, train
from dflash_offline.train.checkpoint import open_checkpoint
from dflash_offline.train.metrics import EvaluateEntry, StartEntry, StepEntry
from dflash_offline.train.replicas import Place
from dflash_offline.train.setup import choose_device
from tests.train.made_up import make_cache, make_recipe

TRAINING = {"epochs": 2, "log_every": 1, "evaluate_every": 6, "checkpoint_every": 4}


@pytest.fixture(autouse=True)
def forked_from_a_server(monkeypatch):
    """Replicas come from a server that has imported everything once; the environment is set after that."""
    preload = ["dflash_offline.train.loop", "transformers.models.qwen3.modeling_qwen3", "pandas", "torch.distributed"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    monkeypatch.setitem(launch_module.launch.__kwdefaults__, "context", "forkserver")


def entries(run, kind):
    return [entry for entry in read_run_log(run) if isinstance(entry, kind)]


def same_curve(ours, theirs, rel=2e-4):
    for kind in (StepEntry, EvaluateEntry):
        mine, other = entries(ours, kind), entries(theirs, kind)
        assert [entry.step for entry in mine] == [entry.step for entry in other]
        for a, b in zip(mine, other, strict=True):
            assert a.loss == pytest.approx(b.loss, rel=rel)
            assert a.blocks == b.blocks
            if kind is StepEntry:
                assert (a.samples, a.tokens, a.token_fill) == (b.samples, b.tokens, b.token_fill)
                assert a.gradient_norm == pytest.approx(b.gradient_norm, rel=10 * rel)


@pytest.fixture(scope="module")
def alone(small_cache, tmp_path_factory):
    run = tmp_path_factory.mktemp("alone") / "run"
    return run, train(make_recipe(small_cache, run, training=TRAINING), progress=False)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_many_replicas_have_the_losses_of_one(alone, small_cache, tmp_path, world):
    """Four replicas over three lanes: one of them has rows of weight 0 only."""
    run, summary = alone
    recipe = make_recipe(small_cache, tmp_path / "run", training={**TRAINING, "cpu_replicas": world})
    ours = train(recipe, progress=False)
    same_curve(tmp_path / "run", run)
    assert {k: ours[k] for k in ("steps", "samples", "tokens", "blocks")} == {
        k: summary[k] for k in ("steps", "samples", "tokens", "blocks")
    }
    assert entries(tmp_path / "run", StartEntry)[0].run["replicas"] == world
    for name, tensor in open_checkpoint(run).weights().items():
        difference = (open_checkpoint(tmp_path / "run").weights()[name] - tensor).abs().max()
        assert difference < 0.02 * tensor.abs().max(), name
    assert train(recipe, progress=False)["already_finished"]


def test_a_run_goes_on_with_other_numbers_of_replicas(alone, small_cache, tmp_path):
    """Stopped at random steps and gone on with 1, 2 or 3 replicas: one curve, every sample once an epoch."""
    run, summary = alone
    rng, stops = random.Random(3), 0
    for world in (2, 1, 3, None):
        recipe = make_recipe(small_cache, tmp_path / "run", training={**TRAINING, "cpu_replicas": world})
        stop = threading.Event()
        if world is not None:
            log, wanted = tmp_path / "run" / "log.jsonl", rng.randint(1, 3)

            def watch(log=log, wanted=wanted, stop=stop):
                seen = log.read_bytes().count(b"\n") if log.is_file() else 0
                while not log.is_file() or log.read_bytes().count(b"\n") < seen + 1 + wanted:
                    time.sleep(0.002)
                stop.set()

            threading.Thread(target=watch, daemon=True).start()
        try:
            ours = train(recipe, progress=False, stop_event=stop)
        except Interrupted:
            stops += 1
    assert stops >= 2
    same_curve(tmp_path / "run", run)
    assert (ours["samples"], ours["tokens"], ours["blocks"]) == tuple(
        summary[k] for k in ("samples", "tokens", "blocks")
    )


def test_two_replicas_stopped_and_gone_on_write_the_same_bits(small_cache, tmp_path):
    training = {**TRAINING, "cpu_replicas": 2, "log_every": 3}
    train(make_recipe(small_cache, tmp_path / "whole", training=training), progress=False)
    recipe, stop = make_recipe(small_cache, tmp_path / "cut", training=training), threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        train(recipe, progress=False, stop_event=stop)
    train(recipe, progress=False)

    def numbers(run):
        kinds = (StepEntry, EvaluateEntry)
        return [entry.model_dump(exclude={"run"}) for entry in read_run_log(run) if isinstance(entry, kinds)]

    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def break_shard(cache, shard):
    stored = cache.path / cache.receipt(shard).objects["codes"].path
    data = bytearray(stored.read_bytes())
    data[100] ^= 1
    stored.write_bytes(data)


def test_the_error_of_one_replica_ends_all_and_is_the_one_told(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=60)
    shard = cache.num_shards - 1
    break_shard(cache, shard)
    recipe = make_recipe(cache.path, tmp_path / "run", training={**TRAINING, "cpu_replicas": 2})
    with pytest.raises(DFlashOfflineError, match=f"shard {shard}"):
        train(recipe, progress=False)


def test_an_unexpected_error_carries_its_traceback(small_cache, tmp_path):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        train(make_recipe(small_cache, tmp_path / "run", training=TRAINING), progress=False, stop_event=stop)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    recipe = make_recipe(small_cache, tmp_path / "run", training={**TRAINING, "cpu_replicas": 2})
    with pytest.raises(DFlashOfflineError, match=r"(?s)replica 0 failed.*Traceback.*save_checkpoint"):
        train(recipe, progress=False)


def wait_for_steps(run, count):
    log = run / "log.jsonl"
    while not log.is_file() or log.read_bytes().count(b'"kind": "step"') < count:
        time.sleep(0.005)


LONG = {"epochs": 200, "log_every": 1, "evaluate_every": 10_000, "checkpoint_every": 10_000}


def test_a_killed_replica_ends_the_others_at_once(small_cache, tmp_path):
    recipe = make_recipe(small_cache, tmp_path / "run", training={**LONG, "cpu_replicas": 2})
    victims = []

    def kill():
        wait_for_steps(tmp_path / "run", 2)
        victims.extend(child for child in multiprocessing.active_children() if child.name.startswith("replica"))
        os.kill(next(child.pid for child in victims if child.name == "replica 1"), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(DFlashOfflineError, match=r"replica 1 \(process \d+\) died: killed by signal SIGKILL"):
        train(recipe, progress=False)
    assert len(victims) == 2 and not any(child.is_alive() for child in victims)


def launch_and_tell(recipe, told):
    """A launcher in a process of its own, which tells the process ids of its replicas."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    def tell():
        wait_for_steps(Path(recipe.run), 2)
        told.put([child.pid for child in multiprocessing.active_children()])

    threading.Thread(target=tell, daemon=True).start()
    train(recipe, progress=False)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_replicas_end_when_their_launcher_is_killed_and_the_run_goes_on(small_cache, tmp_path):
    recipe = make_recipe(small_cache, tmp_path / "run", training={**LONG, "cpu_replicas": 2, "checkpoint_every": 1})
    context = multiprocessing.get_context("forkserver")
    told = context.Queue()
    launcher = context.Process(target=launch_and_tell, args=(recipe, told))
    launcher.start()
    replicas = told.get(timeout=200)
    assert len(replicas) == 2
    launcher.kill()
    launcher.join()
    limit = time.monotonic() + 60
    while any(alive(pid) for pid in replicas) or lock_holders(tmp_path / "run"):  # threads end after their leader
        assert time.monotonic() < limit
        time.sleep(0.02)
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        train(recipe, progress=False, stop_event=stop)
    assert entries(tmp_path / "run", StartEntry)[-1].step >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_writes_a_checkpoint_and_raises_interrupted(small_cache, tmp_path, number):
    recipe = make_recipe(small_cache, tmp_path / "run", training={**LONG, "cpu_replicas": 2})

    def send():
        wait_for_steps(tmp_path / "run", 2)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    with pytest.raises(Interrupted, match=r"step \d+ of \d+ is in .*the same command goes on"):
        train(recipe, progress=False)
    assert open_checkpoint(tmp_path / "run").step >= 2
    assert not multiprocessing.active_children()


def as_torchrun_does(recipe, rank, world, port, answers):
    """A process that some other program has started as one of many: no launcher, no lock token."""
    one = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "RANK": str(rank)}
    os.environ.update(one | {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"})
    answers.put((rank, train(recipe, progress=False)))


def test_started_by_another_program_on_two_hosts_it_is_the_same_run(alone, small_cache, tmp_path):
    run, _ = alone
    recipe = make_recipe(small_cache, tmp_path / "run", training=TRAINING)
    context = multiprocessing.get_context("forkserver")
    answers, port = context.Queue(), free_port()
    started = [context.Process(target=as_torchrun_does, args=(recipe, r, 2, port, answers)) for r in range(2)]
    for process in started:
        process.start()
    found = dict(answers.get(timeout=200) for _ in started)
    for process in started:
        process.join(60)
    assert found[0] == found[1]
    same_curve(tmp_path / "run", run)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.long
def test_torchrun_on_two_nodes_of_one_process(alone, small_cache, tmp_path):
    run, _ = alone
    recipe = make_recipe(small_cache, tmp_path / "run", training=TRAINING).model_dump(mode="json", exclude_none=True)
    lines = [f"{key} = {json.dumps(value)}" for key, value in recipe.items() if not isinstance(value, dict)]
    for section, values in recipe.items():
        if isinstance(values, dict):
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    (tmp_path / "train.toml").write_text("\n".join(lines))
    port, command = free_port(), [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    nodes = []
    for rank in range(2):
        place = ["--node-rank", str(rank), "--nproc-per-node", "1", "--master-addr", "127.0.0.1"]
        program = [
            "--master-port",
            str(port),
            "-m",
            "dflash_offline.cli",
            "train",
            str(tmp_path / "train.toml"),
            "--json",
        ]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        nodes.append(subprocess.Popen([*command, *place, *program, "--json"], env=environment, **pipes))
    said = [node.communicate(timeout=600) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert json.loads(said[0][0])["steps"] > 0 and not said[1][0].strip()  # replica 0 answers
    same_curve(tmp_path / "run", run)


@pytest.mark.parametrize(
    ("visible", "gpus", "local_rank", "expected"),
    [
        ("", None, 2, "2"),
        ("4,5,6,7", None, 1, "5"),
        ("4,5,6,7", "2-3", 1, "7"),
        ("6", None, 0, "6"),
        ("", "5-7", 1, "6"),
    ],
)
def test_each_process_of_another_launcher_sees_one_gpu(tmp_path, monkeypatch, visible, gpus, local_rank, expected):
    count = len(visible.split(",")) if visible else 8
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    monkeypatch.setenv("RANK", str(local_rank))
    recipe = make_recipe(tmp_path, tmp_path / "run", training={"gpus": gpus})
    device = choose_device(recipe, Place(local_rank, 4, local_rank, 4))
    assert str(device) == "cuda:0" and os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_our_launcher_gives_each_replica_one_of_the_visible_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    found = launch_module.replica_environments(make_recipe(tmp_path, tmp_path / "run", training={"gpus": "1-3"}))
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["5", "6", "7"]
    assert [(one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) for one in found] == [(r, r, "3") for r in "012"]
    with pytest.raises(UsageError, match="has 4 CUDA devices"):
        launch_module.replica_environments(make_recipe(tmp_path, tmp_path / "run", training={"gpus": "3-5"}))
    assert launch_module.replica_environments(make_recipe(tmp_path, tmp_path / "run")) is None, "one GPU, one process"
