"""Every shape of row gives the conversation, text or ids that it says, or a reason."""

import contextlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.config import DataConfig
from dflash_offline.conversations.rows import Conversation, GivenTokens, PlainText, RowDropped, RowReader
from dflash_offline.errors import UsageError

CHAT = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def read(row, **settings):
    return RowReader.from_config(DataConfig(source="unused", **settings)).read(row)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": json.dumps(CHAT)},
        {"conversation": CHAT},
        {"conversations": CHAT},
        {"conversations": [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"from": "user", "value": "What is 2+2?"}, {"from": "chatgpt", "value": "4"}]},
        {"messages": [{"role": "User", "content": [{"type": "text", "text": "What is 2+2?"}]}, CHAT[1]]},
        {"messages": [*CHAT, {"role": "user", "content": "Thanks"}]},
        {"prompt": "What is 2+2?", "response": "4"},
        {"instruction": "What is 2+2?", "input": "", "output": "4"},
        {"question": "What is 2+2?", "answer": "4", "text": "not this"},
        {"problem": "What is 2+2?", "solution": "4"},
        {"prompt": CHAT[:1], "completion": CHAT[1:]},
        {"prompt": CHAT[:1], "completion": "4"},
        {"text": None, "messages": None, "prompt": "What is 2+2?", "completion": "4"},
    ],
)
def test_shapes_of_one_conversation_agree(row):
    assert read(row) == Conversation(CHAT)


def test_alpaca_input_joins_the_instruction():
    got = read({"instruction": "Translate", "input": "chat", "output": "cat"})
    assert got.messages[0]["content"] == "Translate\n\nchat"


def test_a_prompt_that_only_looks_like_json_stays_text():
    assert read({"prompt": "[{x}] what is this?", "response": "4"}).messages[0]["content"] == "[{x}] what is this?"


def test_system_column_becomes_the_first_message_unless_there_is_one():
    assert read({"system": "Be brief", "conversations": CHAT}).messages[0] == {"role": "system", "content": "Be brief"}
    own = [{"role": "system", "content": "Own"}, *CHAT]
    assert read({"system": "Be brief", "messages": own}).messages == own


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [json.dumps(TOOLS[0])], TOOLS[0]])
def test_tools_as_list_or_json_text_agree(tools):
    assert read({"messages": CHAT, "tools": tools}).tools == TOOLS


@pytest.mark.parametrize("tools", [None, "", "[]", []])
def test_no_tools_is_none(tools):
    assert read({"messages": CHAT, "tools": tools}).tools is None


def test_reasoning_and_tool_calls_stay_in_the_message_and_arguments_become_objects():
    messages = [
        CHAT[0],
        {"role": "assistant", "content": None, "reasoning_content": "add them", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}]},
        {"role": "tool", "content": "4", "name": "add", "tool_calls": None},
        CHAT[1],
    ]  # fmt: skip
    got = read({"messages": messages}).messages
    assert got[1] == {
        "role": "assistant", "content": "", "reasoning_content": "add them",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    }  # fmt: skip
    assert got[2] == {"role": "tool", "content": "4", "name": "add"}


def test_sharegpt_tool_roles():
    speakers = [("system", "s"), ("human", "h"), ("function_call", "{}"), ("observation", "1"), ("gpt", "a")]
    got = read({"conversations": [{"from": who, "value": what} for who, what in speakers]}).messages
    assert [m["role"] for m in got] == ["system", "user", "assistant", "tool", "assistant"]


def test_plain_text_and_given_tokens():
    assert read({"text": "once"}) == PlainText("once")
    got = read({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "text": "not this"})
    assert isinstance(got, GivenTokens)
    np.testing.assert_array_equal(got.input_ids, [5, 6, 7])
    np.testing.assert_array_equal(got.loss_mask, [False, True, True])


def test_named_columns_win_over_usual_ones():
    row = {"messages": [{"role": "user", "content": "other"}], "chat_b": CHAT, "q": "What is 2+2?", "a": "4", "uid": 7}
    assert read(row, columns={"messages": "chat_b"}) == Conversation(CHAT)
    assert read(row, columns={"prompt": "q", "response": "a"}) == Conversation(CHAT)
    reader = RowReader.from_config(DataConfig(source="unused", columns={"id": "uid"}))
    assert reader.row_id(row) == "7"


