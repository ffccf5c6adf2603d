import re

_TOKEN = re.compile(r"\s*(?:(\d+\.\d*|\.\d+|\d+)|([A-Za-z_]\w*)|(.))")


class CalcError(ValueError):
    pass


def _tokens(text):
    found = []
    for number, name, sign in _TOKEN.findall(text.rstrip()):
        if number:
            found.append(("number", float(number) if "." in number else int(number)))
        elif name:
            found.append(("name", name))
        elif sign in "+-*/^()":
            found.append((sign, sign))
        else:
            raise CalcError(f"unexpected {sign!r}")
    return found


class _Parser:
    def __init__(self, text, variables):
        self.tokens, self.place, self.variables = _tokens(text), 0, variables

    def peek(self):
        return self.tokens[self.place][0] if self.place < len(self.tokens) else None

    def take(self):
        if self.place >= len(self.tokens):
            raise CalcError("unexpected end")
        self.place += 1
        return self.tokens[self.place - 1]

    def sum(self):
        value = self.product()
        while self.peek() in ("+", "-"):
            value = value + self.product() if self.take()[0] == "+" else value - self.product()
        return value

    def product(self):
        value = self.unary()
        while self.peek() in ("*", "/"):
            value = value * self.unary() if self.take()[0] == "*" else value / self.unary()
        return value

    def unary(self):
        if self.peek() == "-":
            self.take()
            return -self.unary()
        return self.power()

    def power(self):
        base = self.atom()
        if self.peek() == "^":
            self.take()
            return base ** self.unary()
        return base

    def atom(self):
        kind, value = self.take()
        if kind == "number":
            return value
        if kind == "name":
            if value not in self.variables:
                raise CalcError(f"unknown name {value}")
            return self.variables[value]
        if kind != "(":
            raise CalcError(f"unexpected {value!r}")
        inner = self.sum()
        if self.take()[0] != ")":
            raise CalcError("missing )")
        return inner


def evaluate(expression, variables=None):
    parser = _Parser(expression, variables or {})
    value = parser.sum()
    if parser.peek() is not None:
        raise CalcError("unexpected text at the end")
    return value


def variables_of(expression):
    return {value for kind, value in _tokens(expression) if kind == "name"}
