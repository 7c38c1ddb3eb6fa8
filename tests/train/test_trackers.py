"""Trackers: the numbers of the log reach them, wandb is imported only when asked, and none can stop a run."""

import json
import logging
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from dflash_offline.config import TrainRecipe, validate_recipe
from dflash_offline.errors import UsageError
from dflash_offline.train import read_run_log, train
from dflash_offline.train.metrics import EvaluateEntry, StepEntry
from dflash_offline.train.trackers import Trackers, open_trackers
from tests.train.made_up import make_recipe


class StubWandb(ModuleType):
    """What the tracker uses of wandb: ``init``, and a run with define_metric, log, summary and finish."""

    def __init__(self, error=None):
        super().__init__("wandb")
        self.__spec__ = ModuleSpec("wandb", None)  # other libraries look whether there is one
        self.error, self.started, self.points, self.metrics, self.finished = error, [], [], [], 0
        self.summary = {}

    def init(self, **settings):
        if self.error:
            raise self.error
        self.started.append(settings)
        return SimpleNamespace(
            define_metric=lambda name, step_metric=None: self.metrics.append((name, step_metric)),
            log=self.points.append,
            summary=self.summary,
            finish=self.finish,
        )

    def finish(self):
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    stub = StubWandb()
    monkeypatch.setitem(sys.modules, "wandb", stub)
    return stub


def test_wandb_gets_the_numbers_of_the_log_and_the_recipe(small_cache, tmp_path, wandb):
    recipe = make_recipe(small_cache, tmp_path / "first", training={"max_steps": 6, "trackers": ["wandb"]})
    train(recipe, progress=False)
    (started,) = wandb.started
    assert started["project"] == "dflash-offline" and started["name"] == "first"
    assert started["dir"] == str(tmp_path / "first") and started["resume"] == "allow"
    assert started["config"]["optimizer"]["learning_rate"] == 3e-3
    entries = read_run_log(tmp_path / "first")
    losses = [(e.step, e.loss) for e in entries if isinstance(e, StepEntry)]
    assert [(p["step"], p["train/loss"]) for p in wandb.points if "train/loss" in p] == losses and losses
    heldout = [(e.step, e.expected_acceptance_length) for e in entries if isinstance(e, EvaluateEntry)]
    found = [(p["step"], p["heldout/expected_acceptance_length"]) for p in wandb.points if "heldout/loss" in p]
    assert found == heldout and heldout
    assert all("train/memory" in p for p in wandb.points if "train/loss" in p)
    assert ("*", "step") in wandb.metrics and wandb.finished == 1
    assert json.loads(wandb.summary["summary"])["steps"] == 6


def test_a_resumed_run_goes_on_with_the_same_wandb_run(tmp_path, wandb, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    for _ in range(2):
        open_trackers(["wandb"], tmp_path, 0, {}).close()
    (tmp_path / "other").mkdir()
    open_trackers(["wandb"], tmp_path / "other", 0, {}).close()
    ids = [started["id"] for started in wandb.started]
    assert ids[0] == ids[1] != ids[2]
    assert {started["project"] for started in wandb.started} == {"mine"}
    assert not {"mode"} & wandb.started[0].keys(), "WANDB_MODE decides: it is not overridden"


def test_without_wandb_the_message_says_what_to_install(small_cache, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install 'dflash-offline\[wandb\]'.*training\.trackers"):
        settings = {"max_steps": 1, "trackers": ["wandb"]}
        train(make_recipe(small_cache, tmp_path / "run", training=settings), progress=False)
    train(make_recipe(small_cache, tmp_path / "run", training={"max_steps": 1, "trackers": []}), progress=False)


def test_wandb_that_refuses_to_start_is_wrong_use(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", StubWandb(RuntimeError("api_key not configured")))
    with pytest.raises(UsageError, match=r"api_key not configured(.|\n)*wandb login(.|\n)*WANDB_MODE=offline"):
        open_trackers(["wandb"], tmp_path, 0, {})


def test_wandb_is_not_imported_unless_asked(small_cache, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    train(make_recipe(small_cache, tmp_path / "run", training={"max_steps": 1, "trackers": []}), progress=False)
    assert "wandb" not in sys.modules


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(caplog):
    seen = []

    class Good:
        def scalars(self, step, values):
            seen.append((step, dict(values)))

        def text(self, name, text):
            seen.append((name, text))

        def close(self):
            seen.append("closed")

    class Bad(Good):
        def scalars(self, step, values):
            raise ConnectionError("network is down")

    trackers = Trackers({"bad": Bad(), "good": Good()})
    with caplog.at_level(logging.WARNING):
        trackers.scalars(3, {"a": 1.0})
        trackers.scalars(4, {"a": 2.0})
        trackers.close()
    assert [record.message for record in caplog.records] == [
        "the tracker bad failed and is left out from here on: network is down"
    ]
    assert seen == [(3, {"a": 1.0}), (4, {"a": 2.0}), "closed"]


def test_tensorboard_holds_the_losses_of_the_log_and_the_recipe(small_cache, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    train(make_recipe(small_cache, run, training={"max_steps": 4, "trackers": ["tensorboard"]}), progress=False)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    losses = [(e.step, e.loss) for e in read_run_log(run) if isinstance(e, StepEntry)]
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in found] == [step for step, _ in losses]
    assert [value for _, value in found] == pytest.approx([loss for _, loss in losses], rel=1e-6)
    (text,) = events.Tensors("recipe/text_summary")
    assert b"learning_rate" in text.tensor_proto.string_val[0]


def test_without_tensorboard_the_default_only_says_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.INFO, logger="dflash_offline"):
        assert open_trackers(["tensorboard"], tmp_path, 0, {}).names == []
    assert "dflash-offline[tensorboard]" in caplog.text


def test_an_unknown_tracker_is_refused_by_name():
    with pytest.raises(UsageError, match=r"training\.trackers\.0.*'tensorboard' or 'wandb'"):
        validate_recipe({"cache": "c", "run": "r", "training": {"trackers": ["mlflow"]}}, TrainRecipe)
