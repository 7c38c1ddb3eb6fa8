"""Regenerating answers: against a real HTTP server with injected faults, with kills, and with a tiny target."""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_offline.config import DataConfig, TargetConfig
from dflash_offline.conversations.rows import Conversation, RowDropped, RowReader
from dflash_offline.errors import DFlashOfflineError, UsageError
from dflash_offline.regenerate import AnswerSettings, FetchSettings, regenerate
from dflash_offline.regenerate.journal import Journal
from dflash_offline.regenerate.rewrite import Answer, Rewrite, read_conversation, split_reasoning
from dflash_offline.regenerate.server import chat_url

DATA = Path(__file__).parent / "data"


class ChatServer:
    """Speaks the protocol; the answer to a message is ``re: <message>``. ``fault(number, body)`` may act instead."""

    def __init__(self):
        self.requests, self.headers, self.fault, self.delay = [], [], None, 0.0
        self.lock = threading.Lock()
        self.in_flight = self.most_in_flight = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments):
                pass

            def reply(self, status, value, headers=()):
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, text in headers:
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            def cut(self):
                """Close the connection with a reset, in the middle of a reply."""
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{")
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
                self.close_connection = True

            def do_GET(self):
                self.reply(200, {"data": [{"id": "the-model"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    number = len(outer.requests)
                    outer.requests.append(body)
                    outer.headers.append(dict(self.headers))
                    outer.in_flight += 1
                    outer.most_in_flight = max(outer.most_in_flight, outer.in_flight)
                try:
                    time.sleep(outer.delay)
                    if outer.fault is None or not outer.fault(self, number, body):
                        self.reply(200, completion("re: " + body["messages"][-1]["content"]))
                except (BrokenPipeError, ConnectionError):
                    pass
                finally:
                    with outer.lock:
                        outer.in_flight -= 1

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def completion(content, finish_reason="stop", **message):
    return {
        "choices": [{"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7},
    }


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    chat = ChatServer()
    yield chat
    chat.http.shutdown()
    chat.http.server_close()


def write_rows(folder, rows):
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(source=str(path))


def chat(*turns):
    roles = ["user", "assistant"]
    return {"messages": [{"role": roles[n % 2], "content": turn} for n, turn in enumerate(turns)]}


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def fetch(server, **settings):
    return FetchSettings(**({"servers": [server.url], "backoff": 0.01, "timeout": 30.0} | settings))


def test_every_turn_is_asked_for_with_the_new_answers_as_context(server, tmp_path):
    rows = [
        {"id": "a", **chat("q1", "old", "q2", "old")},
        {
            "conversations": [
                {"from": "system", "value": "s"},
                {"from": "human", "value": "h"},
                {"from": "gpt", "value": "x"},
            ]
        },
        {"question": "p", "answer": "old"},
        {"prompt": "only asked"},
        chat("u1", "old", "open"),
        {"text": "no conversation"},
    ]
    answers = AnswerSettings(temperature=0.7, top_k=20, template_arguments={"enable_thinking": False})
    summary = regenerate(write_rows(tmp_path, rows), tmp_path / "out.jsonl", answers=answers, fetch=fetch(server))
    assert summary["answered"] == 5 and summary["reasons"] == {"not-a-conversation": 1}
    out = read(tmp_path / "out.jsonl")
    assert [row["row"] for row in out] == [0, 1, 2, 3, 4]
    assert [row["id"] for row in out] == ["a", "row-1", "row-2", "row-3", "row-4"]
    assert [m["content"] for m in out[0]["messages"]] == ["q1", "re: q1", "q2", "re: q2"]
    assert [m["content"] for m in out[1]["messages"]] == ["s", "h", "re: h"]
    assert [m["content"] for m in out[4]["messages"]] == ["u1", "re: u1", "open", "re: open"]
    assert out[0]["regenerated"] == {"model": "the-model", "finish_reasons": ["stop"] * 2, "completion_tokens": 14}
    second = next(r for r in server.requests if r["messages"][-1]["content"] == "q2")
    assert [m["content"] for m in second["messages"]] == ["q1", "re: q1", "q2"]
    assert (second["model"], second["temperature"], second["top_k"]) == ("the-model", 0.7, 20)
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({r["seed"] for r in server.requests}) == len(server.requests)
    sidecar = json.loads((tmp_path / "out.settings.json").read_text())
    assert sidecar["finished"] and sidecar["settings"]["answers"]["temperature"] == 0.7


def test_faults_are_retried_and_nothing_is_lost_or_doubled(server, tmp_path):
    def fault(handler, number, body):
        kind = number % 15
        if kind == 0:
            handler.reply(503, {"error": "busy"})
        elif kind == 1:
            handler.cut()
        elif kind == 2:
            handler.reply(429, {}, [("Retry-After", "0")])
        elif kind == 3:
            handler.reply(200, b"<html>not json")
        elif kind == 4:
            handler.reply(200, completion("half", finish_reason="abort"))
        return kind < 5

    server.fault = fault
    data = write_rows(tmp_path, [chat(f"q{n}", "old", f"r{n}", "old") for n in range(30)])
    summary = regenerate(data, tmp_path / "out.jsonl", fetch=fetch(server, retries=60, concurrency=8))
    assert summary["answered"] == 30 and summary["failed"] == 0
    out = read(tmp_path / "out.jsonl")
    assert [[m["content"] for m in row["messages"]] for row in out] == [
        [f"q{n}", f"re: q{n}", f"r{n}", f"re: r{n}"] for n in range(30)
    ]
    assert 1 < server.most_in_flight <= 8


def test_a_server_that_hangs_times_out_and_the_row_is_tried_again_later(server, tmp_path):
    release = threading.Event()

    def hang(handler, number, body):
        if body["messages"][-1]["content"] == "slow":
            release.wait(30)
        return False

    server.fault = hang
    data = write_rows(tmp_path, [chat("quick", "old"), chat("slow", "old")])
    out = tmp_path / "out.jsonl"
    with pytest.raises(DFlashOfflineError, match=r"1 of 2 rows got no answer.*Run the same command again"):
        regenerate(data, out, fetch=fetch(server, timeout=1.0, retries=1))
    assert [row["row"] for row in read(out)] == [0]
    release.set()
    asked = len(server.requests)
    assert regenerate(data, out, fetch=fetch(server))["answered"] == 2
    assert len(server.requests) == asked + 1, "only the missing row is asked for"


def test_a_server_that_is_gone_stops_the_run(server, tmp_path):
    server.fault = lambda handler, number, body: handler.reply(500, {}) or True
    data = write_rows(tmp_path, [chat(f"q{n}", "old") for n in range(40)])
    with pytest.raises(DFlashOfflineError, match="10 rows one after another got no answer"):
        regenerate(data, tmp_path / "o.jsonl", fetch=fetch(server, retries=0, concurrency=2, give_up_after=10))
    assert len(server.requests) < 20


def test_refusals_drop_a_row_or_stop_the_run(server, tmp_path):
    def refuse(handler, number, body):
        if body["messages"][-1]["content"] == "too long":
            handler.reply(400, {"error": "maximum context length"})
            return True
        return False

    server.fault = refuse
    data = write_rows(tmp_path, [chat("too long", "old"), chat("fine", "old")])
    with pytest.raises(DFlashOfflineError, match=r"refused.*--max-dropped-share"):
        regenerate(data, tmp_path / "a.jsonl", fetch=fetch(server))
    assert "maximum context length" in read(tmp_path / "a.dropped.jsonl")[0]["detail"]
    summary = regenerate(data, tmp_path / "a.jsonl", fetch=fetch(server, max_dropped_share=0.5))
    assert summary["answered"] == 1 and summary["reasons"] == {"refused": 1}
    server.fault = lambda handler, number, body: handler.reply(401, {"error": "no key"}) or True
    with pytest.raises(DFlashOfflineError, match=r"401.*\n.*OPENAI_API_KEY"):
        regenerate(data, tmp_path / "b.jsonl", fetch=fetch(server))


def test_the_key_comes_from_the_environment_and_is_written_nowhere(server, tmp_path, monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret-7")
    data = write_rows(tmp_path, [chat("q", "old")])
    regenerate(data, tmp_path / "out.jsonl", fetch=fetch(server, api_key_env="MY_KEY"))
    assert server.headers[0]["Authorization"] == "Bearer secret-7"
    assert all(b"secret-7" not in path.read_bytes() for path in tmp_path.iterdir())


def test_changed_settings_are_refused_with_what_differs(server, tmp_path):
    data = write_rows(tmp_path, [chat("q", "old")])
    out = tmp_path / "out.jsonl"
    regenerate(data, out, fetch=fetch(server))
    with pytest.raises(UsageError, match=r"answers\.temperature: the rows on disk were made with 0\.0, now it is 0\.5"):
        regenerate(data, out, answers=AnswerSettings(temperature=0.5), fetch=fetch(server))
    data = write_rows(tmp_path, [chat("another", "old")])
    with pytest.raises(UsageError, match=r"data\.content_sha256"):
        regenerate(data, out, fetch=fetch(server))
    assert len(server.requests) == 1
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    with pytest.raises(UsageError, match="name another --out"):
        regenerate(data, other, fetch=fetch(server))
    with pytest.raises(UsageError, match="either a server"):
        regenerate(data, out)


@pytest.mark.timeout(300)
def test_killed_anywhere_it_goes_on_and_ends_with_the_same_rows(server, tmp_path):
    server.delay = 0.02
    data = write_rows(tmp_path, [chat(f"q{n}", "old", f"r{n}", "old") for n in range(60)])
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "dflash_offline.cli", "regenerate", data.source, "--out", str(out)]
    command += ["--server", server.url, "--concurrency", "4", "--json"]
    for wanted, number in ((10, signal.SIGKILL), (25, signal.SIGTERM)):
        process = subprocess.Popen(command, env={**os.environ, "NO_PROXY": "127.0.0.1"}, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and (not out.exists() or out.read_bytes().count(b"\n") < wanted):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        message = process.communicate()[1].decode()
        if number == signal.SIGTERM:
            assert process.returncode == 3 and "run the same command again" in message
    with open(out, "ab") as file:  # the line that a kill would tear
        file.write(b'{"id":"row-59","row":59,"messages":[{"role":"us')
    assert b"\n" in out.read_bytes()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "NO_PROXY": "127.0.0.1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["answered"] == 60
    rows = read(out)
    assert [row["row"] for row in rows] == list(range(60))
    assert all(row["messages"][3]["content"] == f"re: r{row['row']}" for row in rows)
    asked = Counter(request["messages"][-1]["content"] for request in server.requests)
    assert sum(asked.values()) <= 2 * 60 + 2 * 2 * 4, "finished rows are not asked for again"


def test_a_line_damaged_in_the_middle_is_not_passed_over(server, tmp_path):
    data = write_rows(tmp_path, [chat("q", "old"), chat("r", "old")])
    out = tmp_path / "out.jsonl"
    regenerate(data, out, fetch=fetch(server))
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[0][:20] + b"\n" + lines[1])
    with pytest.raises(DFlashOfflineError, match="line 1"):
        regenerate(data, out, fetch=fetch(server))


def test_two_processes_do_not_write_one_file(server, tmp_path):
    from dflash_offline.regenerate.journal import Journal

    with Journal(tmp_path / "o.jsonl", {}), pytest.raises(DFlashOfflineError, match="another process"):
        Journal(tmp_path / "o.jsonl", {})


def rewrite(policy="keep", *turns, **more):
    return Rewrite(0, None, Conversation(chat(*turns)["messages"], **more), policy)


def test_cut_off_answers_follow_the_policy():
    cut = Answer("half", "length")
    kept = rewrite("keep", "a", "x", "b", "x")
    kept.accept(cut)
    assert kept.next_request() is None and [m["content"] for m in kept.messages] == ["a", "half"]
    shortened = rewrite("cut", "a", "x", "b", "x")
    shortened.accept(Answer("whole", "stop"))
    shortened.accept(cut)
    assert shortened.next_request() is None and [m["content"] for m in shortened.messages] == ["a", "whole"]
    for policy in ("cut", "drop"):
        with pytest.raises(RowDropped, match="length"):
            rewrite(policy, "a", "x").accept(cut)
    with pytest.raises(RowDropped, match="content_filter"):
        rewrite("keep", "a", "x").accept(Answer("", "content_filter"))
    with pytest.raises(RowDropped, match="empty-answer"):
        rewrite("keep", "a", "x").accept(Answer("  ", "stop"))


def test_reasoning_is_kept_with_the_answer_but_not_sent_again():
    item = rewrite("keep", "a", "x", "b", "x")
    item.accept(Answer("yes", "stop", reasoning="because"))
    assert item.messages[1] == {"role": "assistant", "content": "yes", "reasoning_content": "because"}
    assert item.next_request()[1] == {"role": "assistant", "content": "yes"}
    assert split_reasoning("<think>\nwhy\n</think>\n\nso") == ("why", "so")
    assert split_reasoning("opened in the prompt</think>so") == ("opened in the prompt", "so")
    assert split_reasoning("plain") == (None, "plain")


def test_reasoning_of_a_server_reaches_the_output(server, tmp_path):
    server.fault = lambda handler, number, body: handler.reply(200, completion("a", reasoning_content="r")) or True
    regenerate(write_rows(tmp_path, [chat("q", "old")]), tmp_path / "o.jsonl", fetch=fetch(server))
    assert read(tmp_path / "o.jsonl")[0]["messages"][1]["reasoning_content"] == "r"


def test_recorded_tool_results_follow_only_the_same_calls():
    def call(arguments):
        return [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]

    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": call({"x": 1})},
        {"role": "tool", "content": "result"},
        {"role": "assistant", "content": "old"},
    ]
    same = Rewrite(0, None, Conversation(messages))
    same.accept(Answer("", "tool_calls", tool_calls=call('{"x": 1}')))
    assert same.next_request()[-1] == {"role": "tool", "content": "result"}
    other = Rewrite(0, None, Conversation(messages))
    other.accept(Answer("", "tool_calls", tool_calls=call('{"x": 2}')))
    assert other.next_request() is None and len(other.messages) == 2
    none = Rewrite(0, None, Conversation(messages))
    none.accept(Answer("no call", "stop"))
    assert none.next_request() is None


def test_urls_and_named_columns():
    assert chat_url("http://h:1") == chat_url("http://h:1/v1/") == "http://h:1/v1/chat/completions"
    with pytest.raises(UsageError, match="http://localhost:8000"):
        chat_url("h:1")
    reader = RowReader.from_config(DataConfig(source="x", columns={"prompt": "ask", "response": "say"}))
    assert read_conversation(reader, {"ask": "q"}).messages == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": ""},
    ]


@pytest.fixture(scope="module")
def tiny_target(tmp_path_factory):
    from tests.tiny_models import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("target"), tokenizer=True)


def test_a_target_loaded_here_answers_in_batches_as_it_does_alone(tiny_target, tmp_path):
    data = write_rows(tmp_path, [chat(f"question {n}", "old", "and then?", "old") for n in range(5)])
    target = TargetConfig(model=str(tiny_target), dtype="float32")
    settings = AnswerSettings(max_tokens=6)
    together = regenerate(
        data, tmp_path / "a.jsonl", answers=settings, fetch=FetchSettings(concurrency=3), target=target
    )
    assert together["answered"] == 5 and together["cut_off"] >= 1
    regenerate(data, tmp_path / "b.jsonl", answers=settings, fetch=FetchSettings(concurrency=1), target=target)
    assert (tmp_path / "a.jsonl").read_text() == (tmp_path / "b.jsonl").read_text()
    first = read(tmp_path / "a.jsonl")[0]
    assert first["regenerated"]["finish_reasons"] == ["length"] and len(first["messages"]) == 2


def test_the_answers_are_what_transformers_generates(tiny_target, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    data = write_rows(tmp_path, [chat("What is 2 + 2?", "old")])
    target = TargetConfig(model=str(tiny_target), dtype="float32")
    regenerate(data, tmp_path / "o.jsonl", answers=AnswerSettings(max_tokens=8), target=target)
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype="float32")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 2 + 2?"}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    assert read(tmp_path / "o.jsonl")[0]["messages"][1]["content"] == tokenizer.decode(
        expected, skip_special_tokens=True
    )


def test_the_output_loads_into_prepare(server, tmp_path):
    from transformers import AutoTokenizer

    from dflash_offline.conversations import build_corpus

    data = write_rows(tmp_path, [{"id": f"c{n}", **chat(f"question {n}", "old")} for n in range(4)])
    regenerate(data, tmp_path / "out.jsonl", fetch=fetch(server))
    tokenizer = AutoTokenizer.from_pretrained(DATA / "smollm2_tokenizer")
    corpus = build_corpus(DataConfig(source=str(tmp_path / "out.jsonl")), tokenizer, scratch=tmp_path / "s", workers=1)
    assert corpus.ids == ["c0", "c1", "c2", "c3"] and not corpus.dropped
    ids, mask = corpus.sample(2)
    assert tokenizer.decode(ids[mask.astype(bool)]) == "re: question 2<|im_end|>"


@pytest.mark.parametrize("whole", [True, False])
def test_a_disk_that_takes_a_line_in_parts_gets_all_of_it_or_says_that_it_is_full(tmp_path, whole):
    out = tmp_path / "answers.jsonl"
    with Journal(out, {}) as journal:
        real = journal._files[0]

        class Parts:
            fileno, close = real.fileno, real.close

            def write(self, data):
                if not whole and real.tell():
                    raise OSError(28, "No space left on device")
                return real.write(data[:10])

        journal._files[0] = Parts()
        row = {"row": 3, "messages": chat("a question", "an answer")}
        if whole:
            journal.add(row)
        else:
            with pytest.raises(DFlashOfflineError, match="no space left while writing"):
                journal.add(row)
    with Journal(out, {}) as journal:
        assert journal.settled(3) is whole
    assert out.read_bytes().endswith(b"\n") if whole else not out.read_bytes()
