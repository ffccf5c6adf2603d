import html
import re


def _inline(text):
    parts = re.split(r"(`[^`]+`)", html.escape(text, quote=False).replace('"', "&quot;"))
    for index, part in enumerate(parts):
        if index % 2:
            parts[index] = f"<code>{part[1:-1]}</code>"
        else:
            part = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", part)
            part = re.sub(r"\*(.+?)\*", r"<em>\1</em>", part)
            parts[index] = re.sub(r"\[([^\]]+)\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', part)
    return "".join(parts)


def _blocks(text):
    return [
        block.strip("\n").splitlines()
        for block in re.split(r"\n\s*\n", text.strip("\n"))
        if block.strip()
    ]


def _heading(lines):
    match = re.fullmatch(r"(#{1,3}) (.+)", lines[0]) if len(lines) == 1 else None
    return (len(match.group(1)), match.group(2).strip()) if match else None


def to_html(text):
    result = []
    for lines in _blocks(text):
        heading = _heading(lines)
        if heading:
            level, title = heading
            result.append(f"<h{level}>{_inline(title)}</h{level}>")
        elif all(line.startswith("- ") for line in lines):
            result.append(
                "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in lines) + "</ul>"
            )
        else:
            result.append(f"<p>{_inline(' '.join(line.strip() for line in lines))}</p>")
    return "\n".join(result)


def titles(text):
    return [heading for lines in _blocks(text) if (heading := _heading(lines))]
