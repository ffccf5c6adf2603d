from itertools import groupby


def encode(text):
    return "".join(f"{len(list(run))}{letter}" for letter, run in groupby(text))


def decode(code):
    if len(code) % 2:
        raise ValueError(code)
    return "".join(int(code[i]) * code[i + 1] for i in range(0, len(code), 2))


def ratio(text):
    return len(encode(text)) / len(text)
