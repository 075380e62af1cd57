"""What a model file holds, without loading it: architecture, sizes, formats, tokenizer, chat template.

Describes any sound file, also one that this version cannot run. Printing is left to the caller.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from checkpoints.errors import CheckpointError
from checkpoints.generation_config import GenerationConfig, generation_config_beside, read_generation_config
from checkpoints.gguf import open_gguf
from checkpoints.json_files import read_json_object
from checkpoints.load import is_gguf
from checkpoints.native import is_native, open_native, origin_file
from checkpoints.safetensors import open_safetensors
from checkpoints.tensors import TensorInfo

MAX_CONFIG_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 64 << 20
TEMPLATE_LINES = 5


@dataclass(frozen=True, kw_only=True)
class TokenizerDescription:
    """`kind` as the file names it ("gpt2", "llama", "BPE", "Unigram", "sentencepiece"); `pre`: GGUF pre-tokenizer."""

    kind: str
    vocab_size: int | None
    pre: str | None


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """One model on disk. None stands for what the file does not say; a number that varies by layer is its maximum.
    sampling_defaults, eos_token_ids: what generation_config.json says."""

    path: Path
    container: Literal["gguf", "safetensors", "orbax"]
    architecture: str | None
    name: str | None
    num_parameters: int
    num_bytes: int
    context_length: int | None
    num_layers: int | None
    hidden_size: int | None
    ffn_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None
    vocab_size: int | None
    num_experts: int | None
    bytes_by_format: dict[str, int]
    tensors: tuple[TensorInfo, ...]
    tokenizer: TokenizerDescription | None
    has_chat_template: bool
    chat_template_head: tuple[str, ...]
    sampling_defaults: dict[str, float | int]
    eos_token_ids: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """The description in types that JSON has."""
        return dataclasses.asdict(self) | {"path": str(self.path)}


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """The dimensions, under whichever names the container has for them."""

    context_length: int | None
    num_layers: int | None
    hidden_size: int | None
    ffn_size: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_size: int | None
    vocab_size: int | None
    num_experts: int | None


def describe(path: Path) -> ModelDescription:
    """What is in a .gguf file, a .safetensors file, a folder of safetensors or a native one. Raises CheckpointError."""
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist")
    if is_native(path):
        return _describe_native(path)
    return _describe_gguf(path) if is_gguf(path) else _describe_safetensors(path)


def _describe_native(path: Path) -> ModelDescription:
    """What the files say that it was made from, but for the tensors, which are the parameters."""
    parameters = open_native(path).parameters
    origin = origin_file(path)
    of_origin = _describe_gguf(origin) if origin.is_file() else _folder_description(path, path, {}, 0)
    tensors = {
        name: TensorInfo(name=name, shape=p.shape, format=p.format, offset=0, num_bytes=p.num_bytes)
        for name, p in parameters.items()
    }
    embedding = tensors.get("embed")
    return dataclasses.replace(
        of_origin,
        path=path,
        container="orbax",
        num_parameters=sum(info.num_elements for info in tensors.values()),
        num_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
        vocab_size=of_origin.vocab_size or (embedding.shape[0] if embedding else None),
        bytes_by_format=_bytes_by_format(tensors),
        tensors=tuple(tensors.values()),
    )


def _describe_gguf(path: Path) -> ModelDescription:
    with open_gguf(path) as file:
        metadata, tensors = file.metadata, file.tensors
    architecture = _text(metadata.get("general.architecture"))
    tokenizer = _gguf_tokenizer(metadata)
    return _description(
        path=path,
        container="gguf",
        architecture=architecture,
        name=_text(metadata.get("general.name")),
        sizes=_gguf_sizes(metadata, architecture, tokenizer, tensors),
        tensors=tensors,
        tokenizer=tokenizer,
        template=_text(metadata.get("tokenizer.chat_template")),
        num_bytes=path.stat().st_size,
    )


def _gguf_sizes(
    metadata: Mapping[str, Any],
    architecture: str | None,
    tokenizer: TokenizerDescription | None,
    tensors: Mapping[str, TensorInfo],
) -> _Sizes:
    def number(key: str) -> int | None:
        return _number(metadata.get(f"{architecture}.{key}"))

    embedding = tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else None
    hidden_size, num_heads = number("embedding_length"), number("attention.head_count")
    return _Sizes(
        context_length=number("context_length"),
        num_layers=number("block_count"),
        hidden_size=hidden_size,
        ffn_size=number("feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=number("attention.head_count_kv") or num_heads,
        head_size=number("attention.key_length") or _head_size(hidden_size, num_heads),
        vocab_size=number("vocab_size") or (tokenizer.vocab_size if tokenizer else None) or rows,
        num_experts=number("expert_count"),
    )


def _gguf_tokenizer(metadata: Mapping[str, Any]) -> TokenizerDescription | None:
    kind = _text(metadata.get("tokenizer.ggml.model"))
    if kind is None:
        return None
    tokens = metadata.get("tokenizer.ggml.tokens")
    return TokenizerDescription(
        kind=kind,
        vocab_size=len(tokens) if isinstance(tokens, list) else None,
        pre=_text(metadata.get("tokenizer.ggml.pre")),
    )


def _describe_safetensors(path: Path) -> ModelDescription:
    folder = path if path.is_dir() else path.parent
    with open_safetensors(path) as files:
        tensors, num_bytes = files.tensors, sum(file.stat().st_size for file in files.paths)
    return _folder_description(path, folder, tensors, num_bytes)


def _folder_description(
    path: Path, folder: Path, tensors: Mapping[str, TensorInfo], num_bytes: int
) -> ModelDescription:
    config = _optional_json(folder / "config.json", MAX_CONFIG_BYTES)
    generation_file = generation_config_beside(path)
    generation = read_generation_config(generation_file) if generation_file else None
    architectures = config.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    return _description(
        path=path,
        container="safetensors",
        architecture=_text(named),
        name=_text(config.get("_name_or_path")),
        sizes=_config_sizes(config),
        tensors=tensors,
        tokenizer=_folder_tokenizer(folder),
        template=_folder_template(folder),
        num_bytes=num_bytes,
        generation=generation,
    )


def _config_sizes(config: Mapping[str, Any]) -> _Sizes:
    def number(*keys: str) -> int | None:
        return next((value for key in keys if (value := _number(config.get(key))) is not None), None)

    hidden_size, num_heads = number("hidden_size"), number("num_attention_heads")
    return _Sizes(
        context_length=number("max_position_embeddings"),
        num_layers=number("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_size=number("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=number("num_key_value_heads") or num_heads,
        head_size=number("head_dim") or _head_size(hidden_size, num_heads),
        vocab_size=number("vocab_size"),
        num_experts=number("num_experts", "num_local_experts", "n_routed_experts"),
    )


def _folder_tokenizer(folder: Path) -> TokenizerDescription | None:
    content = _optional_json(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    model = content.get("model")
    if isinstance(model, dict):
        vocab, kind = model.get("vocab"), _text(model.get("type"))
        vocab_size = len(vocab) if isinstance(vocab, list | dict) else None
        return TokenizerDescription(kind=kind or "BPE", vocab_size=vocab_size, pre=None)
    if (folder / "tokenizer.model").is_file():
        return TokenizerDescription(kind="sentencepiece", vocab_size=None, pre=None)
    return None


def _folder_template(folder: Path) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file() and file.stat().st_size <= MAX_CONFIG_BYTES:
        return file.read_text(errors="replace")
    template = _optional_json(folder / "tokenizer_config.json", MAX_CONFIG_BYTES).get("chat_template")
    if isinstance(template, list):  # several templates with names; the default one counts
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return _text(template)


def _description(
    *,
    path: Path,
    container: Literal["gguf", "safetensors"],
    architecture: str | None,
    name: str | None,
    sizes: _Sizes,
    tensors: Mapping[str, TensorInfo],
    tokenizer: TokenizerDescription | None,
    template: str | None,
    num_bytes: int,
    generation: GenerationConfig | None = None,
) -> ModelDescription:
    return ModelDescription(
        path=path,
        container=container,
        architecture=architecture,
        name=name,
        num_parameters=sum(info.num_elements for info in tensors.values()),
        num_bytes=num_bytes,
        bytes_by_format=_bytes_by_format(tensors),
        tensors=tuple(tensors.values()),
        tokenizer=tokenizer,
        has_chat_template=bool(template),
        chat_template_head=tuple((template or "").splitlines()[:TEMPLATE_LINES]),
        sampling_defaults=dict(generation.sampling) if generation else {},
        eos_token_ids=tuple(sorted(generation.eos_token_ids)) if generation else (),
        **dataclasses.asdict(sizes),
    )


def _bytes_by_format(tensors: Mapping[str, TensorInfo]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in tensors.values():
        sizes[info.format] = sizes.get(info.format, 0) + info.num_bytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


def _optional_json(path: Path, max_bytes: int) -> dict[str, Any]:
    return read_json_object(path, max_bytes=max_bytes) if path.is_file() else {}


def _head_size(hidden_size: int | None, num_heads: int | None) -> int | None:
    return hidden_size // num_heads if hidden_size and num_heads else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    """An integer; of a list with one for each layer, the largest; None for anything else."""
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return max(value)
    return value if type(value) is int else None
