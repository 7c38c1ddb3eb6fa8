"""The command line: frozen verbs and options, exit statuses, messages without tracebacks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

FROZEN = Path(__file__).parent / "data" / "command_line.txt"


def run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "dflash_offline.cli", *map(str, arguments)], capture_output=True, text=True, cwd=cwd
    )


def command_line() -> str:
    """One line a verb: its name, arguments and options."""
    from dflash_offline.cli import app

    group = typer.main.get_command(app)
    lines = []
    for name, command in sorted(group.commands.items()):
        words = [
            "|".join(p.opts) if p.param_type_name == "option" else (p.name or "").upper()
            for p in command.params
            if p.name != "help"
        ]
        lines.append(" ".join([name, *words]))
    return "\n".join(lines) + "\n"


def test_the_command_line_is_what_was_frozen():
    assert command_line() == FROZEN.read_text(), "a changed verb or option breaks users: update the file on purpose"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["extract", "no-such-recipe"], 2, ["no recipe 'no-such-recipe'", "smollm2-135m"]),
        (["train", "smollm2-135m", "--set", "training.epoch=2"], 2, ["training.epoch", "did you mean 'epochs'"]),
        (["train", "smollm2-135m", "--set", "nonsense"], 2, ["dotted.key=value"]),
        (["extract", "smollm2-135m", "--gpus", "x"], 2, ["GPU"]),
        (["verify", "no/such/cache"], 2, ["no cache at"]),
        (["status", "no/such/cache"], 2, ["no cache at"]),
        (["report", "no/such/run"], 1, ["no run log"]),
        (["train", "smollm2-135m", "--set", "cache=no/such/cache"], 2, ["no cache at"]),
        (["export", "no/such/run", "--out", "x"], 1, ["no/such/run", "give a run folder"]),
        (["nonsense"], 2, ["No such command"]),
        (["extrct", "smollm2-135m"], 2, ["No such command", "extract"]),
        (["extract", "smollm2-135m", "--sett", "a=b"], 2, ["No such option", "--set"]),
        (["doctor", "no-such-recipe"], 2, ["no recipe 'no-such-recipe'"]),
        (["doctor", "--compare", "no/such/run"], 2, ["holds no environment.jsonl"]),
        (["new", "./no/such/model"], 2, ["no such folder or file"]),
    ],
)
def test_wrong_use_gets_a_clear_message_and_status(arguments, status, words, tmp_path):
    done = run(*arguments, cwd=tmp_path)
    message = re.sub(r"\s+", " ", done.stderr)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in message


def test_every_verb_teaches_with_an_example_that_its_own_options_allow():
    from dflash_offline.cli import app

    for name, command in typer.main.get_command(app).commands.items():
        assert f"Example: dflash-offline {name}" in (command.help or ""), name
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        used = {word for word in command.help.split("Example:")[1].split() if word.startswith("--")}
        assert used <= known, name


def test_output_that_is_no_terminal_has_no_colours(tmp_path):
    for arguments in (["--help"], ["doctor"], ["nonsense"]):
        done = run(*arguments, cwd=tmp_path)
        assert "\x1b" not in done.stdout + done.stderr


def test_debug_shows_the_traceback(tmp_path):
    done = run("--debug", "verify", "no/such/cache", cwd=tmp_path)
    assert done.returncode != 0 and "Traceback" in done.stderr


def test_an_interrupt_anywhere_is_said_and_exits_3(monkeypatch, capsys):
    def interrupted(_run):
        raise KeyboardInterrupt

    from dflash_offline.cli import main

    monkeypatch.setattr("dflash_offline.watch.read_status", interrupted)
    monkeypatch.setattr(sys, "argv", ["dflash-offline", "status", "cache"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 3 and "interrupted" in capsys.readouterr().err


INTERRUPTED = """
import atexit, os, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
from dflash_offline import cli

def stop():
    os.kill(os.getpid(), signal.{signal})

class Late:
    def __del__(self):
        stop()

@cli.app.command()
def work():
    {body}

sys.argv[1:] = ["work"]
cli.main()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("body", ["stop()", "Late()", "atexit.register(stop); stop()"])
def test_every_interrupt_ends_with_3(name, body):
    """In the middle of work; in a finaliser, where Python swallows it; and once more while Python ends."""
    code = INTERRUPTED.format(signal=name, body=body)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, ""), done.stderr
    assert "interrupted: run the same command again to go on" in done.stderr
