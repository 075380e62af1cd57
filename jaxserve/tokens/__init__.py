"""Text to token ids and back: tokenizers of GGUF files and HF folders, chat templates, streaming text, stop strings.

`load_tokenizer_from_gguf` and `load_tokenizer_from_folder` give a `Tokenizer`; `encode_chat` turns messages into ids in
which user text can never become a control token; `Detokenizer` and `StopStrings` turn generated ids into text as it
arrives. Nothing here knows the model, the engine or HTTP.
"""

from jaxserve.tokens.chat_ids import encode_chat
from jaxserve.tokens.chat_template import ChatTemplate
from jaxserve.tokens.detokenizer import Detokenizer
from jaxserve.tokens.load import holds_tokenizer, load_tokenizer_from_folder, load_tokenizer_from_gguf
from jaxserve.tokens.stop import StopStrings
from jaxserve.tokens.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "Detokenizer",
    "StopStrings",
    "Tokenizer",
    "encode_chat",
    "holds_tokenizer",
    "load_tokenizer_from_folder",
    "load_tokenizer_from_gguf",
]
