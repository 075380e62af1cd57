"""Chat templates: transformers' conventions, one-line errors, and limits on what a template can consume."""

import pytest

from jaxserve.errors import ChatTemplateError
from jaxserve.tokens import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


def render(source, messages=None, **kwargs):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages or USER, **kwargs)


def test_blocks_are_trimmed_and_loops_can_break():
    source = (
        "{% for m in messages %}\n  {% if loop.index == 2 %}{% break %}{% endif %}\n{{ m.content }}\n{% endfor %}\n"
    )
    assert render(source, USER * 3) == "hi\n"


def test_json_is_not_html():
    assert render("{{ x | tojson }}", x={"a": "<b> & 'ö'"}) == '{"a": "<b> & \'ö\'"}'


def test_generation_tag_prints_its_body():
    assert render("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}") == "hi!"


def test_tokens_tools_and_flags_reach_the_template():
    source = "{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ add_generation_prompt }}{{ extra }}"
    assert render(source, extra=7) == "<s></s>TrueTrue7"
    assert render("{{ bos_token }}", bos_token="evil") == "<s>"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.content }}]\n{% endfor %}", "[Roses are "),
        ("{% for m in messages %}[{{ m.content | trim }}]\n{% endfor %}", "[Roses are"),
    ],
)
def test_final_message_stays_open(source, expected):
    messages = [{"role": "assistant", "content": "Roses are "}]
    assert render(source, messages, continue_final_message=True) == expected


def test_final_message_is_found_by_place_not_by_text():
    messages = [{"role": "assistant", "content": "end"}]
    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert render(source, messages, continue_final_message=True) == "end"


def test_dropped_final_message_is_an_error():
    with pytest.raises(ChatTemplateError, match="drops the last message"):
        render("nothing", continue_final_message=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must\n alternate') }}",
        "{{ messages[0].nothing.more }}",
        "{{ 'a' + messages }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 'x' * 10**9 }}",
        "{{ 9**99999 }}",
        "{% for i in range(5000) %}{% for j in range(5000) %}{% endfor %}{% endfor %}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_whatever_goes_wrong_is_one_line(source):
    with pytest.raises(ChatTemplateError) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_broken_source_and_empty_conversation_are_errors():
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        render("{% for %}")
    with pytest.raises(ChatTemplateError, match="empty"):
        ChatTemplate("x", bos_token="", eos_token="").render([])


def test_output_is_bounded(monkeypatch):
    monkeypatch.setattr("jaxserve.tokens.chat_template.MAX_RENDERED_CHARS", 1000)
    with pytest.raises(ChatTemplateError, match="exceeds"):
        render("{% for i in range(2000) %}x{% endfor %}")
