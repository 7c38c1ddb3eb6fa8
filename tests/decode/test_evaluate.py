"""The whole evaluation: a cache of the target's own answers, an exported folder, and the report."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from dflash_offline.config import DataConfig, ExtractRecipe, TargetConfig
from dflash_offline.decode.compare import compare_outputs
from dflash_offline.decode.generation import Generation
from dflash_offline.decode.prompts import file_prompts
from dflash_offline.errors import UsageError
from dflash_offline.evaluate import evaluate
from dflash_offline.export import exported_config, write_drafter_folder
from dflash_offline.target import load_target
from tests.decode.tiny_drafters import prompts_for, shape_for, train_drafter, written_by
from tests.tiny_models import tiny_llama

ANSWER = 24


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Tiny target with SmolLM2's tokenizer, a cache of what it wrote to 12 prompts, and a drafter that learnt it."""
    from dflash_offline.extract import prepare
    from dflash_offline.extract.job import extract_shard

    folder = tmp_path_factory.mktemp("job")
    config = TargetConfig(model=str(tiny_llama(folder / "target", tokenizer=True)), dtype="float32", layer_ids=[0, 2])
    target = load_target(config)
    prompts = [[*prompt, 9] for prompt in prompts_for(12)]
    texts = [p + text for p, text in zip(prompts, written_by(target, prompts, ANSWER), strict=True)]
    rows = [
        {"input_ids": text, "loss_mask": [0] * len(p) + [1] * ANSWER} for p, text in zip(prompts, texts, strict=True)
    ]
    source = folder / "answers.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = ExtractRecipe(
        cache=str(folder / "cache"),
        target=config,
        data=DataConfig(source=str(source), max_length=128, heldout_share=0.5),
    )
    recipe.layout.encoding, recipe.layout.shard_tokens = "bf16", 256
    cache = prepare(recipe, progress=False)
    for shard in range(cache.num_shards):
        extract_shard(cache, target, shard)
    drafter = train_drafter(target, shape_for(target, mask_token_id=16), texts, steps=60, rivals=1500)
    out = write_drafter_folder(
        folder / "drafter",
        exported_config(drafter.shape, "float32", target.heads_info()),
        dict(drafter.state_dict()),
        {},
    )
    (out / "dflash_offline.json").write_text("{}")
    return SimpleNamespace(
        folder=folder, config=config, target=target, prompts=prompts, source=source, cache=cache, drafter=out
    )


def test_report_on_the_heldout_samples_of_a_cache(job):
    report = evaluate(
        job.drafter,
        target=job.config,
        cache=job.cache.path,
        count=None,
        max_new_tokens=ANSWER,
        timed_prompts=1,
        out=job.folder / "reports" / "evaluation.json",
    )
    heldout = int((job.cache.samples["split"] == 1).sum())
    assert 0 < heldout < 12 and report["prompts"] == heldout
    assert report["lossless"] is True and report["identical_share"] == 1 and report["divergences"] == []
    assert report["acceptance_length"] > 1.5, "the drafter has learnt these answers"
    assert report["tokens"] == heldout + round(report["acceptance_length"] * report["rounds"])
    assert len(report["acceptance_by_position"]) == 7
    replayed = report["replayed"]
    assert replayed["answers"] == heldout
    assert replayed["acceptance_length"] == pytest.approx(report["acceptance_length"], rel=0.05)
    assert report["speed_up"] > 0 and report["timed_prompts"] == 1
    assert json.loads((job.folder / "reports" / "evaluation.json").read_text()) == report
    assert report["run"] is None and report["step"] is None, "this folder comes from no run"
    assert len(report["decodes"]) == min(4, heldout)
    for decode in report["decodes"]:
        accepted = [one["accepted"] for one in decode["rounds"]]
        assert len(decode["rounds"]) > 0 and max(accepted) > 0
        lengths = [one["accepted"] + bool(one["own"]) for one in decode["rounds"]]
        assert decode["acceptance_length"] == pytest.approx(sum(lengths) / len(lengths), abs=0.5)
        assert all(0 <= one["accepted"] <= len(one["drafted"]) <= 7 for one in decode["rounds"])
    sampled = evaluate(job.drafter, target=job.target, prompts=job.prompts, count=1, max_new_tokens=4, timed_prompts=0)
    assert sampled["decodes"] == [], "ready token ids have no tokenizer"


