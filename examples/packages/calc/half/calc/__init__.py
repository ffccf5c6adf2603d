import re


class CalcError(ValueError):
    pass


def evaluate(expression, variables=None):
    # Sums and differences of numbers, left to right.
    parts = re.findall(r"[+-]?\s*\d+", expression)
    if "".join(parts).replace(" ", "") != expression.replace(" ", ""):
        raise CalcError(expression)
    return sum(int(part.replace(" ", "")) for part in parts)


def variables_of(expression):
    return set(re.findall(r"[A-Za-z_]\w*", expression))
