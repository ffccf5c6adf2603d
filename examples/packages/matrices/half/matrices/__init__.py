def identity(n):
    return [[int(i == j) for j in range(n)] for i in range(n)]


def transpose(m):
    return [list(column) for column in zip(*m)]


def multiply(a, b):
    return [[sum(x * y for x, y in zip(row, column)) for column in zip(*b)] for row in a]
