"""The doctor: each rule on given facts, facts from real folders, and the record that every run leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_offline.config import ExtractRecipe, TrainRecipe, load_recipe
from dflash_offline.doctor import Facts, diagnose, findings, report_lines
from dflash_offline.doctor.facts import (
    CompileCache,
    Disk,
    Target,
    measure_disk,
    modules_needed,
    read_target,
    unmet_requirements,
)
from dflash_offline.environment import (
    Environment,
    Gpu,
    environment_differences,
    gather_environment,
    read_environment,
    write_environment,
)
from dflash_offline.errors import UsageError

CONFIGS = Path(__file__).parent / "data" / "target_configs"
HEALTHY = Environment(
    recorded_at="2026-01-01T00:00:00Z",
    stage="doctor",
    command=[],
    host="h",
    system="Linux",
    python="3.11.7",
    packages={"torch": "2.13.0", "transformers": "5.24.0", "triton": "3.7.0"},
    torch_cuda="13.0",
    driver="580.1",
    driver_cuda="13.0",
    gpus=[Gpu(index=i, name="H200", memory_bytes=150 << 30, used_bytes=1 << 20) for i in range(8)],
    cpu_cores=64,
    memory_bytes=1 << 40,
    open_files=65536,
)
GOOD_DISK = Disk(path="c", what="the cache", free_bytes=10**12, write_rate=2e9, read_rate=3e9)


def facts(environment: dict | None = None, **changes) -> Facts:
    """A healthy machine of eight GPUs, with changes."""
    here = HEALTHY.model_copy(update=environment or {})
    return Facts.model_validate({"torch_devices": 8, "disks": [GOOD_DISK], **changes, "environment": here})


def gpus(**changes) -> dict:
    first = HEALTHY.gpus[0].model_copy(update=changes)
    return {"gpus": [first, *HEALTHY.gpus[1:]]}


def test_a_healthy_machine_gets_no_complaint():
    assert {finding.level for finding in findings(facts(gpus_wanted={"extract": [0, 1], "train": [2]}))} == {"ok"}


@pytest.mark.parametrize(
    ("given", "level", "check", "words"),
    [
        (facts(torch_error="ImportError: libcudart"), "error", "torch", "cannot be imported: ImportError: libcudart"),
        (facts({"torch_cuda": None}), "warning", "torch", "built without CUDA"),
        (facts({"torch_cuda": None}, gpus_wanted={"train": [0]}), "error", "torch", "built without CUDA"),
        (facts({"driver_cuda": "12.4"}), "error", "torch", "built for CUDA 13.0, the driver runs 12.4"),
        (facts({"torch_cuda": "13.2"}), "warning", "torch", "newer than the driver's 13.0"),
        (facts(torch_devices=0), "error", "torch", "8 GPUs are there and torch 2.13.0 sees none"),
        (facts(unmet=["torch needs triton==3.7.0; 3.2.0 is installed"]), "error", "versions", "needs triton==3.7.0"),
        (
            facts(kernel_errors={"flash_attn": "undefined symbol"}),
            "error",
            "kernels",
            "flash-attn is installed and does",
        ),
        (
            facts(cache_versions={"transformers": "5.17.0"}),
            "warning",
            "cache",
            "transformers 5.17.0 there, 5.24.0 here",
        ),
        (facts(cache_problem="no cache at x"), "error", "cache", "no cache at x"),
        (facts(target=Target(model="a/b", found=False)), "warning", "target", "first use downloads it"),
        (facts(target=Target(model="x", found=False, problem="no file")), "error", "target", "x: no file"),
        (
            facts(target=Target(model="x", found=True, model_type="new9", known=False)),
            "error",
            "target",
            "does not know the model type 'new9'",
        ),
        (
            facts(modules_needed={"gguf": "GGUF"}, modules_missing=["gguf"]),
            "error",
            "packages",
            "gguf is not installed; this recipe needs it for GGUF",
        ),
        (
            facts(modules_needed={"fla": "speed"}, modules_missing=["fla"]),
            "warning",
            "packages",
            "flash-linear-attention is not installed",
        ),
        (facts(gpus_wanted={"train": [5, 8]}), "error", "gpus", "train wants GPU 8 and 8 GPUs are visible"),
        (facts(gpus(name="H100")), "warning", "gpus", "GPUs differ: H100"),
        (facts(gpus(used_bytes=20 << 30, processes=2)), "warning", "gpus", "GPU 0 is in use: 21.5 GB by 2 programs"),
        (
            facts(target=Target(model="x", found=True, weight_bytes=400 * 10**9)),
            "error",
            "gpus",
            "weights take 400 GB and a GPU has 161 GB",
        ),
        (
            facts(compile_caches=[CompileCache(path="/c", writable=False)]),
            "error",
            "compile cache",
            "/c cannot be written",
        ),
        (
            facts(compile_caches=[CompileCache(path="/c", writable=True, made_with={"torch": "2.11.0"})]),
            "warning",
            "compile cache",
            "torch 2.11.0 then, 2.13.0 now",
        ),
        (
            facts(disks=[GOOD_DISK.model_copy(update={"need_bytes": 2e12, "need_reason": "all of it"})]),
            "error",
            "disk",
            "needs about 2 TB and 1 TB are free (all of it)",
        ),
        (facts(disks=[GOOD_DISK.model_copy(update={"problem": "Read-only"})]), "error", "disk", "cannot be written"),
        (
            facts(
                target=Target(model="x", found=True, weight_bytes=16 * 10**9),
                gpus_wanted={"extract": [0, 1]},
                disks=[GOOD_DISK.model_copy(update={"write_rate": 1e9, "token_bytes": 21120.0})],
            ),
            "warning",
            "disk",
            "writes 1 GB/s, and the GPUs may make 1.19 GB/s",
        ),
        (facts({"open_files": 512}), "warning", "limits", "may open 512 files; 768 may be needed"),
    ],
)
def test_a_fault_is_found_and_the_finding_says_how_to_mend_it(given, level, check, words):
    found = [finding for finding in findings(given) if finding.level != "ok"]
    assert [finding.check for finding in found if words in finding.message] == [check], found
    finding = next(finding for finding in found if words in finding.message)
    assert finding.level == level and finding.mend


def test_errors_come_first():
    levels = [finding.level for finding in findings(facts({"open_files": 9}, torch_devices=0))]
    assert levels == sorted(levels, key=("error", "warning", "ok").index) and {"error", "warning"} < set(levels)


def test_a_nested_text_config_is_seen_and_read():
    target = read_target(str(CONFIGS / "qwen3.6-27b"))
    assert target.nested and target.hidden_size == 5120 and target.known and "linear_attention" in target.layer_types
    message = next(finding.message for finding in findings(facts(target=target)) if finding.check == "target")
    assert "nests its text config" in message
    assert not read_target(str(CONFIGS / "qwen3-8b")).nested
    assert read_target("runs/none.gguf").problem and not read_target("someone/unknown-model").found


def test_packages_that_only_some_recipes_need():
    small = load_recipe("smollm2-135m", ExtractRecipe)
    gguf = modules_needed(small, None, Target(model="x.gguf", found=True, gguf=True))
    assert set(gguf) == {"gguf", "accelerate"}
    hybrid = modules_needed(load_recipe("qwen3.6-27b", ExtractRecipe), None, read_target(str(CONFIGS / "qwen3.6-27b")))
    assert set(hybrid) == {"fla", "causal_conv1d"}
    packed = modules_needed(load_recipe("gpt-oss-20b", ExtractRecipe), None, read_target(str(CONFIGS / "gpt-oss-20b")))
    assert set(packed) == {"kernels"}
    assert "tensorboard" in modules_needed(None, load_recipe("smollm2-135m", TrainRecipe), None)


def test_this_environment_meets_its_own_requirements():
    assert unmet_requirements() == []


def test_rates_are_measured_and_nothing_is_left_behind(tmp_path):
    disk = measure_disk(tmp_path / "not" / "there", "the cache", seconds=0.05)
    assert disk.write_rate > 0 and disk.read_rate > 0 and disk.free_bytes > 0 and disk.problem is None
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_worked_is_compared_with_now(tmp_path):
    write_environment(tmp_path / "logs", "extract")
    then = read_environment(tmp_path)
    assert then.stage == "extract" and environment_differences(then, gather_environment("doctor")) == []
    old = then.model_copy(update={"packages": {**then.packages, "torch": "2.11.0"}, "driver": "570.0"})
    with (tmp_path / "logs" / "environment.jsonl").open("a") as file:
        file.write(old.model_dump_json() + "\n")
    lines = environment_differences(read_environment(tmp_path), then)
    assert lines == [
        "driver: 570.0 then, absent now",
        f"packages.torch: 2.11.0 then, {then.packages['torch']} now",
    ] or (then.driver is not None and len(lines) == 2)


def test_what_is_no_record_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds no environment\.jsonl"):
        read_environment(tmp_path)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(UsageError, match="no environment record"):
        read_environment(tmp_path / "x.json")


def test_diagnosis_of_a_recipe_reads_back_from_its_json(tmp_path):
    (tmp_path / "extract.toml").write_text(
        f'cache = "{tmp_path}/cache"\n[target]\nmodel = "{CONFIGS}/qwen3-8b"\n'
        f'[data]\nsource = "{tmp_path}/chats.jsonl"\n'
    )
    (tmp_path / "chats.jsonl").write_text("x" * 4000)
    answer = diagnose(str(tmp_path))
    disk = next(finding for finding in answer["findings"] if finding["check"] == "disk")
    assert "roughly 1,000 tokens" in disk["message"] and "20.5 kB a token" in disk["message"]
    (tmp_path / "doctor.json").write_text(json.dumps(answer, indent=1))
    again = diagnose(compare=tmp_path / "doctor.json")
    assert again["changes"] == [] and "no changes" in "\n".join(report_lines(again))


def test_a_recipe_that_does_not_exist_is_refused():
    with pytest.raises(UsageError, match="no recipe 'nothing'"):
        diagnose("nothing")
