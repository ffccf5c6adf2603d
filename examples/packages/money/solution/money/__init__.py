import re
from dataclasses import dataclass
from functools import total_ordering


class CurrencyError(ValueError):
    pass


@total_ordering
@dataclass(frozen=True)
class Money:
    amount: int
    currency: str

    def _same(self, other):
        if self.currency != other.currency:
            raise CurrencyError(f"{self.currency} and {other.currency}")

    def __add__(self, other):
        self._same(other)
        return Money(self.amount + other.amount, self.currency)

    def __sub__(self, other):
        self._same(other)
        return Money(self.amount - other.amount, self.currency)

    def __mul__(self, factor):
        return Money(self.amount * factor, self.currency)

    __rmul__ = __mul__

    def __lt__(self, other):
        self._same(other)
        return self.amount < other.amount

    def __str__(self):
        sign = "-" if self.amount < 0 else ""
        return f"{sign}{abs(self.amount) // 100}.{abs(self.amount) % 100:02d} {self.currency}"

    def split(self, n):
        small, rest = divmod(self.amount, n)
        return [Money(small + (i < rest), self.currency) for i in range(n)]


def parse(text):
    match = re.fullmatch(r"(-?)(\d+)\.(\d\d) ([A-Z]+)", text)
    if match is None:
        raise ValueError(f"{text!r} is no amount of money")
    sign, whole, cents, currency = match.groups()
    amount = int(whole) * 100 + int(cents)
    return Money(-amount if sign else amount, currency)
