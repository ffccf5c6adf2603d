import re
from dataclasses import dataclass
from functools import total_ordering

_NUMBER = r"(0|[1-9]\d*)"
_TEXT = re.compile(rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-([0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*))?")


@total_ordering
@dataclass(frozen=True)
class Version:
    major: int
    minor: int
    patch: int
    pre: tuple = ()

    def _key(self):
        pre = [(0, part, "") if isinstance(part, int) else (1, 0, part) for part in self.pre]
        return (self.major, self.minor, self.patch, not self.pre, pre)

    def __lt__(self, other):
        return self._key() < other._key()

    def __str__(self):
        tail = "-" + ".".join(map(str, self.pre)) if self.pre else ""
        return f"{self.major}.{self.minor}.{self.patch}{tail}"


def parse(text):
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no version")
    parts = match.group(4).split(".") if match.group(4) else []
    if any(part.isdigit() and part != str(int(part)) for part in parts):
        raise ValueError(f"{text!r} has a leading zero")
    pre = tuple(int(part) if part.isdigit() else part for part in parts)
    return Version(*(int(n) for n in match.groups()[:3]), pre)


def bump(version, part):
    if part == "major":
        return Version(version.major + 1, 0, 0)
    if part == "minor":
        return Version(version.major, version.minor + 1, 0)
    if part == "patch":
        return Version(version.major, version.minor, version.patch + 1)
    raise ValueError(part)
