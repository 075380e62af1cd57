"""`LLM`: a model in this process, without a server. Names and results are vLLM's."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import Progress as RichProgress

from checkpoints import errors as checkpoint_errors
from checkpoints import hub
from checkpoints.load import is_gguf, open_weights
from checkpoints.native import origin_file
from jaxserve.config import EngineConfig
from jaxserve.engine.build import build_engine
from jaxserve.engine.executor import DeviceExecutor
from jaxserve.engine.experts import ExpertReport, Rebalanced
from jaxserve.engine.hosts import Follower
from jaxserve.engine.loading import model_config
from jaxserve.engine.progress import Notes, Progress, Silent
from jaxserve.errors import ConfigError, DownloadError, InvalidRequest, JaxserveError, ModelNotFound, ShuttingDown
from jaxserve.frontend import EngineStats, Frontend, Generation, ServedModel, generation_defaults
from jaxserve.frontend.experts import ExpertFunctions, Experts
from jaxserve.outputs import CompletionOutput, EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, TextDelta
from jaxserve.pooling_params import Pooling, PoolingParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokens import (
    ChatTemplate,
    Tokenizer,
    holds_tokenizer,
    load_tokenizer_from_folder,
    load_tokenizer_from_gguf,
)

Prompt = str | list[int] | dict[str, Any]
UNLIMITED = 1 << 40  # offline callers wait for their own requests; nothing is refused


def find_model(name: str, cache_dir: Path | None) -> Path:
    """Where the model lies, fetched first if need be. Raises ModelNotFound or DownloadError."""
    try:
        return hub.resolve(name, cache_dir=cache_dir or hub.default_cache_dir({}))
    except checkpoint_errors.UnknownModel as error:
        raise ModelNotFound(str(error)) from error
    except checkpoint_errors.DownloadError as error:
        raise DownloadError(str(error)) from error


def start_frontend(
    config: EngineConfig,
    progress: Progress,
    *,
    warm_up: bool,
    max_open: int | None = None,
    needs_text: bool = False,
) -> Frontend:
    """A running frontend for the configured model.

    warm_up: compile every step shape before returning, after which a compilation counts as a defect; otherwise each
    shape compiles on first use. needs_text: ConfigError, before anything is loaded, for a model without a tokenizer.
    """
    if config.host_id:
        raise ConfigError(f"--host-id {config.host_id}: host 0 takes requests; `jaxserve serve` runs the others")
    path = find_model(config.model, config.cache_dir)
    defaults = generation_defaults(config.generation_config, path)
    says = Silent() if needs_text else progress
    tokenizer = read_tokenizer(path, says, reads_generation_config=defaults.is_models)
    if needs_text and tokenizer is None:
        model_config(path)  # what is no model at all is told first
        raise ConfigError(
            f"{config.model} has no tokenizer, which text needs; generate --prompt-token-ids and the server take ids"
        )
    template = _chat_template(config, tokenizer)
    eos_token_ids = defaults.joined_eos_ids(frozenset() if tokenizer is None else tokenizer.eos_token_ids)
    built = build_engine(config, path, eos_token_ids, progress, warm_up=warm_up)
    served = ServedModel(
        name=config.model,
        version=str(path),
        max_model_len=built.max_model_len,
        vocab_size=built.loaded.config.vocab_size,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        chat_template=template,
        sampling_defaults=defaults.sampling,
        embedding_size=built.loaded.config.hidden_size,
        experts=_expert_functions(built.executor),
    )
    return Frontend(
        built.engine,
        served,
        max_open=max_open if max_open is not None else built.max_num_seqs + config.max_waiting,
        choices=built.choices | defaults.choices(eos_token_ids),
        programs=built.executor.programs,
        startup_seconds=built.seconds,
        is_warm=warm_up,
        compile_for=built.executor.compile_for,
    )


def follow(config: EngineConfig, progress: Progress, ready: Callable[[], None]) -> None:
    """Runs what host 0 runs, on any other host, until that closes; `ready` is called before the first step."""
    built = build_engine(config, find_model(config.model, config.cache_dir), frozenset(), progress, warm_up=True)
    assert isinstance(built.hosts, Follower)
    ready()
    built.executor.follow(built.hosts.commands())
    built.executor.close()


def _expert_functions(executor: DeviceExecutor) -> ExpertFunctions | None:
    if executor.placement is None:
        return None
    return ExpertFunctions(report=executor.expert_report, rebalance=executor.rebalance_experts)


def read_tokenizer(path: Path, progress: Progress, *, reads_generation_config: bool = True) -> Tokenizer | None:
    """The model's tokenizer, or None where it has none, which is said: token ids still work."""
    path = origin_file(path)  # of a native checkpoint that was a GGUF file
    if is_gguf(path):
        with open_weights(path) as source:
            metadata = source.metadata
        if "tokenizer.ggml.model" not in metadata:
            progress.note(f"{path.name} holds no tokenizer: send token ids, text needs one")
            return None
        return load_tokenizer_from_gguf(metadata)
    folder = path if path.is_dir() else path.parent
    if not holds_tokenizer(folder):
        progress.note(f"{folder.name} holds no tokenizer: send token ids, text needs one")
        return None
    return load_tokenizer_from_folder(folder, reads_generation_config=reads_generation_config)


