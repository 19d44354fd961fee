"""Text to token ids and back: tokenizers, chat templates, byte-exact streaming text, stop strings.

Knows nothing of models, requests or arrays; everything above floor 0 may import it.
"""

from jserve.tokenizer.chat_template import ChatTemplate, ChatTemplateError, ToolsRefused
from jserve.tokenizer.detokenizer import Detokenizer, decode_with_offsets
from jserve.tokenizer.folder import from_folder
from jserve.tokenizer.gguf_vocabulary import from_gguf
from jserve.tokenizer.stops import StopMatcher, TextPiece, TextStream
from jserve.tokenizer.token_table import TokenizerError
from jserve.tokenizer.tokenizer import PromptTooLong, Tokenizer

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "PromptTooLong",
    "StopMatcher",
    "TextPiece",
    "TextStream",
    "Tokenizer",
    "TokenizerError",
    "ToolsRefused",
    "decode_with_offsets",
    "from_folder",
    "from_gguf",
]
