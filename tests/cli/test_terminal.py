"""What reaches a terminal cannot steer it; what reaches a pipe is untouched. Bars stay out of the way."""

import io

from rich.console import Console

from jaxserve.cli.bars import Bars
from jaxserve.cli.terminal import visible, visible_line, write_text
from jaxserve.engine.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_controls_become_visible():
    assert visible("a\x1b[1m\r\x07\x9b\u202eé\U0001f600\n\t") == "a\\x1b[1m\\x0d\\x07\\x9b\\u202eé\U0001f600\n\t"
    assert visible_line("a\nb\tc  d") == "a b c  d"


def test_a_pipe_gets_the_text_as_it_is(monkeypatch):
    pipe, terminal = io.StringIO(), Terminal()
    for file in (pipe, terminal):
        monkeypatch.setattr("sys.stdout", file)
        write_text("a\x1b[1m")
    assert (pipe.getvalue(), terminal.getvalue()) == ("a\x1b[1m", "a\\x1b[1m")


def test_one_line_per_task_where_there_is_no_terminal(capsys):
    bars = Bars(Console(file=io.StringIO()))
    assert isinstance(bars, Progress)
    with bars.task("loading weights", 3) as advance, bars.waiting("x"):
        advance(3)
    bars.note("a\nb")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[0].startswith("loading weights: 3 in ")
    assert err.splitlines()[1] == "a b"


def test_a_bar_on_a_terminal(capsys):
    screen = io.StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=100))
    with bars.task("compiling [red]", 4) as advance:
        advance(3)
    with bars.waiting("first token"):
        pass
    assert "3/4" in screen.getvalue()
    assert "compiling [red]" in screen.getvalue()
    assert "first token" in screen.getvalue()
    assert capsys.readouterr() == ("", "")