def _chat_template(config: EngineConfig, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    source = config.chat_template or (None if tokenizer is None else tokenizer.chat_template)
    if source is None:
        return None
    if tokenizer is None:
        raise ConfigError("--chat-template needs a tokenizer, and this model has none")
    return ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)


class LLM:
    """A model to generate with.

        with LLM("smollm2-135m-instruct") as llm:
            print(llm.generate("The capital of France is", SamplingParams(max_tokens=8))[0].outputs[0].text)

    Options are EngineConfig's fields (vLLM's names). Raises ConfigError for an unknown one. Models and compiled
    programs are kept where the command line keeps them ($JAXSERVE_HOME), unless cache_dir or compilation_cache_dir say
    otherwise. `close` gives the memory back; several LLMs can live side by side.
    """

    def __init__(self, model: str, *, progress: Progress | None = None, **options: Any) -> None:
        unknown = sorted(set(options) - EngineConfig.names())
        if unknown:
            known = ", ".join(sorted(EngineConfig.names() - {"model"}))
            raise ConfigError(f"LLM() has no option {', '.join(unknown)}; it has {known}")
        home = options.get("cache_dir") or hub.default_cache_dir(os.environ)
        compiled = options.get("compilation_cache_dir") or jax.config.jax_compilation_cache_dir or home / "xla"
        folders = {"cache_dir": home, "compilation_cache_dir": Path(compiled)}
        threads = {"threads": options.get("threads", _nproc(os.environ))}
        config = EngineConfig(model=model, **(options | folders | threads))
        shows = progress or (Notes() if sys.stderr.isatty() or "ipykernel" in sys.modules else Silent())
        self.frontend = start_frontend(config, shows, warm_up=False, max_open=UNLIMITED)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """One result per prompt, in order. A prompt is text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...}
        with an optional "cache_salt". sampling_params None: `get_default_sampling_params()`. use_tqdm: show a bar of
        finished requests on stderr."""
        return self._run(self._read_prompts(prompts), sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        use_tqdm: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers to one conversation, or to each of several."""
        is_one = bool(messages) and isinstance(messages[0], dict)
        conversations = [messages] if is_one or not messages else messages
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt, **(chat_template_kwargs or {})}
        if continue_final_message:
            options |= {"continue_final_message": True, "add_generation_prompt": False}
        if tools is not None:
            options["tools"] = tools
        read = [_Read(self.frontend.encode_chat(list(each), **options), None, None) for each in conversations]  # type: ignore[arg-type]
        return self._run(read, sampling_params, use_tqdm, None)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "mean",
        normalize: bool = True,
        dimensions: int | None = None,
        use_tqdm: bool = False,
    ) -> list[EmbeddingRequestOutput]:
        """One vector per prompt, in order, from the hidden states behind the model's last norm. Prompts are those of
        `generate`; the rest is explained at `PoolingParams`. They share steps with whatever else runs."""
        params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        params.check(self.frontend.embedding_size)
        generations: list[Generation] = []
        try:
            for prompt in self._read_prompts(prompts):
                salt = prompt.cache_salt
                generations.append(self.frontend.submit_embedding(prompt.token_ids, pooling, cache_salt=salt))
            with _bar(use_tqdm) as bar:
                return [_collect_embedding(each, params) for each in bar.track(generations, description="requests")]
        except BaseException:
            for generation in generations:
                generation.abort()
            raise

    def _run(
        self,
        prompts: list["_Read"],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        shows_bar: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if wrong := [p for p in each if not isinstance(p, SamplingParams)]:
            raise InvalidRequest(f"sampling_params must be SamplingParams or a list of them, got {wrong[0]!r}")
        if len(each) != len(prompts) or (priority is not None and len(priority) != len(prompts)):
            raise InvalidRequest(f"{len(prompts)} prompts came with {len(each)} sampling params or other priorities")
        generations: list[Generation] = []
        try:
            for i, prompt in enumerate(prompts):
                rank = 0 if priority is None else priority[i]
                generations.append(
                    self.frontend.submit(prompt.token_ids, each[i], priority=rank, cache_salt=prompt.cache_salt)
                )
            with _bar(shows_bar) as bar:
                pairs = bar.track(list(zip(generations, prompts, strict=True)), description="requests")
                results = [collect(generation, prompt.text) for generation, prompt in pairs]
            if any(output.finish_reason == "abort" for result in results for output in result.outputs):
                raise ShuttingDown("the LLM was closed while it generated; the answers are incomplete")
            return results
        except BaseException:
            for generation in generations:
                generation.abort()
            raise

    def _read_prompts(self, prompts: Prompt | Sequence[Prompt]) -> list["_Read"]:
        if not isinstance(prompts, str | dict | list | tuple):
            raise _not_a_prompt(prompts)
        many: list[Any] = [prompts] if _is_single(prompts) else list(prompts)
        return [self._read_prompt(prompt) for prompt in many]

    def _read_prompt(self, prompt: Prompt) -> "_Read":
        if isinstance(prompt, str):
            return _Read(self.frontend.encode_prompt(prompt), prompt, None)
        if isinstance(prompt, list):
            return _Read(prompt, None, None)
        if not isinstance(prompt, dict):
            raise _not_a_prompt(prompt)
        salt, text, ids = (prompt.get(key) for key in ("cache_salt", "prompt", "prompt_token_ids"))
        if isinstance(ids, list | tuple):
            return _Read(list(ids), None, salt)
        if ids is None and isinstance(text, str):
            return _Read(self.frontend.encode_prompt(text), text, salt)
        raise InvalidRequest(
            'a prompt dict needs "prompt", a text, or "prompt_token_ids", a list of token ids', param="prompt"
        )

    def get_tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer."""
        return self.frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, the fields' own defaults where it says nothing. For a
        change: `dataclasses.replace(llm.get_default_sampling_params(), max_tokens=100)`."""
        return SamplingParams(**self.frontend.sampling_defaults)  # type: ignore[arg-type]

    def get_metrics(self) -> EngineStats:
        """Counters since the start."""
        return self.frontend.stats()

    def expert_load(self) -> ExpertReport:
        """Tokens of a mixture's experts by layer since the start, and how evenly devices share them."""
        return self._experts().load()

    def rebalance_experts(self) -> Rebalanced:
        """Moves experts between the devices of a plan so that the load since the start would have been even. No answer
        changes, those in flight included."""
        return self._experts().rebalance()

    def _experts(self) -> Experts:
        if self.frontend.experts is None:
            raise InvalidRequest("this model has no experts")
        return self.frontend.experts

    def effective_config(self) -> dict[str, dict[str, Any]]:
        """Every choice that was made, with its reason."""
        return self.frontend.effective_config()

    def close(self) -> None:
        """Ends the engine's thread and frees the device memory; more than once is fine."""
        self.frontend.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not sys.is_finalizing() and (frontend := getattr(self, "frontend", None)):
            frontend.close()


def _nproc(environ: Mapping[str, str]) -> int | None:
    """Threads that XLA's own variable asks for, read as XLA does: what is no number is not there."""
    text = environ.get("NPROC", "")
    return max(1, int(text)) if text.isdecimal() else None


class _Read:
    """A prompt as token ids, with the text it came from."""

    __slots__ = ("cache_salt", "text", "token_ids")

    def __init__(self, token_ids: list[int], text: str | None, cache_salt: str | None) -> None:
        self.token_ids, self.text, self.cache_salt = token_ids, text, cache_salt


def _not_a_prompt(prompt: object) -> InvalidRequest:
    return InvalidRequest(
        f'a prompt is text, a list of token ids, or a dict with "prompt" or "prompt_token_ids"; got {prompt!r:.80}',
        param="prompt",
    )


def _bar(shows: bool) -> RichProgress:
    return RichProgress(console=Console(stderr=True), disable=not shows)


def _is_single(prompts: object) -> bool:
    if isinstance(prompts, str | dict):
        return True
    return isinstance(prompts, list) and bool(prompts) and all(isinstance(p, int) for p in prompts)


def collect(generation: Generation, prompt: str | None) -> RequestOutput:
    """Waits for every choice of a generation."""
    outputs = [CompletionOutput(index=i, text="", token_ids=[]) for i in range(generation.num_choices)]
    for delta in generation:
        _add_delta(outputs[delta.index], delta)
    return RequestOutput(
        request_id=generation.request_id,
        prompt=prompt,
        prompt_token_ids=generation.prompt_token_ids,
        prompt_logprobs=generation.prompt_logprobs,
        outputs=outputs,
        num_cached_tokens=generation.num_cached_tokens,
    )


def _collect_embedding(generation: Generation, params: PoolingParams) -> EmbeddingRequestOutput:
    """Waits for an embedding request. Raises ShuttingDown, or JaxserveError where the model computed NaN."""
    [reason] = [delta.finish_reason for delta in generation]
    if reason == "abort":
        raise ShuttingDown("the LLM was closed while it embedded; vectors are missing")
    if generation.pooled is None:
        raise JaxserveError("a prompt has no embedding: the model computed no finite values for it")
    return EmbeddingRequestOutput(
        request_id=generation.request_id,
        outputs=EmbeddingOutput(embedding=params.embedding(generation.pooled)),
        prompt_token_ids=generation.prompt_token_ids,
    )


def _add_delta(output: CompletionOutput, delta: TextDelta) -> None:
    output.text += delta.text
    output.token_ids.extend(delta.token_ids)
    if delta.logprobs is not None:
        output.logprobs = (output.logprobs or []) + list(delta.logprobs)
        chosen = (entry[token].logprob for entry, token in zip(delta.logprobs, delta.token_ids, strict=True))
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + sum(chosen)
    if delta.finish_reason is not None:
        output.finish_reason, output.stop_reason = delta.finish_reason, delta.stop_reason
