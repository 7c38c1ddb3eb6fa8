"""The extraction benchmarks run from end to end on tiny shapes, and count what they say they count."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the benchmarks are scripts beside this file, no package

from extract_padding import measure

HERE = Path(__file__).parent


def test_padding_of_the_real_corpus_is_below_two_percent() -> None:
    entry = measure("smollm2_gsm8k", 0)
    assert entry["key"] == "padding_waste/smollm2_gsm8k" and entry["samples"] == 7473
    assert 0 < entry["value"] < 0.02
    assert entry["value"] == pytest.approx(entry["sides"]["computed"] / entry["sides"]["real"] - 1)


@pytest.mark.parametrize(
    ("shape", "parts", "keys"),
    [
        (
            "tiny-hybrid",
            "forward,extract",
            {"bare_forward_over_eager/tiny-hybrid", "extract_over_bare_forward/tiny-hybrid/int8"},
        ),
        pytest.param("tiny", "scaling", {"extract_scaling_2cpu"}, marks=pytest.mark.long),
    ],
)
def test_a_tiny_run_on_a_cpu_writes_the_keys_with_both_sides(tmp_path: Path, shape: str, parts: str, keys: set) -> None:
    out = tmp_path / "bench.json"
    arguments = ["--shape", shape, "--device", "cpu", "--shards", "2", "--rounds", "1", "--parts", parts]
    arguments += ["--encodings", "int8", "--folder", str(tmp_path), "--out", str(out)]
    subprocess.run([sys.executable, str(HERE / "extract_bench.py"), *arguments], check=True, timeout=250)
    results = {entry["key"]: entry for entry in json.loads(out.read_text())["results"]}
    assert set(results) == keys
    for entry in results.values():
        assert len(entry["sides"]) == 2 and min(entry["sides"].values()) > 0
        first, second = entry["sides"].values()
        assert entry["value"] == pytest.approx(first / second)
