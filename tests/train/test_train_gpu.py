"""Training on a GPU: the same rows, the same losses up to bf16, no growth of memory, no waits."""

import pytest
import torch

from dflash_offline.train import read_run_log, train
from dflash_offline.train.metrics import EvaluateEntry, StartEntry, StepEntry
from tests.train.made_up import make_cache, make_recipe

pytestmark = pytest.mark.gpu


def of(run, kind):
    return [entry for entry in read_run_log(run) if isinstance(entry, kind)]


@pytest.mark.parametrize("sections", [{}, {"drafter": {"sliding_window": 16}}], ids=["full", "sliding"])
@pytest.mark.parametrize("encoding", ["int8", "bf16"])
def test_the_gpus_curve_is_that_of_the_cpu_up_to_bf16(tmp_path, monkeypatch, encoding, sections):
    cache = make_cache(tmp_path / "cache", encoding=encoding).path
    sections = {**sections, "training": {"epochs": 6, "log_every": 2}, "optimizer": {"learning_rate": 3e-4}}
    train(make_recipe(cache, tmp_path / "gpu", **sections), progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        train(make_recipe(cache, tmp_path / "cpu", **sections), progress=False)
    for kind in (StepEntry, EvaluateEntry):
        for ours, theirs in zip(of(tmp_path / "gpu", kind), of(tmp_path / "cpu", kind), strict=True):
            assert ours.loss == pytest.approx(theirs.loss, rel=0.03)
            assert ours.blocks == theirs.blocks


def test_reserved_memory_does_not_change_after_the_first_evaluation(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=200).path
    train(make_recipe(cache, tmp_path / "run", training={"epochs": 12, "log_every": 5}), progress=False)
    memory = [entry.run["memory"] for entry in of(tmp_path / "run", StepEntry) if entry.step > 10]
    assert len(memory) > 10 and len(set(memory)) == 1


def test_an_interrupted_run_goes_on(tmp_path):
    import threading

    from dflash_offline.errors import Interrupted

    cache = make_cache(tmp_path / "cache").path
    recipe, stop = make_recipe(cache, tmp_path / "run"), threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        train(recipe, progress=False, stop_event=stop)
    summary = train(recipe, progress=False)
    assert summary["loss_last"] < summary["loss_first"]


@pytest.mark.timeout(900)
def test_a_replica_that_starts_from_the_warm_processs_folders_compiles_nothing(tmp_path):
    cache = make_cache(tmp_path / "cache").path
    train(make_recipe(cache, tmp_path / "alone"), progress=False)
    train(make_recipe(cache, tmp_path / "launched", training={"gpus": "0"}), progress=False)
    (start,) = of(tmp_path / "launched", StartEntry)
    counted = start.run["compiled"]
    assert {counted[f"{cache}_{what}"] for cache in ("fxgraph", "autograd") for what in ("misses", "bypasses")} == {0}
    assert counted["missing_hits"] == 0 and counted["fxgraph_hits"] > 0
    for ours, theirs in zip(of(tmp_path / "launched", StepEntry), of(tmp_path / "alone", StepEntry), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-2)
