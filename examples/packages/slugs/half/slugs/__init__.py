import re


def slugify(text, separator="-", max_length=None):
    return separator.join(re.findall(r"[a-z0-9]+", text.lower()))
