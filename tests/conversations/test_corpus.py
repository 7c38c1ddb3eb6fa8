"""The corpus as a whole: every source, the same result whatever the workers, counts, refusals, fingerprints."""

import copy
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash_offline.config import DataConfig
from dflash_offline.conversations import build_corpus, encode, template_sha256, tokenizer_sha256
from dflash_offline.errors import DFlashOfflineError, UsageError

DATA = Path(__file__).parent.parent / "data"
GSM8K = DATA / "smollm2_gsm8k.jsonl.gz"
SHAREGPT = DATA / "conversations" / "sharegpt.json"


@pytest.fixture(scope="module")
def rows():
    with gzip.open(GSM8K, "rt", encoding="utf-8") as file:
        return [json.loads(next(file)) for _ in range(40)]


@pytest.fixture
def build(smollm2_tokenizer, tmp_path):
    def run(source, vocab_size=None, workers=1, tokenizer=smollm2_tokenizer, **settings):
        source = [str(item) for item in source] if isinstance(source, list) else str(source)
        run.count += 1
        scratch = tmp_path / f"scratch-{run.count}"
        data = DataConfig(source=source, **settings)
        return build_corpus(data, tokenizer, scratch=scratch, workers=workers, vocab_size=vocab_size)

    run.count = 0
    return run


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def same(a, b, but=()):
    for name in ("rows", "lengths", "supervised", "anchors", "prompt_hash", "input_ids", "loss_mask", "offsets"):
        if name not in but:
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
    assert a.ids == b.ids and a.dropped == b.dropped and a.truncated == b.truncated


def as_jsonl(folder, rows):
    return write_lines(folder / "rows.jsonl", rows)


def as_jsonl_with_blanks(folder, rows):
    path = folder / "blank.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\r\n\n".join(json.dumps(row).encode() for row in rows))
    return path


def as_gz(folder, rows):
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(as_jsonl(folder, rows).read_bytes()))
    return folder / "rows.jsonl.gz"


def as_array(folder, rows):
    (folder / "rows.json").write_text(" \n" + json.dumps(rows, indent=1))
    return folder / "rows.json"


def as_array_gz(folder, rows):
    (folder / "rows.json.gz").write_bytes(gzip.compress(json.dumps(rows).encode()))
    return folder / "rows.json.gz"


def as_lines_named_json(folder, rows):
    return write_lines(folder / "lines.json", rows)


def as_parquet(folder, rows):
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet", row_group_size=7)
    return folder / "rows.parquet"


def as_saved_dataset(folder, rows):
    from datasets import Dataset

    Dataset.from_list(rows).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_saved_dataset_dict(folder, rows):
    from datasets import Dataset, DatasetDict

    DatasetDict(train=Dataset.from_list(rows), other=Dataset.from_list(rows[:1])).save_to_disk(str(folder / "dict"))
    return folder / "dict"


def as_loadable_folder(folder, rows):
    (folder / "dataset" / "data").mkdir(parents=True)
    as_parquet(folder / "dataset" / "data", rows).rename(folder / "dataset" / "data" / "train-00000.parquet")
    return folder / "dataset"


KINDS = [as_jsonl, as_jsonl_with_blanks, as_gz, as_array, as_array_gz, as_lines_named_json, as_parquet,
         as_saved_dataset, as_saved_dataset_dict, as_loadable_folder]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [None, "-30:-3:4"])
