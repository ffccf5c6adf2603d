class Overdrawn(ValueError):
    pass


class Ledger:
    def __init__(self):
        self._balances = {}

    def open(self, name, limit=0):
        self._balances[name] = 0

    def deposit(self, name, amount):
        self._balances[name] += amount

    def withdraw(self, name, amount):
        if self._balances[name] < amount:
            raise Overdrawn(name)
        self._balances[name] -= amount

    def balance(self, name):
        return self._balances[name]
