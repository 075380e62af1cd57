"""How text is cut before byte-level BPE, by the name a GGUF file gives in `tokenizer.ggml.pre`.

GGUF carries no pattern, only a name that its converter chose for the original tokenizer. The table holds the names
whose original tokenizer.json is known; any other name is refused, since a wrong cut gives wrong ids without any sign.
"""

from dataclasses import dataclass

import tokenizers
from tokenizers import normalizers, pre_tokenizers

from checkpoints.errors import UnsupportedCheckpoint

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PreTokenizer:
    """patterns cut one after the other, each the pieces of the one before. adds_bos: when the file does not say.

    ignore_merges: a piece that is a token as a whole is that token, whatever the merges would make of it.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    composes: bool = False  # Unicode NFC before cutting


_LLAMA3 = PreTokenizer(patterns=(_CL100K % "{1,3}",), ignore_merges=True, adds_bos=True)
_DIGITS_APART = PreTokenizer(patterns=(_DIGIT, _GPT2))
_PRE_TOKENIZERS = {
    # What converters write when the model uses no cut of its own; four passes, as llama.cpp defines it.
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer(patterns=(_GPT2,)),
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "command-r": _DIGITS_APART,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "qwen2": PreTokenizer(patterns=(_CL100K % "",), composes=True),
    "tekken": PreTokenizer(patterns=(_CASED % ("", "", ""),), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(patterns=(_CASED % (_CONTRACTION, _CONTRACTION, "{1,3}"),)),
    "glm4": PreTokenizer(patterns=(_CL100K % "{1,3}",)),
    "chatglm-bpe": PreTokenizer(patterns=(_CL100K % "{1,3}",)),
    "deepseek-v3": PreTokenizer(patterns=_DEEPSEEK3),
}


def pre_tokenizer_named(name: object) -> PreTokenizer:
    """The entry for `tokenizer.ggml.pre`. Raises UnsupportedCheckpoint for a missing or unknown name."""
    allowed = ", ".join(sorted(_PRE_TOKENIZERS))
    if name is None:
        raise UnsupportedCheckpoint(
            f"tokenizer.ggml.pre is missing, so the cut before BPE is unknown (supported: {allowed}); "
            "convert the model again with a current converter"
        )
    if not isinstance(name, str) or name not in _PRE_TOKENIZERS:
        raise UnsupportedCheckpoint(f"tokenizer.ggml.pre {name!r} is not supported (supported: {allowed})")
    return _PRE_TOKENIZERS[name]


def install(rules: PreTokenizer, tokenizer: tokenizers.Tokenizer) -> None:
    """Sets the normalizer and the cut of a fresh tokenizers object."""
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rules.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    if rules.composes:
        tokenizer.normalizer = normalizers.NFC()
