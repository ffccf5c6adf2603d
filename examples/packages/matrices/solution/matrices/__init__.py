from fractions import Fraction


def _shape(m):
    if len({len(row) for row in m}) > 1:
        raise ValueError("rows differ in length")
    return len(m), len(m[0]) if m else 0


def identity(n):
    return [[int(i == j) for j in range(n)] for i in range(n)]


def transpose(m):
    _shape(m)
    return [list(column) for column in zip(*m)]


def multiply(a, b):
    if _shape(a)[1] != _shape(b)[0]:
        raise ValueError("shapes do not fit")
    columns = transpose(b)
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in a]


def determinant(m):
    rows, columns = _shape(m)
    if rows != columns:
        raise ValueError("not square")
    work = [[Fraction(x) for x in row] for row in m]
    result = Fraction(1)
    for i in range(rows):
        pivot = next((r for r in range(i, rows) if work[r][i]), None)
        if pivot is None:
            return 0
        if pivot != i:
            work[i], work[pivot] = work[pivot], work[i]
            result = -result
        result *= work[i][i]
        for r in range(i + 1, rows):
            factor = work[r][i] / work[i][i]
            work[r] = [x - factor * y for x, y in zip(work[r], work[i])]
    return int(result) if result.denominator == 1 else float(result)
