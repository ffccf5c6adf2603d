"""Token ids to text and back, for byte-level BPE tokenizers.

Text is lossy (a model may sample bytes that are no UTF-8); ids are the truth. Decoding is
incremental and gives the same text as decoding all ids at once.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from gyre_megatron.errors import TemplateError


def _byte_of_character() -> dict[str, int]:
    """The table with which byte-level BPE writes bytes as printable characters (GPT-2)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


class TokenText:
    """A tokenizer file, for encoding rendered text and decoding sampled ids.

    Raises:
        TemplateError: the checkpoint has no tokenizer.json, or it is not byte-level BPE.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        file = Path(checkpoint) / "tokenizer.json"
        if not file.is_file():
            raise TemplateError(
                f"{file} does not exist; the proxy needs a fast tokenizer (tokenizer.json)"
            )
        self._tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if "ByteLevel" not in json.dumps(json.loads(file.read_text()).get("decoder")):
            raise TemplateError(
                f"{file} is not a byte-level BPE tokenizer; only those decode token by token"
            )
        self._bytes, self.special_ids = self._byte_table()

    def _byte_table(self) -> tuple[list[bytes], frozenset[int]]:
        table = _byte_of_character()
        added = self._tokenizer.get_added_tokens_decoder()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # A model may have more rows than its tokenizer has tokens; such an id stands for nothing.
        raw = [b""] * (max(vocabulary.values(), default=-1) + 1)
        for token, token_id in vocabulary.items():
            if token_id in added:  # added tokens are written as they are, not byte by byte
                raw[token_id] = token.encode()
            else:
                raw[token_id] = bytes(table[character] for character in token)
        return raw, frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32; no token is added that the text does not name."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def token_id(self, token: str) -> int | None:
        """The id of a token written exactly so."""
        return self._tokenizer.token_to_id(token)

    def raw(self, token_id: int) -> bytes:
        """The bytes a token stands for; none if the vocabulary has no such id."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """All ids as text; bytes that are no UTF-8 become U+FFFD."""
        decoder = TokenDecoder(self, skip_special)
        return decoder.feed(token_ids) + decoder.finish()


class TokenDecoder:
    """Decodes a stream of ids; a character split over tokens is held back until it is whole."""

    def __init__(self, tokens: TokenText, skip_special: bool = True) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that these ids complete."""
        raw = b"".join(self._tokens.raw(int(i)) for i in token_ids if int(i) not in self._skipped)
        return self._utf8.decode(raw)

    def finish(self) -> str:
        """What is left: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)
