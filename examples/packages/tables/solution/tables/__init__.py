def render(rows, headers=None, align=None):
    cells = [[str(cell) for cell in row] for row in ([headers] if headers else []) + list(rows)]
    if len({len(row) for row in cells}) > 1:
        raise ValueError("rows differ in length")
    if not cells:
        return ""
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    align = align or "l" * len(widths)
    lines = [
        " | ".join(_pad(c, w, a) for c, w, a in zip(row, widths, align)).rstrip() for row in cells
    ]
    if headers:
        lines.insert(1, "-+-".join("-" * width for width in widths))
    return "\n".join(lines)


def _pad(cell, width, align):
    if align == "r":
        return cell.rjust(width)
    if align == "c":
        left = (width - len(cell)) // 2
        return " " * left + cell + " " * (width - len(cell) - left)
    return cell.ljust(width)


def parse(text):
    lines = text.splitlines()
    headers = [name.strip() for name in lines[0].split("|")]
    return [dict(zip(headers, (cell.strip() for cell in line.split("|")))) for line in lines[2:]]


def group_by(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
