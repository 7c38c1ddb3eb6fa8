"""Training from a cache: it learns, refuses what it must by name, and stops without losing anything."""

import json
import logging
import os
import random
import signal
import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_offline.cache import Cache
from dflash_offline.errors import DFlashOfflineError, Interrupted, UsageError
from dflash_offline.train import read_run_log, run_status, train
from dflash_offline.train.checkpoint import checkpoint_folders, open_checkpoint
from dflash_offline.train.metrics import EndEntry, EvaluateEntry, StartEntry, StepEntry
from tests.train.made_up import hidden_states, make_cache, make_recipe


def curve(run):
    """The log without what may differ between runs."""
    return [
        entry.model_dump(exclude={"run"}) for entry in read_run_log(run) if not isinstance(entry, StartEntry | EndEntry)
    ]


def of(run, kind):
    return [entry for entry in read_run_log(run) if isinstance(entry, kind)]


@pytest.fixture(scope="session")
def finished(small_cache, tmp_path_factory):
    """A finished run of 12 epochs, and its summary."""
    run = tmp_path_factory.mktemp("runs") / "run"
    recipe = make_recipe(small_cache, run, training={"epochs": 12, "evaluate_every": 30})
    return run, train(recipe, progress=False), recipe


def test_the_loss_falls_on_states_that_tell_the_next_token(finished):
    run, summary, _ = finished
    assert summary["loss_last"] < 0.3 * summary["loss_first"]
    first, last = of(run, EvaluateEntry)[0], of(run, EvaluateEntry)[-1]
    assert last.loss < first.loss and last.expected_acceptance_length > 2.5
    assert last.step == summary["steps"] == of(run, StepEntry)[-1].step
    assert len(last.accuracy_by_position) == 3
    assert last.documents > 0 and last.blocks > last.documents


def test_every_sample_is_counted_once_an_epoch(finished, small_cache):
    _, summary, _ = finished
    samples = Cache.open(small_cache).samples
    trained = (samples.split == 0) & (samples.anchors > 0)
    assert summary["samples"] == 12 * trained.sum()
    assert summary["tokens"] == 12 * samples.length[trained].sum()
    assert summary["blocks"] == 12 * np.minimum(samples.anchors[trained], 8).sum()


def test_a_finished_run_says_so_and_trains_no_more(finished):
    run, summary, recipe = finished
    before = (run / "log.jsonl").read_bytes()
    again = train(recipe, progress=False)
    assert again.pop("already_finished") and again == summary
    assert (run / "log.jsonl").read_bytes() == before
    assert run_status(run)["state"] == "finished"
    assert run_status(run)["checkpoint"] == summary["checkpoint"]


def test_entries_carry_rates_and_fills(finished):
    run, _, _ = finished
    start, step = of(run, StartEntry)[0], of(run, StepEntry)[0]
    assert start.host_memory > 0 and start.heldout_documents > 0 and 0.5 < start.token_fill <= 1
    assert 0 < step.run["matrix_share"] < 2 and start.run["matrix_tflops"] > 0
    assert step.run["tflops"] == pytest.approx(
        step.run["matrix_share"] * start.run["matrix_tflops"], rel=0.02, abs=1e-3
    )
    assert {"tokens_per_second", "blocks_per_second", "waiting_share", "memory", "seconds"} <= step.run.keys()
    assert 0 < step.anchors_per_token < 1 and 0 < step.slot_fill <= 1 and 0 < step.token_fill <= 1
    assert of(run, EndEntry)[0].summary["steps"] == start.total_steps


def test_the_same_recipe_gives_the_same_curve_and_weights(small_cache, tmp_path):
    weights = []
    for name in ("a", "b"):
        train(make_recipe(small_cache, tmp_path / name), progress=False)
        weights.append(open_checkpoint(tmp_path / name).weights())
    assert curve(tmp_path / "a") == curve(tmp_path / "b")
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_held_out_anchors_do_not_depend_on_the_runs_seed(small_cache, tmp_path):
    from dflash_offline.train.setup import plan_run

    plans = [
        plan_run(make_recipe(small_cache, tmp_path, training={"seed": seed}), Cache.open(small_cache)).heldout
        for seed in (0, 1)
    ]
    assert [row.tolist() for row in plans[0].rows] == [row.tolist() for row in plans[1].rows]
    samples = Cache.open(small_cache).samples
    chosen = np.concatenate(plans[0].rows)
    assert samples.split[chosen].all() and len(set(chosen.tolist())) == plans[0].documents


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"name": "d-pace"}},
        {"loss": {"name": "d-pace", "normalize": "sequences"}, "optimizer": {"schedule": "linear"}},
        {"drafter": {"sliding_window": 16}, "rows": {"rows_per_step": 3}},
        {"drafter": {"target_layer_ids": [3]}, "rows": {"anchor_slots": 24}},
        {"training": {"max_steps": 3, "trackers": ["tensorboard"]}},
    ],
    ids=["d-pace", "d-pace-sequences", "sliding", "layer-subset", "max-steps"],
)
def test_variants_train(small_cache, tmp_path, sections):
    recipe = make_recipe(small_cache, tmp_path / "run", **{"training": {"epochs": 1}, **sections})
    summary = train(recipe, progress=False)
    steps = of(tmp_path / "run", StepEntry)
    assert np.isfinite([entry.loss for entry in steps]).all()
    if "max_steps" in sections.get("training", {}):
        assert summary["steps"] == 3
        assert list((tmp_path / "run" / "tensorboard").glob("events*"))
    if "target_layer_ids" in sections.get("drafter", {}):
        shape = open_checkpoint(tmp_path / "run").shape()
        assert shape.target_layer_ids == (3,) and shape.context_size == shape.hidden_size


