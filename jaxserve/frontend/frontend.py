"""Text in, text out over one engine thread: the path that LLM, the server and batch jobs share.

Callers submit from any thread; the engine's thread alone touches the engine, and delivers each step's increments.
"""

import atexit
import itertools
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from jaxserve.config import Choice
from jaxserve.engine.compile_watch import CompileWatch
from jaxserve.engine.engine import Engine
from jaxserve.engine.executor import ProgramReport
from jaxserve.engine.progress import Progress
from jaxserve.engine.requests import EmbeddingEvent, EngineEvent
from jaxserve.errors import EngineDied, InvalidRequest, Overloaded, PromptTooLong, ShuttingDown
from jaxserve.frontend.choice_text import ChoiceText, logprob_entry
from jaxserve.frontend.commands import Abort, Add, Ask, Commands, refuse_questions
from jaxserve.frontend.experts import Experts
from jaxserve.frontend.facts import EngineStats, ServedModel
from jaxserve.frontend.generation import Generation, wake
from jaxserve.outputs import TextDelta
from jaxserve.pooling_params import Pooling
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler import Request
from jaxserve.tokens import Tokenizer, encode_chat

_POOLED = SamplingParams(temperature=0.0, max_tokens=1, seed=0, ignore_eos=True, detokenize=False)
SHRINKAGE = 4  # a tokenizer's normalization may make a text shorter, hardly by more


@dataclass(slots=True, eq=False)
class _OpenChoice:
    generation: Generation
    text: ChoiceText


