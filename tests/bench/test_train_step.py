"""The benchmark of the training step runs on a CPU at its tiny shape, and draws the lengths that it says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from train_step import tokenised_lengths

ROOT = Path(__file__).parents[2]


def test_real_lengths_are_those_of_the_tokenised_conversations(tmp_path):
    data = tmp_path / "some.jsonl"
    turns = [["What is 2 + 3?", "It is 5."], ["Name a prime above 10.", "11 is one, and 13 another, to be sure."]]
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": r, "content": c} for r, c in zip(roles, turn, strict=True)]} for turn in turns]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "data" / "smollm2_tokenizer")
    lengths, supervised = tokenised_lengths(data, 448)
    expected = [len(tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)) for row in rows]
    assert np.all(np.abs(lengths - expected) <= 1)  # the newline after the last turn is not kept everywhere
    answers = [len(tokenizer(turn[1])["input_ids"]) for turn in turns]
    assert np.all((supervised >= answers) & (supervised <= np.array(answers) + 2))


@pytest.mark.long
def test_the_floor_part_runs_on_a_cpu(tmp_path):
    out = tmp_path / "step.json"
    command = [sys.executable, "tests/bench/train_step.py", "--shape", "tiny", "--device", "cpu", "--steps", "1"]
    subprocess.run(
        [*command, "--warmup", "1", "--parts", "floor", "--out", str(out)], cwd=ROOT, check=True, timeout=280
    )
    (entry,) = json.loads(out.read_text())["results"]
    assert entry["key"] == "train_step_over_floor/tiny" and entry["value"] > 0
    assert entry["sides"]["ours_s"] > 0
