"""The page: whole, without network, with the numbers of the log, whatever the state of the run."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dflash_offline.cache import get_encoding
from dflash_offline.cache.statistics import layer_statistics
from dflash_offline.errors import DFlashOfflineError
from dflash_offline.report import write_report
from dflash_offline.report.charts import thinned
from dflash_offline.report.run_data import RunData
from dflash_offline.train import read_run_log, train
from dflash_offline.train.metrics import EvaluateEntry, StepEntry
from tests.train.made_up import hidden_states, make_cache, make_recipe

VOID = {"meta", "input", "br", "link", "img", "hr"}
SECTIONS = ["summary", "training", "positions", "speed", "compile", "cache", "decodes", "recipe", "versions"]
HOSTILE = "</pre><script>alert('x')</script><img src=x onerror=alert(1)>\"&"
EVALUATION = {
    "acceptance_length": 2.375,
    "acceptance_by_position": [0.75, 0.5, None],
    "speed_up": 1.5,
    "lossless": True,
    "versions": {"torch": "9.9.9"},
    "decodes": [
        {
            "prompt": "Who?",
            "first": "He",
            "rounds": [{"drafted": [" is", HOSTILE, " no"], "accepted": 2, "own": " me"}],
            "tokens": 4,
            "acceptance_length": 3.0,
        }
    ],
}


class Page(HTMLParser):
    """A page's elements; an end tag that closes something else is an error."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []
        self.feed(text)
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.text.append(data)

    def series(self, title):
        """Points of the lines of a chart, by name."""
        found = next(a for tag, a in self.attributes if tag == "svg" and a["aria-label"] == title)
        return {one["name"]: [tuple(p) for p in one["points"]] for one in json.loads(found["data-chart"])["series"]}

    def words(self):
        return re.sub(r"\s+", " ", " ".join(self.text))


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A cache and two finished runs, the first of them evaluated."""
    folder = tmp_path_factory.mktemp("report")
    cache = make_cache(folder / "cache", documents=40)
    codec = get_encoding("int8")
    for shard in range(cache.num_shards):  # once more, with the statistics that extraction writes
        hidden = hidden_states(cache, shard)
        encoded = codec.encode(hidden)
        layers = layer_statistics(hidden, codec.decode(encoded))
        cache.write_shard(shard, codec.to_numpy(encoded), {"layers": [one.model_dump() for one in layers]})
    for name, rate in (("first", 3e-3), ("second", 1e-3)):
        sections = {"training": {"max_steps": 9, "log_every": 2}, "optimizer": {"learning_rate": rate}}
        train(make_recipe(cache.path, folder / name, **sections), progress=False)
    (folder / "first" / "evaluation.json").write_text(json.dumps(EVALUATION))
    return folder


def page_of(*runs, out):
    text = write_report(list(runs), out).read_text(encoding="utf-8")
    assert text.lstrip().startswith("<!doctype html>")
    assert not re.search(r"https?://|@import|url\(|src=['\"]?(?!x)", text.replace("src=x onerror", "")), "no network"
    return Page(text)


def test_all_sections_are_there_and_the_numbers_are_the_logs(job, tmp_path):
    page = page_of(job / "first", out=tmp_path / "report.html")
    assert [a["id"] for tag, a in page.attributes if tag == "section"] == SECTIONS
    entries = read_run_log(job / "first")
    steps = [e for e in entries if isinstance(e, StepEntry)]
    checks = [e for e in entries if isinstance(e, EvaluateEntry)]
    loss = page.series("Loss")
    assert loss["training"] == [(e.step, float(f"{e.loss:.6g}")) for e in steps]
    assert loss["held out"] == [(e.step, float(f"{e.loss:.6g}")) for e in checks]
    rates = page.series("Speed")["first"]
    assert rates == [(e.step, float(f"{e.run['tokens_per_second']:.6g}")) for e in steps]
    accuracy = page.series("Accuracy by position")["first"]
    assert accuracy == [(i + 1, float(f"{v:.6g}")) for i, v in enumerate(checks[-1].accuracy_by_position)]
    words = page.words()
    assert f"{checks[-1].loss:.3f} held-out loss" in words and "2.38 acceptance length" in words
    assert "1.50× speed-up" in words and "yes equal to plain greedy" in words
    assert "finished, step 9 of 9" in words and "9.9.9" in words and "optimizer.learning_rate 0.003" in words


def test_the_cache_is_shown_with_its_errors(job, tmp_path):
    from dflash_offline.cache import Cache

    words = page_of(job / "first", out=tmp_path / "report.html").words()
    cache = Cache.open(job / "cache")
    heldout = int((cache.samples.split == 1).sum())
    assert f"samples 40: {40 - heldout} to train, {heldout} held out" in words
    assert f"tokens {int(cache.samples.length.sum()):,}:" in words
    receipts = cache.receipts().values()
    assert f"bytes of hidden states {sum(r.bytes for r in receipts):,}" in words
    tokens = sum(r.tokens for r in receipts)
    for place, layer in enumerate(cache.manifest.identity.target_layer_ids):
        mean = sum(r.layers[place].error_mean * r.tokens for r in receipts) / tokens
        plain = sum(r.layers[place].error_mean_without_peaks * r.tokens for r in receipts) / tokens
        worst = max(r.layers[place].error_worst for r in receipts)
        assert f" {layer} {mean:.3g} {worst:.3g} {plain:.3g} " in words


def test_hostile_text_is_shown_and_not_run(job, tmp_path):
    page = page_of(job / "first", out=tmp_path / "report.html")
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert HOSTILE in "".join(page.text)
    assert f"Who?He is{HOSTILE} no me" in "".join(page.text), "prompt, first token, drafts, own token"


def test_several_runs_are_compared(job, tmp_path):
    page = page_of(job / "first", job / "second", out=tmp_path / "both.html")
    assert set(page.series("Loss")) == {"first, training", "first, held out", "second, training", "second, held out"}
    assert set(page.series("Speed")) == {"first", "second"}
    assert "differences" in [a.get("id") for tag, a in page.attributes if tag == "section"]
    words = page.words()
    assert "optimizer.learning_rate 0.003 0.001" in words
    assert "2 DFlash drafters compared" in words and "read by first, second" in words
    shutil.copytree(job / "first", tmp_path / "other" / "first")
    same = page_of(job / "first", tmp_path / "other" / "first", out=tmp_path / "same.html")
    assert f"{job.name}/first" in same.words() and "other/first" in same.words()


@pytest.mark.parametrize("kept", [1, 2, 4])
def test_a_run_that_goes_on_or_is_old_is_shown_as_far_as_it_is(job, tmp_path, kept):
    """A start alone; one step, no evaluation, no known cache; a line that is just being written."""
    run = tmp_path / "going"
    shutil.copytree(job / "second", run, ignore=shutil.ignore_patterns("checkpoints", "locks"))
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    steps = [line for line in lines if json.loads(line)["kind"] in ("start", "step")]
    (run / "log.jsonl").write_text("".join(steps[:kept]) + '{"kind": "step", "lo')
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "cache": str(tmp_path / "gone")}))
    page = page_of(run, out=tmp_path / "report.html")
    words = page.words()
    assert "interrupted, step" in words and "None yet" in words
    assert "The cache is not where the run read it from" in words
    assert ("No step has been logged yet" in words) == (kept == 1)
    if kept > 1:
        assert list(page.series("Loss")) == ["training"]


def test_evaluations_of_an_older_form_are_shown_without_decodes(job, tmp_path):
    run = Path(shutil.copytree(job / "second", tmp_path / "old"))
    (run / "evaluation.json").write_text(json.dumps({"acceptance_length": None, "decodes": [{"title": "x"}]}))
    assert "None yet" in page_of(run, out=tmp_path / "report.html").words()
    (run / "evaluation.json").write_text("{")
    with pytest.raises(DFlashOfflineError, match="is damaged"):
        write_report(run, tmp_path / "report.html")


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        ([9, 5, 5, 5], "flat: 0.005 GB from step 4 to step 8"),
        ([1, 1000, 1001, 1001], r"nearly flat: 1.0 MB (0.1%) more at step 6 than at step 4"),
        ([1, 100, 150, 200], r"not flat: 100.0 MB (100.0%) more at step 8 than at step 4"),
        ([1, 100], "too few entries"),
    ],
)
def test_memory_in_words(job, tmp_path, memory, words):
    run = Path(shutil.copytree(job / "second", tmp_path / "run"))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    entries = [line for line in lines if line["kind"] in ("start", "step")][: len(memory) + 1]
    for entry, size in zip(entries[1:], memory, strict=True):
        entry["run"]["memory"] = size * 10**6
    (run / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert RunData.read(run).memory_words().startswith(words)


def test_compile_counters_are_found_whatever_their_place(job, tmp_path):
    run = Path(shutil.copytree(job / "second", tmp_path / "run"))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    lines[0]["run"]["compile"] = {"fxgraph_cache_miss": 0, "graphs": 4}
    (run / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    counters = RunData.read(run).counters()
    assert counters["run.compile.graphs"] == 4 and counters["run.compile.fxgraph_cache_miss"] == 0
    assert "run.compile.graphs 4" in page_of(run, out=tmp_path / "report.html").words()


def test_thinning_keeps_ends_and_spikes():
    points = [(i, 1.0) for i in range(10_000)]
    points[4321], points[7777] = (4321, 50.0), (7777, -3.0)
    kept = thinned(points, 400)
    assert len(kept) <= 402 and kept[0] == points[0] and kept[-1] == points[-1]
    assert points[4321] in kept and points[7777] in kept and kept == sorted(kept)
