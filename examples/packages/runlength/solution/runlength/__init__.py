import re
from itertools import groupby

_RUN = re.compile(r"(\d+)(\\[\d\\]|[^\d\\])", re.DOTALL)


def encode(text):
    return "".join(
        f"{len(list(run))}" + ("\\" if letter.isdigit() or letter == "\\" else "") + letter
        for letter, run in groupby(text)
    )


def decode(code):
    text, place = "", 0
    while place < len(code):
        match = _RUN.match(code, place)
        if match is None:
            raise ValueError(f"nothing readable at {place}")
        text += int(match.group(1)) * match.group(2)[-1]
        place = match.end()
    if encode(text) != code:
        raise ValueError("not the shortest code")
    return text


def ratio(text):
    return len(encode(text)) / len(text) if text else 1.0
