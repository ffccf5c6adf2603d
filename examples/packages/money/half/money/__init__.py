from dataclasses import dataclass


class CurrencyError(ValueError):
    pass


@dataclass(frozen=True)
class Money:
    amount: int
    currency: str

    def __add__(self, other):
        return Money(self.amount + other.amount, self.currency)

    def __sub__(self, other):
        return Money(self.amount - other.amount, self.currency)

    def __mul__(self, factor):
        return Money(self.amount * factor, self.currency)

    def __str__(self):
        return f"{self.amount // 100}.{self.amount % 100:02d} {self.currency}"
