def render(rows, headers=None, align=None):
    rows = ([headers] if headers else []) + list(rows)
    widths = [max(len(str(cell)) for cell in column) for column in zip(*rows)]
    return "\n".join(
        " | ".join(str(c).ljust(w) for c, w in zip(row, widths)).rstrip() for row in rows
    )


def group_by(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
