from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Version:
    major: int
    minor: int
    patch: int
    pre: tuple = ()

    def __str__(self):
        return f"{self.major}.{self.minor}.{self.patch}"


def parse(text):
    return Version(*map(int, text.split(".")))


def bump(version, part):
    if part == "major":
        return Version(version.major + 1, 0, 0)
    return Version(version.major, version.minor + 1, 0)
