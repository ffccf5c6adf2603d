class Overdrawn(ValueError):
    pass


class Ledger:
    def __init__(self):
        self._limits, self._entries = {}, []

    def open(self, name, limit=0):
        if name in self._limits:
            raise ValueError(f"{name} exists")
        self._limits[name] = limit

    def _amount(self, amount):
        if not isinstance(amount, int) or amount <= 0:
            raise ValueError("amounts are positive whole numbers")

    def _apply(self, changes):
        for name, change in changes:
            if self.balance(name) + change < -self._limits[name]:
                raise Overdrawn(name)
        self._entries.append(changes)

    def deposit(self, name, amount):
        self._amount(amount)
        self._apply([(name, amount)])

    def withdraw(self, name, amount):
        self._amount(amount)
        self._apply([(name, -amount)])

    def transfer(self, source, target, amount):
        self._amount(amount)
        self._apply([(source, -amount), (target, amount)])

    def balance(self, name):
        return sum(self.history(name))

    def history(self, name):
        if name not in self._limits:
            raise KeyError(name)
        return [change for entry in self._entries for owner, change in entry if owner == name]

    def undo(self):
        if not self._entries:
            return False
        self._entries.pop()
        return True