def test_every_kind_of_source_gives_what_the_tokenizer_gives(
    kind, part, rows, build, smollm2_tokenizer, tmp_path, monkeypatch
):
    monkeypatch.setattr("dflash_offline.conversations.sources.CHUNK_ROWS", 16)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    corpus = build(kind(tmp_path, rows), rows=part)
    wanted = list(range(40))[slice(-30, -3, 4) if part else slice(None)]
    assert corpus.rows.tolist() == wanted and corpus.rows.dtype == np.int64
    assert corpus.ids == [f"gsm8k-train-{number}" for number in wanted]
    assert corpus.total_rows == len(wanted) and corpus.dropped == {}
    for index, number in enumerate(wanted):
        ids, mask = corpus.sample(index)
        messages = rows[number]["messages"]
        # An expectation of its own: token ids of prompt, answer and rest, joined.
        prompt = smollm2_tokenizer.apply_chat_template(
            messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"]  # fmt: skip
        answer = smollm2_tokenizer(messages[1]["content"] + "<|im_end|>", add_special_tokens=False)["input_ids"]
        end = smollm2_tokenizer("\n", add_special_tokens=False)["input_ids"]
        assert ids.tolist() == prompt + answer + end
        assert mask.tolist() == [0] * len(prompt) + [1] * len(answer) + [0] * len(end)
        assert (corpus.lengths[index], corpus.supervised[index]) == (len(ids), len(answer))
        assert corpus.anchors[index] == len(answer) - 1


def test_decoded_supervised_tokens_are_the_real_answers(build, smollm2_tokenizer):
    corpus = build([GSM8K, SHAREGPT], rows=":360:12", max_length=2048)
    with gzip.open(GSM8K, "rt", encoding="utf-8") as file:
        answers = [json.loads(line)["messages"][1]["content"] for line in file][:360:12]
    for index, answer in enumerate(answers):
        ids, mask = corpus.sample(index)
        assert smollm2_tokenizer.decode(ids[mask == 1].tolist()) == answer + "<|im_end|>"
    corpus = build(SHAREGPT)
    assert len(corpus) == 60 and corpus.mask_method == {"prefix-rendering": 60}
    for index, row in enumerate(json.loads(SHAREGPT.read_text())):
        ids, mask = corpus.sample(index)
        said = "".join(turn["value"] + "<|im_end|>" for turn in row["conversations"] if turn["from"] == "gpt")
        assert smollm2_tokenizer.decode(ids[mask == 1].tolist()) == said


def as_folder_of_jsonl(folder, rows):
    (folder / "lines").mkdir()
    write_lines(folder / "lines" / "train.jsonl", rows)
    return folder / "lines"


@pytest.mark.parametrize("kind", [as_folder_of_jsonl, as_parquet, as_saved_dataset])
def test_tools_survive_arrow_where_every_struct_has_all_fields(kind, build, tmp_path, smollm2_tokenizer, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    template = tmp_path / "tools.jinja"
    template.write_text("{{ tools | tojson }}{% for m in messages %}{{ '\\n' + (m | tojson) }}{% endfor %}")

    def tool(name, **fields):
        return {"name": name, "parameters": {"properties": fields}}

    user = {"role": "user", "content": "u"}
    rows = [
        {
            "messages": [user, {"role": "assistant", "content": "a", "reasoning_content": "r"}],
            "tools": [tool("f", x={"type": "int"})],
        },
        {
            "messages": [user, {"role": "assistant", "content": "a"}],
            "tools": [tool("g", y={"type": "str", "enum": ["p", "q"]}), tool("h", x={"type": "int"})],
        },
    ]
    settings = {"chat_template": str(template), "max_skipped_share": 0.0}
    plain, got = build(as_jsonl(tmp_path, rows), **settings), build(kind(tmp_path, rows), **settings)
    for index, row in enumerate(rows):
        # Arrow orders keys its own way: compare what the template was given, not the text.
        a, b = (smollm2_tokenizer.decode(c.sample(index)[0].tolist()).splitlines() for c in (plain, got))
        assert json.loads(a[0]) == row["tools"]
        assert [json.loads(line) for line in a] == [json.loads(line) for line in b]


def test_several_sources_are_numbered_through_and_may_differ_in_shape(build, tmp_path, rows):
    both = build([as_jsonl(tmp_path, rows), SHAREGPT, GSM8K], rows="38:102")
    assert both.rows.tolist() == list(range(38, 102))
    assert both.ids[:3] == ["gsm8k-train-38", "gsm8k-train-39", json.loads(SHAREGPT.read_text())[0]["id"]]
    assert both.ids[-2:] == ["gsm8k-train-0", "gsm8k-train-1"]
    for start in range(3):
        every_third = build([as_jsonl(tmp_path, rows), SHAREGPT], rows=f"{start}::3")
        assert every_third.rows.tolist() == list(range(start, 100, 3))
    glob = write_lines(tmp_path / "part-0.jsonl", rows[:3]), write_lines(tmp_path / "part-1.jsonl", rows[3:5])
    same(build(tmp_path / "part-*.jsonl"), build(list(glob)))


def test_two_processes_give_what_one_gives(build, tmp_path, rows, monkeypatch):
    mixed = [*rows, {"text": "plain text"}, {"messages": []}, *rows, {"id": None, "prompt": "a b", "response": "c d"}]
    path = as_jsonl(tmp_path, mixed)
    monkeypatch.setattr("dflash_offline.conversations.sources.CHUNK_ROWS", 8)
    one = build(path, max_length=200)
    monkeypatch.setattr(encode, "MIN_ROWS_FOR_PROCESSES", 10)
    two = build(path, max_length=200, workers=2)
    same(one, two)
    assert one.fingerprint == two.fingerprint and one.dropped == {"no-assistant-turn": 1}
    assert one.mask_method == two.mask_method == {"prefix-rendering": 81, "text": 1}
    path.write_text(path.read_text() + '{"messages": [\n')
    with pytest.raises(DFlashOfflineError, match=r"rows\.jsonl, line 84: not valid JSON"):  # from the other process
        build(path, workers=2)


def test_long_rows_are_cut_or_dropped_by_policy_and_counted(build, tmp_path, rows):
    path = as_jsonl(tmp_path, rows)
    full = build(path)
    assert full.truncated == 0
    limit = int(np.median(full.lengths))
    cut = build(path, max_length=limit)
    assert cut.truncated == int((full.lengths > limit).sum()) > 0
    assert len(cut) == 40 and cut.lengths.max() == limit
    for index in range(40):
        for whole, part in zip(full.sample(index), cut.sample(index), strict=True):
            np.testing.assert_array_equal(part, whole[:limit])
    dropped = build(path, max_length=limit, overflow="drop", max_skipped_share=1.0)
    assert dropped.dropped == {"too-long": cut.truncated} and dropped.truncated == 0
    assert dropped.rows.tolist() == full.rows[full.lengths <= limit].tolist()
    prompts = full.lengths - full.supervised - 1
    short = build(path, max_length=int(np.median(prompts)), max_skipped_share=1.0)
    assert short.dropped == {"truncated-away": int((prompts + 2 > np.median(prompts)).sum())}


def test_given_tokens_pass_unchanged_and_must_lie_in_the_vocabulary(build, tmp_path):
    rows = [{"input_ids": [5, 6, 7, 8], "loss_mask": [0, 1, 1, 0]}, {"input_ids": [9, 49151], "loss_mask": [1, 1]}]
    path = as_jsonl(tmp_path, rows)
    corpus = build(path)
    assert corpus.input_ids.tolist() == [5, 6, 7, 8, 9, 49151] and corpus.input_ids.dtype == np.uint32
    assert corpus.loss_mask.tolist() == [0, 1, 1, 0, 1, 1] and corpus.loss_mask.dtype == np.uint8
    assert corpus.offsets.tolist() == [0, 4, 6] and corpus.anchors.tolist() == [1, 1]
    assert corpus.ids == ["row-0", "row-1"] and corpus.mask_method == {"given": 2}
    with pytest.raises(DFlashOfflineError, match=r"row 1: token id 49151 is outside .* vocabulary of 49151"):
        build(path, vocab_size=49151)
    for wrong in (-1, 49152):
        with pytest.raises(DFlashOfflineError, match=f"row 0: token id {wrong} is outside"):
            build(write_lines(tmp_path / "wrong.jsonl", [{"input_ids": [wrong, 1], "loss_mask": [1, 1]}]))


def test_a_tokenizer_of_another_vocabulary_is_an_error(build, tmp_path, rows):
    with pytest.raises(DFlashOfflineError, match=r"outside the target's vocabulary of 1000; the tokenizer's ids"):
        build(as_jsonl(tmp_path, rows), vocab_size=1000)


def test_unusable_rows_are_counted_by_reason_and_kept_apart(build, tmp_path, rows):
    bad = [
        {"messages": [{"role": "user", "content": "?"}]},
        {"messages": [{"role": "assistant", "content": "!"}]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"input_ids": [1, 2, 3], "loss_mask": [1, 0, 1]},
        {"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]},
        {"unknown": 1},
        7,
    ]
    expected = {
        "no-assistant-turn": 1, "roles-out-of-order": 1, "nothing-supervised": 1, "no-anchor": 1,
        "too-few-supervised": 1, "unknown-columns": 1, "broken-row": 1,
    }  # fmt: skip
    path = write_lines(tmp_path / "mixed.jsonl", [bad[0], *rows, *bad[1:]])
    corpus = build(path)
    assert corpus.dropped == expected and corpus.total_rows == 47
    assert corpus.rows.tolist() == list(range(1, 41))  # rows keep their number in the source
    with pytest.raises(DFlashOfflineError) as caught:
        build(path, max_skipped_share=0.1)
    message = str(caught.value)
    assert "7 of 47 rows are unusable (14.9%; data.max_skipped_share allows 10.0%)" in message
    for reason in expected:
        assert reason in message
    assert "row 41: message 0: 'assistant' comes first" in message and "columns are ['unknown']" in message


def test_a_corpus_without_any_usable_row_fails_whatever_the_limit_and_early(build, tmp_path):
    path = write_lines(tmp_path / "none.jsonl", [{"text": ""}] * 9000)
    with pytest.raises(DFlashOfflineError, match=r"2048 of 2048 rows are unusable") as caught:
        build(path, max_skipped_share=1.0)
    assert "nothing-supervised" in str(caught.value)


def test_broken_json_names_file_and_line(build, tmp_path, rows):
    path = as_jsonl(tmp_path, rows)
    lines = path.read_text().splitlines()
    lines[17] = '\n{"messages": [oops'  # a blank line before it counts as a line but not as a row
    path.write_text("\n".join(lines))
    with pytest.raises(
        DFlashOfflineError, match=r"rows\.jsonl, line 19: not valid JSON \(Expecting value at column 15"
    ):
        build(path)
    path.write_bytes(b'{"text": "a"}\n{"text": "\xff\xfe"}\n')
    with pytest.raises(DFlashOfflineError, match=r"rows\.jsonl, line 2: not valid JSON \('utf-8'"):
        build(path)
    array = tmp_path / "broken.json"
    array.write_text('[\n{"text": "a"},\n{"text": \n]')
    with pytest.raises(DFlashOfflineError, match=r"broken\.json, line 4: not valid JSON"):
        build(array)


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.json", "empty.jsonl.gz", "list.json", "empty.parquet"])
def test_empty_files_say_so(build, tmp_path, name):
    path = tmp_path / name
    if name == "empty.parquet":
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    else:
        path.write_bytes({"empty.jsonl.gz": gzip.compress(b"\n"), "list.json": b"[]"}.get(name, b""))
    with pytest.raises(DFlashOfflineError, match=f"{name}: empty, it holds no rows"):
        build(path)


def test_damaged_files_say_so(build, tmp_path, rows):
    path = as_gz(tmp_path, rows)
    path.write_bytes(path.read_bytes()[:-900])
    with pytest.raises(DFlashOfflineError, match=r"rows\.jsonl\.gz: not a whole gzip file"):
        build(path)
    (tmp_path / "fake.jsonl.gz").write_text("not gzip")
    with pytest.raises(DFlashOfflineError, match="not a whole gzip file"):
        build(tmp_path / "fake.jsonl.gz")
    (tmp_path / "fake.parquet").write_text("not parquet")
    with pytest.raises(DFlashOfflineError, match="not a readable Parquet file"):
        build(tmp_path / "fake.parquet")


def test_wrong_sources_and_slices_are_wrong_use(build, tmp_path, rows):
    path = as_jsonl(tmp_path, rows)
    with pytest.raises(UsageError, match="no such file or folder"):
        build(tmp_path / "missing.jsonl")
    (tmp_path / "rows.csv").write_text("a,b")
    with pytest.raises(UsageError, match="unknown kind of file"):
        build(tmp_path / "rows.csv")
    with pytest.raises(UsageError, match="holds the splits"):
        build(as_saved_dataset_dict(tmp_path, rows), split="test")
    for text in ("5", "a:b", "0:9:-1", "0:9:0", "1:2:3:4"):
        with pytest.raises(UsageError, match=r"data\.rows"):
            build(path, rows=text)
    with pytest.raises(DFlashOfflineError, match="selects none of the 40 rows"):
        build(path, rows="40:50")
    with pytest.raises(UsageError, match=r"data\.chat_template .* cannot be read"):
        build(path, chat_template=str(tmp_path / "missing.jinja"))


def test_the_fingerprint_covers_all_that_shapes_tokens_and_nothing_else(build, tmp_path, rows, smollm2_tokenizer):
    rows = rows[:6]
    path = as_jsonl(tmp_path, rows)
    template = tmp_path / "own.jinja"
    template.write_text(smollm2_tokenizer.chat_template + "{{ '' }}")
    other = copy.deepcopy(smollm2_tokenizer)
    other.add_tokens(["<one more>"])
    base = build(path)
    variants = {
        "max_length": build(path, max_length=300),
        "overflow": build(path, overflow="drop"),
        "loss_on": build(path, loss_on="last"),
        "rows": build(path, rows="0:5"),
        "columns": build(path, columns={"messages": "messages"}),
        "format": build(path, format="messages"),
        "min_supervised": build(path, min_supervised=3),
        "template_arguments": build(path, template_arguments={"x": 1}),
        "chat_template": build(path, chat_template=str(template)),
        "tokenizer": build(path, tokenizer=other),
    }
    fingerprints = {"base": base.fingerprint} | {name: corpus.fingerprint for name, corpus in variants.items()}
    assert len(set(fingerprints.values())) == len(fingerprints), fingerprints
    assert {corpus.dataset_fingerprint for corpus in variants.values()} == {base.dataset_fingerprint}

    moved = path.rename(tmp_path / "moved.jsonl")
    same_tokens = tmp_path / "same.jinja"
    same_tokens.write_text(smollm2_tokenizer.chat_template)
    for corpus in (
        build(moved),
        build(moved, seed=1, heldout_share=0.5, max_skipped_share=0.5),
        build(moved, chat_template=str(same_tokens)),  # the template counts by its text, not by where it lies
    ):
        assert (corpus.fingerprint, corpus.dataset_fingerprint) == (base.fingerprint, base.dataset_fingerprint)
    rows[3] = {**rows[3], "messages": [*rows[3]["messages"][:1], {"role": "assistant", "content": "Other."}]}
    changed = build(as_jsonl(tmp_path, rows))
    assert changed.fingerprint != base.fingerprint and changed.dataset_fingerprint != base.dataset_fingerprint


@pytest.mark.parametrize("kind", [as_saved_dataset, as_loadable_folder])
def test_dataset_folders_are_fingerprinted_by_content(kind, build, tmp_path, rows, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    prints = []
    for name, content in (("a", rows), ("b", rows), ("c", rows[:-1])):
        (tmp_path / name).mkdir()
        prints.append(build(kind(tmp_path / name, content)).dataset_fingerprint)
    assert prints[0] == prints[1] != prints[2]


def test_hub_ids_are_loaded_as_asked_and_fingerprinted_by_commit(build, rows, monkeypatch):
    from datasets import Dataset

    asked, commits = [], iter(["a" * 40, "a" * 40, "b" * 40])

    def answer(name, subset, **options):  # the hub, as far as this test may reach it
        asked.append((name, subset, options))
        dataset = Dataset.from_list(rows[:5])
        dataset.info.download_checksums = {f"hf://datasets/{name}@{next(commits)}/data/train.parquet": {}}
        return dataset

    monkeypatch.setattr("datasets.load_dataset", answer)
    settings = {"subset": "en", "split": "train_sft", "revision": "v1"}
    prints = [build("some-one/chats_2", **settings).dataset_fingerprint for _ in range(3)]
    assert prints[0] == prints[1] != prints[2]
    assert asked[0] == ("some-one/chats_2", "en", {"split": "train_sft", "revision": "v1"})

    def refuse(*args, **options):
        raise ConnectionError("no route to the hub")

    monkeypatch.setattr("datasets.load_dataset", refuse)
    with pytest.raises(DFlashOfflineError, match=r"'some-one/chats_2': cannot be loaded.*no route to the hub"):
        build("some-one/chats_2")


def test_tokenizer_sha256_is_that_of_the_saved_copy_and_ignores_call_state(smollm2_tokenizer, tmp_path):
    from transformers import AutoTokenizer, ByT5Tokenizer

    before = tokenizer_sha256(smollm2_tokenizer)
    smollm2_tokenizer.save_pretrained(tmp_path)
    copied = AutoTokenizer.from_pretrained(tmp_path)
    copied("some words here", truncation=True, max_length=2, padding="max_length")
    assert tokenizer_sha256(copied) == before
    copied.eos_token = "<|endoftext|>"
    assert tokenizer_sha256(copied) != before
    assert len(tokenizer_sha256(ByT5Tokenizer())) == 64
    data = DataConfig(source="unused")
    assert template_sha256(copied, data) == template_sha256(smollm2_tokenizer, data)
    copied.chat_template = None
    assert template_sha256(copied, data) != template_sha256(smollm2_tokenizer, data)
    assert tokenizer_sha256(ByT5Tokenizer()) == tokenizer_sha256(ByT5Tokenizer()) != before


def test_a_template_that_writes_todays_date_is_warned_of(build, tmp_path, rows, caplog):
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%Y') }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")
    build(as_jsonl(tmp_path, rows), chat_template=str(template))
    assert "today's date" in caplog.text
    caplog.clear()
    build(as_jsonl(tmp_path, rows), chat_template=str(template), template_arguments={"date_string": "x"})
    assert not caplog.text