def test_format_chooses_among_several_shapes():
    row = {"messages": CHAT, "text": "a text"}
    assert read(row) == Conversation(CHAT)
    assert read(row, format="text") == PlainText("a text")


@pytest.mark.parametrize(
    "row, reason",
    [
        (3, "broken-row"),
        ({"messages": {"role": "user"}}, "broken-row"),
        ({"messages": "{not json"}, "broken-row"),
        ({"messages": ["{not json"]}, "broken-row"),
        ({"messages": [3]}, "broken-row"),
        ({"messages": [{"content": "no role"}]}, "broken-row"),
        ({"messages": [{"role": "user", "content": 4}]}, "broken-row"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "broken-row"),
        ({"messages": CHAT, "tools": "{not json"}, "broken-row"),
        ({"messages": CHAT, "tools": ["3"]}, "broken-row"),
        ({"messages": CHAT, "tools": 3}, "broken-row"),
        ({"messages": [CHAT[0], {**CHAT[1], "tool_calls": 5}]}, "broken-row"),
        ({"messages": "[" * 100_000}, "broken-row"),
        ({"messages": [CHAT[0], {"role": "assistant", "content": "cut here: \ud83d"}]}, "broken-text"),
        ({"text": "cut here: \ud83d"}, "broken-text"),
        ({"messages": [{"role": "critic", "content": "?"}]}, "unknown-role"),
        ({"messages": []}, "no-assistant-turn"),
        ({"messages": CHAT[:1]}, "no-assistant-turn"),
        ({"messages": CHAT[1:]}, "roles-out-of-order"),
        ({"messages": [CHAT[0], CHAT[0], CHAT[1]]}, "roles-out-of-order"),
        ({"messages": [*CHAT, CHAT[1]]}, "roles-out-of-order"),
        ({"messages": [*CHAT, {"role": "system", "content": "late"}]}, "roles-out-of-order"),
        ({"messages": [CHAT[0], {"role": "tool", "content": "1"}, CHAT[1]]}, "roles-out-of-order"),
        ({"text": ""}, "nothing-supervised"),
        ({"text": 3}, "broken-row"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "broken-row"),
        ({"input_ids": [[1, 2]], "loss_mask": [[1, 1]]}, "broken-row"),
        ({"input_ids": [1, [2]], "loss_mask": [1, 1]}, "broken-row"),
        ({"input_ids": [1.5, 2], "loss_mask": [1, 1]}, "broken-row"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "broken-row"),
        ({"input_ids": [1, 2]}, "unknown-columns"),
        ({"foo": "bar"}, "unknown-columns"),
    ],
)
def test_unusable_rows_say_why(row, reason):
    with pytest.raises(RowDropped) as caught:
        read(row)
    assert caught.value.reason == reason


def test_a_named_column_that_is_absent_is_named_in_the_detail():
    with pytest.raises(RowDropped) as caught:
        read({"messages": CHAT}, columns={"messages": "dialog"})
    assert caught.value.reason == "unknown-columns"
    assert "'dialog'" in caught.value.detail and "['messages']" in caught.value.detail


def test_wrong_column_settings_are_wrong_use():
    with pytest.raises(UsageError, match=r"unknown role 'message'.*messages"):
        read({}, columns={"message": "x"})
    with pytest.raises(UsageError, match="several formats"):
        read({}, columns={"messages": "x", "text": "y"})


KEYS = "messages conversations prompt response instruction input output text input_ids loss_mask tools system id"
speakers = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt"]) | st.none() | st.integers()
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["\ud800", "[{", "{}", "[5]"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "from", "content", "value", "tool_calls", "function"]), inner)
        | st.fixed_dictionaries({"role": speakers, "content": inner}, optional={"tool_calls": inner})
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(KEYS.split()), anything, min_size=1, max_size=4))
@settings(deadline=None, max_examples=300)
def test_any_json_is_read_or_dropped_with_a_reason(row):
    reader = RowReader.from_config(DataConfig(source="x"))
    with contextlib.suppress(RowDropped):
        reader.read(row)
    (reader.row_id(row) or "").encode()
