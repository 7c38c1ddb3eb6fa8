"""What `preview` prints, with and without colour."""

import io
import json

import pytest
from rich.console import Console

from dflash_offline.config import DataConfig
from dflash_offline.conversations import preview
from dflash_offline.errors import DFlashOfflineError

CHAT = [{"role": "user", "content": "What is [bold]2+2[/bold]?"}, {"role": "assistant", "content": "It is four."}]


@pytest.fixture
def show(smollm2_tokenizer, tmp_path):
    def run(data, count=2, colour=False, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in data))
        out = io.StringIO()
        console = Console(file=out, width=160, force_terminal=colour, color_system="standard" if colour else None)
        preview(DataConfig(source=str(path), **settings), smollm2_tokenizer, count, console)
        return out.getvalue()

    return run


def test_supervised_text_stands_in_brackets_on_a_plain_pipe(show):
    out = show([{"messages": CHAT}] * 9 + [{"messages": CHAT[:1]}])
    assert out.count("What is [bold]2+2[/bold]?<|im_end|>\n<|im_start|>assistant\n⟦It is four.<|im_end|>⟧") == 2
    assert "row 0, id row-0: " in out and "by prefix-rendering" in out and "row 8" in out
    assert "\x1b" not in out
    assert "all 10 rows" in out
    lines = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") == 4}
    assert "9" in lines["kept"] and "90.0%" in lines["kept"]
    assert "1" in lines["dropped: no-assistant-turn"] and "row 9: roles are ['user']" in out
    assert "9" in lines["mask by prefix-rendering"] and "9" in lines["33 – 64"] and "█" in lines["33 – 64"]


def test_supervised_text_is_coloured_on_a_terminal(show):
    out = show([{"messages": CHAT}], colour=True)
    assert "⟦" not in out
    assert "\x1b[1;30;42mIt is four.<|im_end|>\x1b[0m" in out


def test_counts_of_a_big_file_are_of_a_stated_part_and_more_rows_are_not_read(show):
    rows = [{"text": "one two three"}] * 2100
    out = show(rows)
    assert "the first 2,048 rows" in out
    assert "the first 2,048 rows" in show([*rows, "not even a row"], rows="0:5000")


def test_a_corpus_that_prepare_would_refuse_is_shown_with_the_reasons(show):
    out = show([{"messages": CHAT}] + [{"messages": CHAT[:1]}] * 3, colour=False)
    assert "`prepare` would refuse this: 3 of 4 rows are unusable (75.0%" in out
    assert "dropped: no-assistant-turn" in out and "⟦It is four.<|im_end|>⟧" in out
    assert "no-assistant-turn" in show([{"messages": CHAT[:1]}])  # not one sample to show


def test_long_samples_lose_their_middle(show):
    out = show([{"text": "start " + "word " * 3000 + "end"}], count=1)
    assert "tokens not shown" in out and "start" in out and "word end⟧" in out.replace("\n", " ")
    assert out.count("word") < 1300


def test_slices_and_truncation_are_applied(show):
    rows = [{"id": f"r{n}", "messages": CHAT} for n in range(30)]
    assert "id r28" in show(rows, count=1, rows="-2:")
    assert "all 2 rows" in show(rows, count=1, rows="-2:")
    out = show(rows, count=1, rows="5:6", max_length=55)
    assert "id r5: " in out
    with pytest.raises(DFlashOfflineError, match="empty"):
        show([])
