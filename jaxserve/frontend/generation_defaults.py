"""What a request is sampled with where it names nothing, and which ids end it: the model's generation_config.json.

As in vLLM, an explicit SamplingParams is complete and takes nothing from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkpoints.errors import CheckpointError
from checkpoints.generation_config import (
    FILE_NAME,
    MAX_EOS_TOKENS,
    generation_config_beside,
    read_generation_config,
)
from checkpoints.load import is_gguf
from jaxserve.config import Choice
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.sampling_params import SamplingParams

_OWN_NAMES = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, kw_only=True)
class GenerationDefaults:
    """sampling: value by field of SamplingParams. path: the file it comes from. is_models: it lies by the weights."""

    sampling: Mapping[str, float | int] = field(default_factory=dict)
    eos_token_ids: frozenset[int] = frozenset()
    path: Path | None = None
    is_models: bool = False
    reason: str = ""

    def choices(self, eos_token_ids: frozenset[int]) -> dict[str, Choice]:
        """Lines of the effective configuration; eos_token_ids: all that end a generation, the tokenizer's too."""
        from_file = f"where a request names none, from {FILE_NAME}"
        ends = "the tokenizer's" + (f" and those of {FILE_NAME}" if self.eos_token_ids else "")
        return {
            "generation_config": Choice("none" if self.path is None else str(self.path), self.reason),
            "sampling_defaults": Choice(
                dict(self.sampling), from_file if self.sampling else "jaxserve's own (vLLM's); nothing else was found"
            ),
            "eos_token_ids": Choice(sorted(eos_token_ids), ends),
        }

    def joined_eos_ids(self, of_tokenizer: frozenset[int]) -> frozenset[int]:
        """All ids that end a generation. Raises CheckpointError for more than a step has room for."""
        ids = of_tokenizer | self.eos_token_ids
        if len(ids) > MAX_EOS_TOKENS:
            raise CheckpointError(
                f"{self.path or 'tokenizer'}: {len(ids)} ids end a generation; at most {MAX_EOS_TOKENS}"
            )
        return ids


def generation_defaults(chosen: str, model: Path) -> GenerationDefaults:
    """The defaults that --generation-config asks for: "auto" (the model's), "none", a file, or a folder with one.

    Raises ConfigError where the named file does not exist; CheckpointError, naming file and field, for values that
    nobody could sample with.
    """
    if chosen == "none":
        return GenerationDefaults(reason="--generation-config")
    if chosen == "auto":
        found = None if is_gguf(model) else generation_config_beside(model)
        if found is None:
            return GenerationDefaults(reason=f"the model has no {FILE_NAME}")
        return _read(found, True, "beside the weights (--generation-config none leaves it out)")
    path = Path(chosen).expanduser()
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--generation-config {chosen!r}: no such file; give auto, none, a file, or a folder")
    return _read(file, False, "--generation-config")


def _read(file: Path, is_models: bool, reason: str) -> GenerationDefaults:
    config = read_generation_config(file)
    named = {_OWN_NAMES.get(name, name): value for name, value in config.sampling.items()}
    try:
        SamplingParams(**named)  # type: ignore[arg-type]
    except InvalidRequest as error:
        raise CheckpointError(f"{file}: {_in_the_files_words(error)} (--generation-config none ignores it)") from None
    return GenerationDefaults(
        sampling=named, eos_token_ids=config.eos_token_ids, path=file, is_models=is_models, reason=reason
    )


def _in_the_files_words(error: InvalidRequest) -> str:
    words = str(error)
    for theirs, ours in _OWN_NAMES.items():
        words = words.replace(ours, theirs)
    return words