def test_a_transcript_is_the_text_of_the_output(job, smollm2_tokenizer):
    """Accepted pieces and own tokens, read in order, are the decoded output; split characters are joined."""
    from dflash_offline.decode.transcript import text_pieces, transcript

    output = smollm2_tokenizer("Snow: ☃ and 🦊🦊, naïve.", add_special_tokens=False)["input_ids"]
    prompt = smollm2_tokenizer("Who? ", add_special_tokens=False)["input_ids"]
    assert any("\ufffd" in smollm2_tokenizer.decode([token]) for token in output), "some character takes several tokens"
    made = Generation()
    made.start(output[0], ())
    rest, accepts = output[1:], [0, 3, 2, 5, 1]
    for accepted in accepts:
        wrong = (rest[accepted] + 1) % 500 + 20 if len(rest) > accepted else 20
        drafts = [*rest[:accepted], wrong, 30]
        produced = made.add_round(
            drafts, min(accepted, len(rest)), rest[accepted] if accepted < len(rest) else 2, 99, ()
        )
        rest = rest[produced:]
    shown = transcript(smollm2_tokenizer, prompt, made)
    read = shown["first"] + "".join("".join(r["drafted"][: r["accepted"]]) + r["own"] for r in shown["rounds"])
    assert read.replace("\ufffd", "") == smollm2_tokenizer.decode(made.tokens)
    assert shown["prompt"] == "Who? " and shown["tokens"] == len(made.tokens)
    assert [r["accepted"] for r in shown["rounds"]] == made.accepted
    assert "".join(text_pieces(smollm2_tokenizer, [], output)) == smollm2_tokenizer.decode(output)


def test_the_report_is_kept_with_the_run_that_the_drafter_came_from(job, tmp_path):
    run = tmp_path / "runs" / "first"
    (run / "checkpoints" / "step-000007").mkdir(parents=True)
    (run / "recipe.json").write_text("{}")
    (run / "checkpoints" / "step-000007" / "state.json").write_text(json.dumps({"files": {"model": "abc"}}))
    drafter = shutil.copytree(job.drafter, tmp_path / "drafter")
    origin = {"run": "../runs/first", "step": 7, "checkpoint_sha256": {"model": "abc"}}
    settings = {"target": job.target, "prompts": job.prompts[:1], "max_new_tokens": 4, "timed_prompts": 0}
    (drafter / "dflash_offline.json").write_text(json.dumps(origin))
    report = evaluate(drafter, **settings)
    assert (report["run"], report["step"]) == (str(run.resolve()), 7)
    assert json.loads((run / "evaluation.json").read_text()) == report
    (run / "evaluation.json").unlink()
    (drafter / "dflash_offline.json").write_text(json.dumps({**origin, "checkpoint_sha256": {"model": "other"}}))
    assert evaluate(drafter, **settings)["run"] is None and not (run / "evaluation.json").exists()


def test_replay_of_the_cache_reads_the_drafters_layers(job):
    """Swapping the two kept layers must show: the drafter's features would be mixed up."""
    from dflash_offline.export import load_drafter
    from dflash_offline.replay import cache_layers, replayed_acceptance

    drafter, _ = load_drafter(job.drafter)
    right = replayed_acceptance(job.cache, drafter, batch_tokens=64)
    assert right["acceptance_length"] == pytest.approx(
        replayed_acceptance(job.cache, drafter)["acceptance_length"], rel=0.02
    ), "batches change nothing"
    assert right["acceptance_length"] > 1.5
    assert cache_layers(job.cache, [2]) == [1]
    with pytest.raises(UsageError, match=r"\[3\].*keeps \[0, 2\]"):
        cache_layers(job.cache, [0, 3])


def test_sampled_evaluation_makes_no_claim_of_equality(job):
    report = evaluate(
        job.drafter, target=job.target, prompts=job.prompts, count=3, max_new_tokens=6, temperature=1.0, timed_prompts=0
    )
    assert report["lossless"] is None and report["replayed"] is None and report["speed_up"] is None
    assert report["prompts"] == 3


