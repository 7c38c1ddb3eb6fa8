"""Compile once, then replicate: what the warm process compiled is all that replicas run, or they say what is not."""

import json
import multiprocessing
import shutil

import pytest

from dflash_offline.errors import DFlashOfflineError
from dflash_offline.train import launch as launch_module
from dflash_offline.train import read_run_log, train
from dflash_offline.train.compiled import WARM, recompiling_is_an_error, versions
from dflash_offline.train.metrics import EvaluateEntry, StartEntry, StepEntry
from tests.train.made_up import make_recipe

TRAINING = {"epochs": 1, "log_every": 1, "evaluate_every": 3, "checkpoint_every": 100}


@pytest.fixture(autouse=True)
def forked_from_a_server(monkeypatch):
    multiprocessing.get_context("forkserver").set_forkserver_preload(["dflash_offline.train.loop", "pandas"])
    monkeypatch.setitem(launch_module.launch.__kwdefaults__, "context", "forkserver")


def small(cache, run, **training):
    return make_recipe(
        cache, run, drafter={"num_layers": 1}, rows={"lanes": 2}, training={**TRAINING, "compile": True, **training}
    )


@pytest.fixture(scope="module")
def warmed(small_cache, tmp_path_factory):
    """A compiled run of two replicas, and the folder of compiled code; about 90 s."""
    home = tmp_path_factory.mktemp("home")
    run = tmp_path_factory.mktemp("compiled") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DFLASH_OFFLINE_HOME", str(home))
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setitem(launch_module.launch.__kwdefaults__, "context", "forkserver")
        train(small(small_cache, run, cpu_replicas=2), progress=False)
    return home, run


def only(folder):
    (found,) = [path for path in folder.iterdir() if path.is_dir()]
    return found


@pytest.mark.long
def test_two_replicas_compile_nothing_and_the_log_says_so(warmed, small_cache, tmp_path):
    home, run = warmed
    warm = json.loads((only(home / "compiled") / WARM).read_text())
    start = next(entry for entry in read_run_log(run) if isinstance(entry, StartEntry))
    found = start.run["compiled"]
    assert found["fxgraph_misses"] == found["autograd_misses"] == found["missing_hits"] == 0
    assert found["fxgraph_bypasses"] == found["autograd_bypasses"] == 0
    assert found["graphs"] == warm["counters"]["graphs"] > 5
    assert found["fxgraph_hits"] == warm["counters"]["fxgraph_misses"] >= found["graphs"]
    assert warm["seconds"] > 0 and warm["facts"]["versions"] == versions()
    train(make_recipe(small_cache, tmp_path / "plain", drafter={"num_layers": 1}, rows={"lanes": 2}, training=TRAINING))
    for kind in (StepEntry, EvaluateEntry):
        pairs = zip(
            *([e for e in read_run_log(r) if isinstance(e, kind)] for r in (run, tmp_path / "plain")), strict=True
        )
        for ours, theirs in pairs:
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)


@pytest.mark.long
def test_a_later_start_of_the_same_key_starts_no_warm_process(warmed, small_cache, tmp_path, monkeypatch):
    home, _ = warmed
    monkeypatch.setenv("DFLASH_OFFLINE_HOME", str(home))
    before = (only(home / "compiled") / WARM).read_bytes()
    summary = train(small(small_cache, tmp_path / "run", max_steps=4), progress=False)
    assert summary["steps"] == 4 and (only(home / "compiled") / WARM).read_bytes() == before


@pytest.mark.long
@pytest.mark.parametrize("how", ["off", "bypassed", "emptied", "version"])
def test_caches_that_do_not_serve_are_an_error_before_the_first_step(warmed, small_cache, tmp_path, monkeypatch, how):
    home = tmp_path / "home"
    shutil.copytree(warmed[0], home)
    monkeypatch.setenv("DFLASH_OFFLINE_HOME", str(home))
    folder = only(home / "compiled")
    message = "does not run what the warm process compiled"
    recipe = small(small_cache, tmp_path / "run", max_steps=2, cpu_replicas=2)
    if how == "emptied":
        shutil.rmtree(folder / "inductor")
        message = "misses"
    if how == "version":
        warm = json.loads((folder / WARM).read_text())
        warm["facts"]["versions"]["torch"] = "2.0.0"
        (folder / WARM).write_text(json.dumps(warm))
        message = "compiled by other versions.*2.0.0"
    if how in ("off", "bypassed"):
        original = launch_module.replica_environments
        name = {"off": "TORCHINDUCTOR_FORCE_DISABLE_CACHES", "bypassed": "DFLASH_TEST_BYPASS"}[how]
        monkeypatch.setattr(
            "dflash_offline.train.loop.replica_environments",
            lambda recipe: [{**environment, name: "1"} for environment in original(recipe)],
        )
        if how == "bypassed":
            monkeypatch.setattr(launch_module, "replica_main", bypassing_replica)
            message = "bypasses"
    with pytest.raises(DFlashOfflineError, match=message):
        train(recipe, progress=False)
    log = tmp_path / "run" / "log.jsonl"
    assert not log.exists() or b'"kind": "step"' not in log.read_bytes()


def bypassing_replica(*arguments):
    """A replica in which inductor finds every graph impossible to cache."""
    import torch._functorch._aot_autograd.autograd_cache as autograd
    import torch._inductor.codecache as codecache

    def refuse(*_, **__):
        raise codecache.BypassFxGraphCache("a test")

    codecache.FxGraphCache._check_can_cache = staticmethod(refuse)
    autograd.check_cacheable = lambda *_: (_ for _ in ()).throw(autograd.BypassAOTAutogradCache("a test"))
    launch_module_main(*arguments)


launch_module_main = launch_module.replica_main


def test_once_recompiling_is_an_error_a_changed_shape_is_named_and_an_evaluation_is_not_new():
    """The guard itself, with a backend that compiles nothing; the real one is in the long suite."""
    import torch

    from dflash_offline.train.batch import RowLayout
    from dflash_offline.train.compiled import count_graphs, fail_on_recompile_limit
    from tests.train.test_step import LOSSES, make_documents, make_step, rows_of

    torch._dynamo.reset()
    step = make_step(LOSSES["ce"])
    from dflash_offline.drafter.model import compile_layers

    compile_layers(step.model, backend="eager")
    documents, states = make_documents(3)
    layout, other = RowLayout(160, 40, 4), RowLayout(128, 40, 4)
    (row,) = rows_of([documents], states, layout)
    (smaller,) = rows_of([documents[:1]], states, other)
    weights = {name: parameter.clone() for name, parameter in step.model.named_parameters()}
    random_state = torch.get_rng_state()
    with fail_on_recompile_limit(True):
        assert count_graphs(step, row)["graphs"] >= 4
        assert torch.equal(torch.get_rng_state(), random_state)
        for name, parameter in step.model.named_parameters():
            assert parameter.grad is None and torch.equal(parameter, weights[name])
        with recompiling_is_an_error(True, layout):
            step.forward_backward(row)
            with torch.no_grad():
                step.forward(row, 1.0)
        with pytest.raises(DFlashOfflineError, match=r"(?s)rows are 160 tokens.*expected 160, actual 128"):
            with recompiling_is_an_error(True, layout):
                step.forward_backward(smaller)
    torch._dynamo.reset()
