"""A conversation over a pipe."""

ANSWER = {"role": "assistant", "content": "one two three four"}


def _user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_the_conversation_grows(run, starts):
    ran = run("chat", "some-model", stdin="a\n\nb\n")
    assert (ran.code, ran.out) == (0, "one two three four\n" * 2)
    assert starts.frontend.chats == [[_user("a")], [_user("a"), ANSWER, _user("b")]]
    assert starts.frontend.params[0].temperature == 0.0
    assert starts.frontend.num_closed == 1


def test_an_answer_takes_the_room_that_is_left(run, starts):
    run("chat", stdin="a\n")
    run("chat", "--max-tokens", "3", stdin="a\n")
    assert [params.max_tokens for params in starts.frontend.params] == [99, 3]


def test_reset_forgets_all_but_the_system_message(run, starts):
    run("chat", stdin="/system be brief\na\n/reset\nb\n/system\nc\n")
    system = {"role": "system", "content": "be brief"}
    assert starts.frontend.chats == [[system, _user("a")], [system, _user("b")], [_user("c")]]


def test_the_other_commands(run, starts):
    ran = run("chat", stdin="/stats\na\n/stats\n/help\n/what\n/exit\nnever\n")
    lines = ran.out.splitlines()
    assert lines[0] == "no answer yet"
    assert lines[3].startswith("prompt 1 tokens, ")
    assert lines[4] == "2 messages; KV pages: 0 running, 3 cached, 7 free of 10"
    assert any(line.startswith("/system TEXT") for line in lines)
    assert "there is no command /what; /help lists them" in ran.err
    assert starts.frontend.chats == [[_user("a")]]


def test_an_interrupt_stops_the_answer_and_not_the_program(run, starts):
    starts.frontend.interrupt_after = 2
    ran = run("chat", stdin="a\nb\n")
    assert ran.code == 0
    assert ran.out == "one two\none two three four\n"
    assert "(stopped)" in ran.err
    assert [generation.aborted.is_set() for generation in starts.frontend.generations] == [True, False]
    assert starts.frontend.chats[1] == [_user("a"), {"role": "assistant", "content": "one two"}, _user("b")]


def test_a_message_that_does_not_fit_is_taken_back(run, starts):
    ran = run("chat", stdin=f"{'x' * 100}\nb\n")
    assert "prompt has 100 tokens; at most 100 (/reset forgets the conversation)" in ran.err
    assert starts.frontend.chats[1] == [_user("b")]


def test_a_model_without_template_is_refused(run, starts):
    starts.frontend.chat_template = None
    ran = run("chat", stdin="a\n")
    assert ran.code == 2
    assert "give --chat-template" in ran.error_line()
    assert starts.frontend.num_closed == 1