def test_an_unfinished_cache_is_refused(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=20, finish=False)
    (cache.path / "receipts" / "000001.json").unlink()
    with pytest.raises(DFlashOfflineError, match="not finished"):
        train(make_recipe(cache.path, tmp_path / "run"), progress=False)
    assert not (tmp_path / "run").exists()


def test_set_aside_shards_and_dropped_samples_are_left_out_and_counted(tmp_path):
    plain = make_cache(tmp_path / "plain", documents=40)
    aside = plain.num_shards - 1
    training = [s for s in range(len(plain.samples)) if plain.samples.split[s] == 0 and plain.samples.shard[s] != aside]
    dropped = tuple(training[:2])
    cache = make_cache(tmp_path / "cache", documents=40, dropped=dropped, aside=(aside,))
    recipe = make_recipe(cache.path, tmp_path / "run", training={"epochs": 1})
    with pytest.raises(DFlashOfflineError, match="allow_set_aside"):
        train(recipe, progress=False)
    recipe = make_recipe(cache.path, tmp_path / "run", training={"epochs": 1, "allow_set_aside": True})
    summary = train(recipe, progress=False)
    start = of(tmp_path / "run", StartEntry)[0]
    assert start.samples_left_out == {"shard-set-aside": len(cache.shard_samples(aside)), "not-finite": 2}
    assert summary["samples"] == start.samples == len(training) - 2
    assert np.isfinite(summary["loss_last"])


def test_documents_longer_than_a_row_are_refused_before_training(small_cache, tmp_path):
    with pytest.raises(UsageError, match=r"max length above row size.*rows\.context_tokens"):
        train(make_recipe(small_cache, tmp_path / "run", rows={"context_tokens": 32}), progress=False)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"drafter": {"mask_token_id": 1}}, "mask token 1 is"),
        ({"drafter": {"mask_token_id": 99}}, "outside the target's embedding"),
        ({"drafter": {"target_layer_ids": [0]}}, r"drafter\.target_layer_ids"),
        ({"training": {"gpus": "0,1"}}, "has 0 CUDA devices"),
        ({"training": {"gpus": "0", "cpu_replicas": 2}}, "both set"),
        ({"drafter": {"init_from": "nowhere"}}, r"drafter\.init_from"),
    ],
)
def test_wrong_settings_are_refused_by_name(small_cache, tmp_path, sections, message):
    with pytest.raises(UsageError, match=message):
        train(make_recipe(small_cache, tmp_path / "run", **sections), progress=False)


def test_other_settings_in_a_run_folder_are_refused_and_named(finished, small_cache):
    run, _, _ = finished
    before = (run / "recipe.json").read_bytes()
    other = make_recipe(
        small_cache, run, training={"epochs": 12, "seed": 3}, rows={"rows_per_step": 4}, drafter={"num_layers": 1}
    )
    with pytest.raises(UsageError) as caught:
        train(other, progress=False)
    for line in ("rows.rows_per_step: 2 there, 4 now", "training.seed: 0 there, 3 now", "drafter.num_layers: 2 there"):
        assert line in str(caught.value)
    assert (run / "recipe.json").read_bytes() == before


