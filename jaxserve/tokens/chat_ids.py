"""`encode_chat`: messages to ids in which the caller's text can never become a control token.

Rendering first and tokenizing then, as usual, turns a user who writes `<|im_end|>` into one who ends the turn. Here
every string of the caller that holds such text, or that could complete one, carries a mark (a Unicode noncharacter)
in the middle of it. What the rendered prompt still holds of special tokens without a mark was written by the template.
Text with marks is encoded as plain text after the marks are taken out.
"""

from typing import Any

from jaxserve.tokens.chat_template import ChatTemplate, strings_in, unused_character
from jaxserve.tokens.tokenizer import Tokenizer


def encode_chat(
    tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]], **kwargs: Any
) -> list[int]:
    """Ids of the rendered messages, with exactly one BOS if the model wants one.

    Equals `tokenizer.encode(template.render(messages, **kwargs))` unless a string in messages, tools or other
    keywords holds special-token text; that text then stays text. Keywords are those of `ChatTemplate.render`.
    """
    guard = tokenizer.special_text
    if not any(guard.positions(text) for text in strings_in([messages, kwargs])):
        return tokenizer.encode(template.render(messages, **kwargs))
    mark = unused_character(messages, kwargs)
    marked_kwargs = {key: guard.marked(value, mark) for key, value in kwargs.items()}
    text = template.render(guard.marked(messages, mark), **marked_kwargs)
    return tokenizer.with_bos(_encode_marked(tokenizer, text, mark))


def _encode_marked(tokenizer: Tokenizer, text: str, mark: str) -> list[int]:
    """Ids of text: stretches between genuine special tokens are plain where they carry a mark, else as usual."""
    ids: list[int] = []
    usual = ""
    for stretch, special in tokenizer.special_text.split(text, mark):
        if mark in stretch:
            ids += tokenizer.encode(usual, add_special=False) if usual else []
            ids += tokenizer.encode_plain(stretch.replace(mark, ""))
            usual = special
        else:
            usual += stretch + special
    return ids + (tokenizer.encode(usual, add_special=False) if usual else [])
