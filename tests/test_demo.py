"""Which shape the demo takes on which machine; ``make demo`` itself runs the steps for real."""

from pathlib import Path

import pytest

from dflash_offline import demo


@pytest.mark.parametrize(
    ("gpu", "said", "rows", "layers", "block", "epochs", "prompts"),
    [(True, "GPU (a GPU): full shape", ":-200", 5, 16, 12, 100), (False, "small shape", "0:180", 2, 8, 3, 8)],
    ids=["gpu", "cpu"],
)
def test_a_gpu_gets_the_full_shape_and_more_data_and_it_is_said(
    monkeypatch, capsys, tmp_path, gpu, said, rows, layers, block, epochs, prompts
):
    seen = {}

    def extract(recipe, **_):
        seen["extract"] = recipe
        return {"samples": 1, "tokens": 1, "bytes": 1, "bf16_bytes": 2}

    def train(recipe, **_):
        seen["train"] = recipe
        return {"loss_first": 2.0, "loss_last": 1.0}

    def evaluate(drafter, **options):
        seen["evaluate"] = options
        return {"acceptance_length": 1.5, "prompts": options["count"], "lossless": True}

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("dflash_offline.extract.extract", extract)
    monkeypatch.setattr("dflash_offline.train.train", train)
    monkeypatch.setattr("dflash_offline.evaluate.evaluate", evaluate)
    monkeypatch.setattr("dflash_offline.export.export_drafter", lambda run, out, dtype: seen.update(dtype=dtype) or out)
    monkeypatch.setattr("dflash_offline.report.write_report", lambda run, out, evaluation: out)
    table = demo.run_demo("a-model", [], tmp_path)
    assert said in table["device"] and said in capsys.readouterr().out
    assert seen["extract"].data.rows == rows and seen["extract"].target.model == "a-model"
    drafter = seen["train"].drafter
    assert (drafter.num_layers, drafter.block_size, seen["train"].training.epochs) == (layers, block, epochs)
    assert seen["evaluate"]["count"] == table["held-out prompts"] == prompts
    assert seen["dtype"] == ("bfloat16" if gpu else "float32")
    assert Path(table["drafter"]).parent == tmp_path and table["ratio to bf16"] == 2.0
