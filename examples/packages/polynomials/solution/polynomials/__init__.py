from fractions import Fraction


def _trim(p):
    p = list(p)
    while p and p[-1] == 0:
        p.pop()
    return p


def add(p, q):
    n = max(len(p), len(q))
    return _trim((p[i] if i < len(p) else 0) + (q[i] if i < len(q) else 0) for i in range(n))


def multiply(p, q):
    result = [0] * max(len(p) + len(q) - 1, 0)
    for i, a in enumerate(p):
        for j, b in enumerate(q):
            result[i + j] += a * b
    return _trim(result)


def derivative(p):
    return _trim(i * a for i, a in enumerate(p) if i)


def value(p, x):
    result = 0
    for a in reversed(p):
        result = result * x + a
    return result


def divide(p, q):
    q, rest = _trim(q), [Fraction(a) for a in _trim(p)]
    if not q:
        raise ZeroDivisionError("division by the zero polynomial")
    quotient = [Fraction(0)] * max(len(rest) - len(q) + 1, 0)
    while len(rest) >= len(q):
        shift, factor = len(rest) - len(q), rest[-1] / q[-1]
        quotient[shift] = factor
        rest = _trim(a - factor * q[i - shift] if i >= shift else a for i, a in enumerate(rest))
    return _trim(quotient), rest


def text(p):
    terms = []
    for power in range(len(p) - 1, -1, -1):
        a = p[power]
        if a == 0:
            continue
        size = "" if abs(a) == 1 and power else str(abs(a))
        name = "" if power == 0 else "x" if power == 1 else f"x^{power}"
        sign = ("-" if a < 0 else "") if not terms else (" - " if a < 0 else " + ")
        terms.append(sign + size + name)
    return "".join(terms) or "0"