def test_a_folder_that_lost_its_rope_shows_in_acceptance(job, tmp_path):
    broken = shutil.copytree(job.drafter, tmp_path / "broken")
    config = json.loads((broken / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 20.0
    (broken / "config.json").write_text(json.dumps(config))
    settings = {"target": job.target, "prompts": job.prompts, "max_new_tokens": ANSWER, "timed_prompts": 0}
    good, bad = evaluate(job.drafter, **settings), evaluate(broken, **settings)
    assert bad["lossless"] and good["lossless"], "drafts never change the output"
    assert bad["acceptance_length"] < good["acceptance_length"] - 0.3


def test_prompts_of_files(smollm2_tokenizer, tmp_path):
    question = {"role": "user", "content": "How many legs has a spider?"}
    rows = [
        {"messages": [question, {"role": "assistant", "content": "Eight."}]},
        {"messages": [question]},
        {"prompt": question["content"]},
        {"conversations": [{"from": "human", "value": question["content"]}, {"from": "gpt", "value": "8"}]},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
        {"text": "plain text asks nothing"},
        {"messages": [question, {"role": "assistant", "content": "Eight."}, question]},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts = file_prompts(path, smollm2_tokenizer)
    assert len(prompts) == 6
    assert prompts[0] == prompts[1] == prompts[2] == prompts[3]
    text = smollm2_tokenizer.decode(prompts[0])
    assert text.endswith("How many legs has a spider?<|im_end|>\n<|im_start|>assistant\n")
    assert prompts[4] == [5, 6]
    assert smollm2_tokenizer.decode(prompts[5]).count("spider") == 2
    assert file_prompts(path, smollm2_tokenizer, rows="-3:", count=1) == [[5, 6]]
    with pytest.raises(UsageError, match="no-prompt"):
        file_prompts(path, smollm2_tokenizer, rows="5:6")


def test_differences_are_located_and_ties_told_from_errors(llama):
    from dflash_offline.decode import plain_generate

    prompt = prompts_for(1)[0]
    plain = plain_generate(llama, prompt, max_new_tokens=8)
    other = Generation(tokens=[*plain.tokens[:3], (plain.tokens[3] + 1) % 500, *plain.tokens[4:]])
    shorter = Generation(tokens=plain.tokens[:5])
    same = compare_outputs(llama, [prompt], [plain], [plain])
    assert (same["lossless"], same["near_ties_only"], same["identical_share"]) == (True, True, 1.0)
    found = compare_outputs(llama, [prompt, prompt, prompt], [other, plain, shorter], [plain] * 3)
    assert found["lossless"] is False and found["identical_share"] == pytest.approx(1 / 3)
    first, second = found["divergences"]
    assert (first["prompt"], first["position"], first["plain"]) == (0, 3, plain.tokens[3])
    assert first["logit_gap"] > 0.01 and not first["near_tie"], "a wrong token is no tie"
    assert (second["prompt"], second["position"]) == (2, 5)
    assert found["near_ties_only"] is False


def test_hybrid_targets_are_evaluated_one_prompt_at_a_time(qwen3_5, qwen3_5_drafter, tmp_path):
    config = exported_config(qwen3_5_drafter.shape, "float32", qwen3_5.heads_info())
    folder = write_drafter_folder(tmp_path / "drafter", config, dict(qwen3_5_drafter.state_dict()), {})
    report = evaluate(folder, target=qwen3_5, prompts=prompts_for(2), max_new_tokens=20, timed_prompts=0)
    assert report["lossless"] and report["acceptance_length"] > 2


@pytest.mark.parametrize("size", [1, 2, None])
def test_batch_size_changes_nothing(job, size):
    report = evaluate(
        job.drafter, target=job.target, prompts=job.prompts[:3], max_new_tokens=9, batch_size=size, timed_prompts=0
    )
    again = evaluate(job.drafter, target=job.target, prompts=job.prompts[:3], max_new_tokens=9, timed_prompts=0)
    same = ("rounds", "tokens", "acceptance_length", "acceptance_by_position", "lossless")
    assert {key: report[key] for key in same} == {key: again[key] for key in same}


def test_wrong_requests(job, llama, llama_drafter, tmp_path):
    config = exported_config(llama_drafter.shape, "float32", llama.heads_info())
    folder = write_drafter_folder(tmp_path / "drafter", config, dict(llama_drafter.state_dict()), {})
    with pytest.raises(UsageError, match="was made with target"):
        evaluate(folder, target=llama, cache=job.cache.path)
    with pytest.raises(UsageError, match="needs prompts"):
        evaluate(job.drafter, target=job.target)
    with pytest.raises(UsageError, match="another target"):
        evaluate(job.drafter, target=llama, prompts=[[5]])
    with pytest.raises(UsageError, match="is a folder"):
        evaluate(job.drafter, target=job.target, prompts=job.prompts, out=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        evaluate(job.drafter, target=job.target, prompts=job.prompts, out=tmp_path / "file" / "report.json")
    (folder / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="not a DFlash drafter"):
        evaluate(folder, target=TargetConfig(model=str(tmp_path)), prompts=[[5]])