def test_another_folder_is_not_taken_for_a_run(small_cache, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UsageError, match="some other folder"):
        train(make_recipe(small_cache, tmp_path), progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["thesis.txt"]


def test_a_second_start_is_refused_while_the_first_runs(small_cache, tmp_path):
    from dflash_offline.train.run_folder import RunFolder

    recipe = make_recipe(small_cache, tmp_path / "run")
    with RunFolder(recipe), pytest.raises(DFlashOfflineError, match=f"in use by process {os.getpid()}"):
        train(recipe, progress=False)
    train(make_recipe(small_cache, tmp_path / "run", training={"max_steps": 1}), progress=False)


def test_a_checkpoint_of_another_shape_is_refused(finished, small_cache, tmp_path):
    import shutil

    run, _, _ = finished
    recipe = make_recipe(small_cache, tmp_path / "run", drafter={"num_layers": 1}, training={"max_steps": 2})
    train(recipe, progress=False)
    for folder in checkpoint_folders(tmp_path / "run"):
        shutil.rmtree(folder)
    shutil.copytree(checkpoint_folders(run)[-1], tmp_path / "run" / "checkpoints" / "step-000001")
    state = json.loads((tmp_path / "run" / "checkpoints" / "step-000001" / "state.json").read_text())
    from dflash_offline.cache.files import write_sealed

    state.pop("self_sha256")
    write_sealed(tmp_path / "run" / "checkpoints" / "step-000001" / "state.json", {**state, "step": 1})
    with pytest.raises(UsageError, match=r"another shape: num_layers 1 \(there 2\)"):
        train(recipe, progress=False)


def test_states_that_are_not_finite_stop_the_run_with_dataset_rows_and_keep_the_checkpoint(tmp_path):
    cache = make_cache(tmp_path / "cache", documents=40)
    recipe = make_recipe(cache.path, tmp_path / "run", training={"checkpoint_every": 2, "checkpoints_kept": 99})
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):  # one good step first
        train(recipe, progress=False, stop_event=stop)
    good = checkpoint_folders(tmp_path / "run")
    shard = next(s for s in range(cache.num_shards) if not cache.is_heldout(s))
    hidden = hidden_states(cache, shard)
    sample = cache.shard_samples(shard)[0]
    hidden[: int(cache.samples.length[sample])] = float("nan")
    cache.write_shard(shard, cache.encoding.to_numpy(cache.encoding.encode(hidden)), {})
    with pytest.raises(DFlashOfflineError, match="is not finite") as caught:
        train(recipe, progress=False)
    assert f"{cache.samples.row[sample]} (id {cache.samples.sample_id(sample)})" in str(caught.value)
    assert good[0].name == "step-000001" and set(good) <= set(checkpoint_folders(tmp_path / "run"))
    for folder in checkpoint_folders(tmp_path / "run"):
        assert all(torch.isfinite(tensor).all() for tensor in open_checkpoint(folder).weights().values())


def test_stopping_and_going_on_gives_the_curve_of_an_undisturbed_run(small_cache, tmp_path):
    train(make_recipe(small_cache, tmp_path / "whole"), progress=False)

    class AtRandom(threading.Event):
        """Sets itself when looked at: between steps, before and within evaluations."""

        def is_set(self):
            if rng.random() < 0.3:
                self.set()
            return super().is_set()

    recipe, stops, rng = make_recipe(small_cache, tmp_path / "cut"), 0, random.Random(0)
    while True:
        try:
            train(recipe, progress=False, stop_event=AtRandom())
            break
        except Interrupted as error:
            assert "the same command goes on" in str(error)
            stops += 1
    assert stops >= 3
    kinds = (StepEntry, EvaluateEntry)

    def numbers(run):
        return [entry.model_dump(exclude={"run"}) for entry in read_run_log(run) if isinstance(entry, kinds)]

    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    whole, cut = open_checkpoint(tmp_path / "whole"), open_checkpoint(tmp_path / "cut")
    for key, tensor in whole.weights().items():
        assert torch.equal(tensor, cut.weights()[key]), key


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_writes_a_checkpoint_and_raises_interrupted(small_cache, tmp_path, number):
    recipe = make_recipe(small_cache, tmp_path / "run", training={"epochs": 50, "checkpoint_every": 10_000})

    def send():
        log = tmp_path / "run" / "log.jsonl"
        while not (log.is_file() and b'"step"' in log.read_bytes().replace(b'"step":', b"")):
            pass
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    before = signal.getsignal(number)
    with pytest.raises(Interrupted, match="the same command goes on"):
        train(recipe, progress=False)
    assert signal.getsignal(number) is before
    assert run_status(tmp_path / "run")["state"] == "interrupted"
    assert open_checkpoint(tmp_path / "run").step > 0


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(small_cache, tmp_path, caplog):
    train(make_recipe(small_cache, tmp_path / "whole"), progress=False)
    recipe = make_recipe(small_cache, tmp_path / "cut")
    train(recipe, progress=False)
    newest = checkpoint_folders(tmp_path / "cut")[0]
    data = (newest / "optimizer.safetensors").read_bytes()
    (newest / "optimizer.safetensors").write_bytes(data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        summary = train(recipe, progress=False)
    assert "passed over" in caplog.text and "already_finished" not in summary
    assert curve(tmp_path / "cut") == curve(tmp_path / "whole")


def test_a_run_starts_from_an_exported_drafter_and_refuses_one_of_another_shape(finished, small_cache, tmp_path):
    run, _, _ = finished
    checkpoint = open_checkpoint(run)
    folder = tmp_path / "drafter"
    folder.mkdir()
    save_file({k: v.bfloat16() for k, v in checkpoint.weights().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(checkpoint.shape().to_hf_config()))
    warm = {"drafter": {"init_from": str(folder)}, "training": {"max_steps": 1}}
    summary = train(make_recipe(small_cache, tmp_path / "warm", **warm), progress=False)
    assert summary["loss_first"] < 1.0  # random weights begin near 17
    warm["drafter"]["num_layers"] = 1
    with pytest.raises(UsageError, match="another shape: num_layers 1"):
        train(make_recipe(small_cache, tmp_path / "other", **warm), progress=False)


def test_checkpoints_hold_float32_masters_under_exported_names(finished):
    run, _, _ = finished
    weights = load_file(checkpoint_folders(run)[0] / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert "fc.weight" in weights and "layers.1.self_attn.q_norm.weight" in weights
    assert not weights["norm.weight"].eq(1).any()  # norms train
