"""Ctrl-C while a model is loaded or compiled ends the program, whatever swallows exceptions below."""

import subprocess
import sys

SCRIPT = """
import os, signal
from jaxserve.cli.startup import leaving_on_interrupt
def swallow():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        print("swallowed", flush=True)
with leaving_on_interrupt():
    swallow()
print("went on", flush=True)
"""


def test_an_interrupt_while_loading_cannot_be_swallowed():
    ran = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 130
    assert ran.stdout == ""
    assert ran.stderr.strip() == "jaxserve: interrupted"


def test_the_handler_is_given_back():
    script = SCRIPT.replace("    swallow()", "    pass") + "print(signal.getsignal(signal.SIGINT).__name__)"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ran.stdout.split() == ["went", "on", "default_int_handler"]
