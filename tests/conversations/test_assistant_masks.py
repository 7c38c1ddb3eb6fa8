"""Which tokens count as the assistant's, against expectations made another way."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_offline.config import DataConfig
from dflash_offline.conversations.chunks import Chunk
from dflash_offline.conversations.encode import RowEncoder
from dflash_offline.conversations.masks import ChatRenderer, spans_to_mask
from dflash_offline.conversations.rows import Conversation, RowDropped
from dflash_offline.errors import DFlashOfflineError, UsageError


def on_one_line(template):
    """Written over many lines for the reader; no line break of ours is rendered."""
    return "".join(line.strip() for line in template.splitlines())


CHATML = on_one_line(r"""
    {% for message in messages %}
        {{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""")
TAGGED = on_one_line(r"""
    {% for message in messages %}
        {{ '<|im_start|>' + message['role'] + '\n' }}
        {% if message['role'] == 'assistant' %}
            {% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
        {% else %}
            {{ message['content'] + '<|im_end|>\n' }}
        {% endif %}
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""")
# As Qwen3's: reasoning is shown only after the last user turn; tools go into the system turn.
REASONING = on_one_line(r"""
    {% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}
    {% set ns = namespace(last=0) %}
    {% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
    {% for m in messages %}
        {{ '<|im_start|>' + m.role + '\n' }}
        {% if m.role == 'assistant' and loop.index0 > ns.last and m.reasoning_content %}
            {{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}
        {% endif %}
        {{ m.content }}
        {% if m.tool_calls %}{{ '<call>' + (m.tool_calls | tojson) + '</call>' }}{% endif %}
        {{ '<|im_end|>\n' }}
    {% endfor %}
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""")
# As DeepSeek-R1's: the generation prompt opens a thought that the history never shows.
OPENED = CHATML.replace(r"'<|im_start|>assistant\n'", r"'<|im_start|>assistant\n<think>\n'")
# As Mistral's: no generation prompt at all, white space around the content.
BRACKETS = on_one_line(r"""
    {% for m in messages %}
        {% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
        {% elif m.role == 'assistant' %}{{ ' ' + m.content + '<|endoftext|>' }}
        {% else %}{{ raise_exception('no ' + m.role + ' here') }}{% endif %}
    {% endfor %}
""")
ALL_TAGGED = r"{% generation %}{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}{% endgeneration %}"
NONE_TAGGED = CHATML + "{% if false %}{% generation %}x{% endgeneration %}{% endif %}"

FOUR_TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!  \n"},
    {"role": "user", "content": "Capital of Åland? 🏝"},
    {"role": "assistant", "content": "\nMariehamn 🏝️, of course."},
]


@pytest.fixture
def encode(smollm2_tokenizer, tmp_path):
    def run(row, template=None, tokenizer=smollm2_tokenizer, **options):
        if template is not None:
            path = tmp_path / "template.jinja"
            path.write_text(template, encoding="utf-8")
            options["chat_template"] = str(path)
        encoder = RowEncoder(DataConfig(source="unused", **options), tokenizer)
        return encoder.encode(Chunk("here", [0], objects=[row]))

    return run


def pieces(tokenizer, ids, mask):
    """Decoded runs of supervised tokens."""
    cuts = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in zip(cuts[::2], cuts[1::2], strict=True)]


def test_supervised_pieces_are_the_answers_and_the_token_that_ends_them(encode, smollm2_tokenizer):
    out = encode({"messages": FOUR_TURNS}, CHATML)
    assert out.methods == ["prefix-rendering"]
    expected = ["Hello!  \n<|im_end|>", "\nMariehamn 🏝️, of course.<|im_end|>"]
    # The leading "\n" merges with nothing here, but where the tokenizer joins it to the header, that token is out.
    got = pieces(smollm2_tokenizer, out.input_ids, out.loss_mask)
    assert got[0] == expected[0]
    assert got[1] in (expected[1], expected[1][1:])


def test_ids_are_those_of_the_whole_rendered_conversation(encode, smollm2_tokenizer):
    out = encode({"messages": FOUR_TURNS})
    want = smollm2_tokenizer.apply_chat_template(FOUR_TURNS, tokenize=True, return_dict=True)["input_ids"]
    np.testing.assert_array_equal(out.input_ids, want)


CONTENT = st.text(alphabet=st.sampled_from("ab \n.,é🏝<|>[]_"), min_size=1, max_size=12).filter(
    lambda text: text.strip() and not text[0].isspace()
)


@pytest.fixture(scope="module")
def two_encoders(smollm2_tokenizer, tmp_path_factory):
    """The same template without and with generation tags."""
    encoders = []
    for name, template in (("plain", CHATML), ("tagged", TAGGED)):
        path = tmp_path_factory.mktemp("templates") / f"{name}.jinja"
        path.write_text(template, encoding="utf-8")
        encoders.append(RowEncoder(DataConfig(source="unused", chat_template=str(path)), smollm2_tokenizer))
    return encoders


@settings(max_examples=60, deadline=None)
@given(st.lists(CONTENT, min_size=2, max_size=6))
def test_prefix_rendering_agrees_with_generation_tags(two_encoders, contents):
    messages = [
        {"role": "user" if turn % 2 == 0 else "assistant", "content": content}
        for turn, content in enumerate(contents[: len(contents) // 2 * 2])
    ]
    chunk = Chunk("here", [0], objects=[{"messages": messages}])
    plain, tagged = (encoder.encode(chunk) for encoder in two_encoders)
    assert plain.methods == ["prefix-rendering"] and tagged.methods == ["generation-tags"]
    np.testing.assert_array_equal(plain.input_ids, tagged.input_ids)
    np.testing.assert_array_equal(plain.loss_mask, tagged.loss_mask)


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_last_only_supervises_the_last_turn(encode, smollm2_tokenizer, template):
    out = encode({"messages": [*FOUR_TURNS[:3], FOUR_TURNS[1], {"role": "assistant", "content": "Again."}]}, template,
                 loss_on="last")  # fmt: skip
    assert pieces(smollm2_tokenizer, out.input_ids, out.loss_mask) == ["Again.<|im_end|>"]


def test_a_template_that_drops_earlier_reasoning_falls_back_to_the_last_turn(encode, smollm2_tokenizer):
    messages = [
        FOUR_TURNS[1],
        {"role": "assistant", "content": "Hello.", "reasoning_content": "They greet."},
        FOUR_TURNS[3],
        {"role": "assistant", "content": "Mariehamn.", "reasoning_content": "Easy."},
    ]
    out = encode({"messages": messages}, REASONING)
    assert out.methods == ["last-turn-fallback"]
    assert pieces(smollm2_tokenizer, out.input_ids, out.loss_mask) == [
        "<think>\nEasy.\n</think>\n\nMariehamn.<|im_end|>"
    ]
    assert "They greet." not in smollm2_tokenizer.decode(out.input_ids)
    # The last turn alone never needs the fallback, and single turns keep their reasoning.
    assert encode({"messages": messages}, REASONING, loss_on="last").methods == ["prefix-rendering"]
    assert encode({"messages": messages[:2]}, REASONING).methods == ["prefix-rendering"]


def test_a_generation_prompt_that_opens_a_thought_falls_back_to_the_last_turn(encode, smollm2_tokenizer):
    assert "<think>" in OPENED
    out = encode({"messages": [*FOUR_TURNS[:2], {"role": "assistant", "content": "Hello."}]}, OPENED)
    assert out.methods == ["last-turn-fallback"]
    assert pieces(smollm2_tokenizer, out.input_ids, out.loss_mask) == ["Hello.<|im_end|>"]


def test_tools_and_tool_calls_reach_the_template(encode, smollm2_tokenizer):
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": '{"a":2}'}}]},
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "Four."},
    ]
    out = encode({"messages": messages, "tools": '[{"name": "add"}]'}, REASONING)
    assert smollm2_tokenizer.decode(out.input_ids).startswith('<|im_start|>system\nTools: [{"name": "add"}]<|im_end|>')
    assert pieces(smollm2_tokenizer, out.input_ids, out.loss_mask) == [
        '<call>[{"function": {"name": "add", "arguments": {"a": 2}}}]</call><|im_end|>',
        "Four.<|im_end|>",
    ]


def test_template_arguments_reach_the_template(encode, smollm2_tokenizer):
    template = "{{ greeting }}" + CHATML
    out = encode({"messages": FOUR_TURNS}, template, template_arguments={"greeting": "Good day"})
    assert smollm2_tokenizer.decode(out.input_ids).startswith("Good day<|im_start|>")
    with pytest.raises(UsageError, match="tokenize cannot be set there"):
        encode({"messages": FOUR_TURNS}, template_arguments={"tokenize": True})


def test_templates_without_a_generation_prompt(encode, smollm2_tokenizer):
    out = encode({"messages": FOUR_TURNS[1:]}, BRACKETS)
    got = pieces(smollm2_tokenizer, out.input_ids, out.loss_mask)
    assert out.methods == ["prefix-rendering"]
    assert [piece.strip() for piece in got] == ["Hello!  \n<|endoftext|>", "Mariehamn 🏝️, of course.<|endoftext|>"]


@pytest.mark.parametrize(
    "template, reason, detail",
    [
        (ALL_TAGGED, "everything-supervised", "user's turns too"),
        ("<|im_start|>" + ALL_TAGGED, "everything-supervised", "user's turns too"),
        (NONE_TAGGED, "nothing-supervised", "all zero"),
        (BRACKETS, "template-error", "no system here"),
        ("{{ messages[0].nothing.at_all }}", "template-error", "UndefinedError"),
    ],
)
def test_templates_that_give_wrong_masks_or_refuse_are_counted(encode, template, reason, detail):
    out = encode({"messages": FOUR_TURNS}, template)
    assert not out.rows and out.dropped == {reason: 1}
    assert detail in out.examples[reason]


def test_a_template_that_is_not_jinja_is_an_error(encode):
    with pytest.raises(DFlashOfflineError, match="not valid Jinja"):
        encode({"messages": FOUR_TURNS}, "{% for %}")


def test_conversations_without_a_chat_template_are_wrong_use(encode, smollm2_tokenizer):
    import copy

    base = copy.deepcopy(smollm2_tokenizer)
    base.chat_template = None
    with pytest.raises(UsageError, match=r"no chat template.*data\.chat_template"):
        encode({"messages": FOUR_TURNS}, tokenizer=base)
    assert encode({"text": "Once upon a time"}, tokenizer=base).methods == ["text"]


def test_tokenizers_without_offsets_give_the_same_turns(encode):
    from transformers import ByT5Tokenizer

    tokenizer = ByT5Tokenizer()
    assert not tokenizer.is_fast
    out = encode({"messages": FOUR_TURNS}, TAGGED, tokenizer=tokenizer)
    assert out.methods == ["prefix-rendering"]  # tags need offsets
    assert pieces(tokenizer, out.input_ids, out.loss_mask) == [
        "Hello!  \n<|im_end|>",
        "\nMariehamn 🏝️, of course.<|im_end|>",
    ]


def test_tokens_that_straddle_the_beginning_of_a_span_are_not_supervised():
    offsets = np.array([[0, 2], [2, 5], [5, 8], [8, 8], [8, 9], [9, 9]])
    np.testing.assert_array_equal(spans_to_mask(offsets, [(4, 9)]), [0, 0, 1, 1, 1, 0])


def test_plain_text_is_supervised_whole_with_the_tokenizers_own_special_tokens(encode):
    from transformers import ByT5Tokenizer

    out = encode({"text": "abc"}, tokenizer=ByT5Tokenizer())
    np.testing.assert_array_equal(out.input_ids, [100, 101, 102, 1])
    assert out.loss_mask.all() and out.methods == ["text"]


def test_a_prompt_that_the_template_rewrites_is_dropped(smollm2_tokenizer):
    template = "{{ messages | length }}" + CHATML
    renderer = ChatRenderer(smollm2_tokenizer, template, {}, last_only=False)
    with pytest.raises(RowDropped) as caught:
        renderer.render(Conversation(FOUR_TURNS))
    assert caught.value.reason == "prompt-not-a-prefix"


def test_generation_tags_are_recognised_in_every_spelling(smollm2_tokenizer):
    for spelling in ("{% generation %}", "{%- generation -%}", "{%generation%}", "{%- generation %}"):
        template = re.sub(r"\{% generation %\}", spelling, TAGGED)
        assert ChatRenderer(smollm2_tokenizer, template, {}, False).has_generation_tags(None), spelling
    assert not ChatRenderer(smollm2_tokenizer, CHATML, {}, False).has_generation_tags(None)
