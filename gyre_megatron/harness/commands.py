"""Command lines with placeholders: checked before a run starts, filled in word by word, no shell.

Only the names that are ours are replaced, written `{name}`. Every other brace stays as it is: JSON,
`${HOME}`, `curl -w %{http_code}`, `find -exec {}`. Invariant: what `check_words` lets pass,
`fill_words` fills without an error.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Collection, Mapping, Sequence

from gyre_megatron.errors import ConfigError

# `{{name}}` stands for a literal `{name}`. `${name}` is a shell's own. After % @ # \ a name that is
# not ours is another language's (curl's `%{http_code}`, git's `@{upstream}`) and no mistake.
_PLACEHOLDER = re.compile(
    r"\{\{(?P<escaped>[A-Za-z_]\w*)\}\}"
    r"|(?P<before>(?<!\$)[%@#\\]?)(?<!\$)\{(?P<name>[A-Za-z_]\w*)\}"
)


def split_command(command: str, key: str) -> list[str]:
    """A command line as words, the way a shell would cut it.

    Raises:
        ConfigError: it is empty, or a quote is not closed; `key` says where it stands.
    """
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"{key}: {command!r} cannot be cut into words: {error}") from None
    if not words:
        raise ConfigError(f"{key} is empty; expected a program and its words")
    return words


def check_words(words: Sequence[str], known: Collection[str], key: str) -> None:
    """Refuse placeholders that nobody fills.

    Args:
        words: Program and words.
        known: Names that will be filled in.
        key: Where the words stand, for the message.

    Raises:
        ConfigError: a placeholder has another name; the message gives the nearest.
    """
    for word in words:
        for match in _PLACEHOLDER.finditer(word):
            name = match["name"]
            if name is None or name in known or match["before"]:
                continue
            near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.0)[0]
            ours = ", ".join(f"{{{n}}}" for n in known)
            raise ConfigError(
                f"{key}: unknown placeholder {{{name}}}; did you mean {{{near}}}? There are {ours}; "
                f"{{{{{name}}}}} passes {{{name}}} on as it is"
            )


def fill_words(words: Sequence[str], values: Mapping[str, object]) -> list[str]:
    """The words with every known placeholder replaced.

    Args:
        words: Program and words.
        values: What stands for each name.
    """

    def replace(match: re.Match[str]) -> str:
        if match["escaped"] is not None:
            return f"{{{match['escaped']}}}"
        name = match["name"]
        return match["before"] + str(values[name]) if name in values else match[0]

    return [_PLACEHOLDER.sub(replace, word) for word in words]