class Frontend:
    """Owns the engine's thread. `close` joins it; a frontend is also a context manager."""

    def __init__(
        self,
        engine: Engine,
        model: ServedModel,
        *,
        max_open: int,
        choices: dict[str, Choice] | None = None,
        programs: list[ProgramReport] | None = None,
        startup_seconds: float = 0.0,
        is_warm: bool = False,
        compile_for: Callable[[int, int, Progress], None] | None = None,
    ) -> None:
        self.model_name = model.name
        self.max_model_len = model.max_model_len
        self.vocab_size = model.vocab_size
        self.tokenizer = model.tokenizer
        self.chat_template = model.chat_template
        self.sampling_defaults = model.sampling_defaults
        self.embedding_size = model.embedding_size
        self.experts = None if model.experts is None else Experts(self.ask, model.experts)
        self.programs = programs if programs is not None else []
        self.startup_seconds = startup_seconds
        self.failure: Exception | None = None
        self.engine = engine
        self._model = model
        self._choices = choices or {}
        self.max_open = max_open
        self._is_warm = is_warm
        self._compile_for = compile_for
        self._compiles = CompileWatch()
        self._commands: Commands = queue.SimpleQueue()
        self._open: dict[str, _OpenChoice] = {}
        self._serials = itertools.count()
        self._lock = threading.Condition()
        self._num_open = 0
        self._is_draining = self._is_closing = self._is_over = False
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        # A daemon, so that a program that forgets `close` ends; joined at exit, as no step may outlive the runtime.
        self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # What callers do, on any thread.

    @property
    def is_ready(self) -> bool:
        """Whether a request would be accepted."""
        return self.failure is None and not self._is_draining and not self._is_closing

    def encode_prompt(self, text: str) -> list[int]:
        """Token ids of a prompt, with the model's BOS. Raises InvalidRequest where the model has no tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: send token ids instead of text", param="prompt")
        self._check_length(self.tokenizer, len(text), "prompt")
        return self.tokenizer.encode(text)

    def encode_chat(self, messages: list[dict[str, Any]], **template_kwargs: Any) -> list[int]:
        """Token ids of a conversation; message text can never become a control token."""
        if self.tokenizer is None or self.chat_template is None:
            missing = "tokenizer" if self.tokenizer is None else "chat template"
            raise InvalidRequest(f"this model has no {missing}; use completions, or --chat-template", param="messages")
        if template_kwargs.get("tools") and not self.chat_template.uses_tools:
            raise InvalidRequest("this model's chat template has no place for tools; leave them out", param="tools")
        contents = (message.get("content") for message in messages if isinstance(message, dict))
        self._check_length(self.tokenizer, sum(len(c) for c in contents if isinstance(c, str)), "messages")
        return encode_chat(self.tokenizer, self.chat_template, messages, **template_kwargs)

    def _check_length(self, tokenizer: Tokenizer, num_characters: int, param: str) -> None:
        """Refuses a text that is too long whatever its tokens are: to tokenize megabytes would stall every stream."""
        most = SHRINKAGE * self.max_model_len * tokenizer.max_token_bytes
        if num_characters > most:
            raise PromptTooLong(
                f"{param} has {num_characters:,} characters; {self.max_model_len:,} tokens of this model hold fewer "
                "(--max-model-len)",
                param=param,
            )

    def prepare(self, num_prompt_tokens: int, num_choices: int, progress: Progress) -> None:
        """Compiles now what a request of this size will need when it runs alone; without it, its first step waits."""
        if self._compile_for is not None and num_prompt_tokens < self.max_model_len:
            self._compile_for(num_prompt_tokens, num_choices, progress)

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """Queues a request of params.n choices.

        Raises InvalidRequest or PromptTooLong for what can never run, Overloaded when the queue is full, ShuttingDown
        and EngineDied when nothing is accepted any more.
        """
        return self._submit(prompt_token_ids, params, None, request_id, priority, cache_salt)

    def submit_embedding(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Generation:
        """Queues a request whose one delta brings no text: with it the generation's `pooled` is there. Raises as
        `submit` does."""
        return self._submit(prompt_token_ids, _POOLED, pooling, request_id, priority, cache_salt)

    def _submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        pooling: Pooling | None,
        request_id: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> Generation:
        self._check_ids(prompt_token_ids, params)
        generation = Generation(
            request_id or f"req-{next(self._serials)}", list(prompt_token_ids), params.n, self._request_abort
        )
        requests = [
            self.engine.request(
                f"{generation.request_id}/{index}",
                generation.prompt_token_ids,
                params,
                max_tokens=params.max_tokens or max(1, self.max_model_len - len(prompt_token_ids)),
                eos_token_ids=self._model.eos_token_ids,
                index=index,
                priority=priority,
                cache_domain=(self._model.version, "", cache_salt or ""),
                pooling=pooling,
            )
            for index in range(params.n)
        ]
        self._queue(Add(generation, requests, params))
        return generation

    def _check_ids(self, prompt_token_ids: list[int], params: SamplingParams) -> None:
        vocab = self._model.vocab_size
        for name, ids in (
            ("prompt", prompt_token_ids),
            ("logit_bias", params.logit_bias or ()),
            ("stop_token_ids", params.stop_token_ids or ()),
        ):
            if not all(isinstance(i, int) for i in ids):
                wrong = next(i for i in ids if not isinstance(i, int))
                raise InvalidRequest(f"{name}: token ids are integers, got {wrong!r}", param=name)
            if ids and not 0 <= min(ids) <= max(ids) < vocab:
                wrong = next(i for i in ids if not 0 <= i < vocab)
                raise InvalidRequest(f"{name}: token id {wrong} is not below the vocabulary's {vocab:,}", param=name)
        if params.stop_strings and self.tokenizer is None:
            raise InvalidRequest("stop strings need a tokenizer, which this model has not", param="stop")

    def _queue(self, command: Add) -> None:
        num_choices = len(command.requests)
        with self._lock:
            if self.failure is not None:
                raise EngineDied(f"the engine stopped: {self.failure}")
            if self._is_draining or self._is_closing:
                raise ShuttingDown("the engine is shutting down or closed and accepts no new request")
            if num_choices > self.max_open:
                raise InvalidRequest(
                    f"n={num_choices} exceeds the {self.max_open} sequences this engine takes", param="n"
                )
            if self._num_open + num_choices > self.max_open:
                raise Overloaded(
                    f"{self._num_open} sequences are open and {num_choices} more asked for; at most {self.max_open} "
                    "run or wait at once (--max-num-seqs and --max-waiting)"
                )
            self._num_open += num_choices
            self._commands.put(command)  # under the lock: after a close or a failure nobody would read it

    def _request_abort(self, generation: Generation) -> None:
        self._commands.put(Abort(generation))

    def ask[T](self, function: Callable[[], T]) -> T:
        """What a function gives that must run between two steps of the engine. Raises ShuttingDown, EngineDied."""
        question = Ask(function, Future())
        with self._lock:
            if self._is_over:
                raise ShuttingDown("the engine was closed")
            self._commands.put(question)
        return question.answer.result()

    def stats(self) -> EngineStats:
        """Counters for metrics."""
        scheduled = self.engine.scheduler.stats()
        return EngineStats(
            num_running=scheduled.num_running,
            num_waiting=scheduled.num_waiting,
            total_pages=scheduled.num_total_pages,
            running_pages=scheduled.num_running_pages,
            cached_pages=scheduled.num_cached_pages,
            free_pages=scheduled.num_free_pages,
            prompt_tokens_total=self.engine.num_prompt_tokens,
            generation_tokens_total=self.engine.num_generated_tokens,
            prefix_queried_tokens_total=scheduled.prefix_queried_tokens,
            prefix_hit_tokens_total=scheduled.prefix_hit_tokens,
            preemptions_total=scheduled.num_preemptions,
            left_pages_total=scheduled.num_left_pages,
            steps_total=self.engine.num_steps,
            requests_finished_total=dict(self._finished),
            compiles_after_ready_total=self._compiles.requests if self._is_warm else 0,
        )

    def effective_config(self) -> dict[str, dict[str, Any]]:
        """Every choice that was made, with its reason."""
        return {name: {"value": choice.value, "reason": choice.reason} for name, choice in self._choices.items()}

    def drain(self, timeout_seconds: float | None) -> bool:
        """Refuses new requests and waits for the open ones; False when the time ran out first."""
        with self._lock:
            self._is_draining = True
            return self._lock.wait_for(lambda: self._num_open == 0, timeout_seconds)

    def close(self) -> None:
        """Aborts what still runs, joins the engine's thread and gives the device memory back."""
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._commands.put(None)
        if threading.current_thread() is not self._thread:  # it may be, when the garbage collector runs there
            self._thread.join()
        atexit.unregister(self.close)

    def __enter__(self) -> "Frontend":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What the engine's thread does.

    def _run(self) -> None:
        self._compiles.watch_this_thread()
        try:
            while self._take_commands():
                self._tell(self.engine.step())
            for generation in {choice.generation for choice in self._open.values()}:
                self._abort(generation)
        except Exception as error:
            self._fail(error)
        finally:
            self._compiles.stop()
            with self._lock:
                self._is_over = True
                refuse_questions(self._commands, ShuttingDown("the engine was closed"))
            self.engine.close()

    def _take_commands(self) -> bool:
        """Applies what was asked since the last step, waiting for it when idle. False: close."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            if isinstance(command, Ask):
                command.run()
            elif isinstance(command, Abort):
                self._abort(command.generation)
            else:
                self._add(command)

    def _add(self, command: Add) -> None:
        generation = command.generation
        for index, request in enumerate(command.requests):
            try:
                self.engine.add(request)
            except InvalidRequest as error:  # the id is taken: only the engine's thread can know
                self._forget(command.requests[:index])
                generation.deliver(error)
                self._count_finished("error", len(command.requests))
                wake([generation])
                return
            text = ChoiceText(index, command.params, self.tokenizer, generation.prompt_token_ids)
            self._open[request.request_id] = _OpenChoice(generation, text)

    def _forget(self, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request.request_id)
            del self._open[request.request_id]

    def _abort(self, generation: Generation) -> None:
        for index in range(generation.num_choices):
            request_id = f"{generation.request_id}/{index}"
            choice = self._open.get(request_id)
            if choice is not None and choice.generation is generation:
                self.engine.abort(request_id)
                delta = TextDelta(index=index, text="", token_ids=(), finish_reason="abort")
                self._deliver(request_id, choice, delta)
        wake([generation])

    def _tell(self, events: list[EngineEvent]) -> None:
        told = []
        for event in events:
            choice = self._open.get(event.request_id)
            if choice is None:
                continue
            delta = choice.text.delta(event)
            if delta.finish_reason is not None:
                if event.finish_reason is None:  # a stop string, seen in the text only
                    self.engine.abort(event.request_id)
                elif isinstance(event, EmbeddingEvent):
                    choice.generation.pooled = event.pooled
            if event.num_cached_tokens:
                choice.generation.num_cached_tokens = event.num_cached_tokens
            if event.prompt_logprobs is not None:
                choice.generation.prompt_logprobs = [
                    None if top is None else logprob_entry(top, self.tokenizer) for top in event.prompt_logprobs
                ]
            self._deliver(event.request_id, choice, delta)
            told.append(choice.generation)
        wake(told)

    def _deliver(self, request_id: str, choice: _OpenChoice, delta: TextDelta) -> None:
        choice.generation.deliver(delta)
        if delta.finish_reason is not None:
            del self._open[request_id]
            self._count_finished(delta.finish_reason, 1)

    def _count_finished(self, reason: str, num_choices: int) -> None:
        with self._lock:
            self._finished[reason] += num_choices
            self._num_open -= num_choices
            self._lock.notify_all()

    def _fail(self, error: Exception) -> None:
        """The engine cannot go on: everybody who waits is told, and nobody is accepted any more."""
        with self._lock:
            self.failure = error
            self._num_open = 0
            self._lock.notify_all()
        died = EngineDied(f"the engine stopped: {type(error).__name__}: {error}")
        died.__cause__ = error
        waiting = {choice.generation for choice in self._open.values()}
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                break
            if isinstance(command, Ask):
                command.answer.set_exception(died)
            if isinstance(command, Add):
                waiting.add(command.generation)
        self._open.clear()
        for generation in waiting:
            generation.deliver(died)
        wake(list(waiting))
