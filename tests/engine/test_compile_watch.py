"""Compilations are seen, and those of another thread are not ours."""

import threading

import jax
import jax.numpy as jnp

from jaxserve.engine.compile_watch import CompileWatch


def compile_something():
    jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((3,), jnp.float32)).compile()


def test_a_compilation_is_counted_between_start_and_stop():
    with CompileWatch() as watch:
        assert watch.requests == 0
        compile_something()
    assert watch.requests == 1
    assert watch.compiled + watch.hits == 1
    compile_something()
    assert watch.requests == 1


def test_a_call_that_is_compiled_already_is_not_counted():
    function = jax.jit(lambda x: x * 5 + 1)
    x = jnp.ones(3)
    function(x)
    with CompileWatch() as watch:
        function(x)
    assert watch.requests == 0


def test_a_thread_sees_its_own_only():
    with CompileWatch(threading.get_ident()) as ours, CompileWatch() as all_of_them:
        other = threading.Thread(target=compile_something)
        other.start()
        other.join()
    assert (ours.requests, all_of_them.requests) == (0, 1)


def test_watching_from_inside_a_thread():
    watch = CompileWatch()

    def work() -> None:
        watch.watch_this_thread()
        compile_something()
        watch.stop()

    thread = threading.Thread(target=work)
    thread.start()
    compile_something()
    thread.join()
    assert watch.requests == 1
