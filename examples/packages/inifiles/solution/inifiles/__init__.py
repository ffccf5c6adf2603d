import re


class IniError(ValueError):
    def __init__(self, line, text):
        super().__init__(f"line {line}: {text!r}")
        self.line = line


def loads(text):
    data, section = {}, ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in "#;":
            continue
        heading = re.fullmatch(r"\[([^\]]*)\]", line)
        pair = re.fullmatch(r"([^=:]+?)\s*[=:]\s*(.*)", line)
        if heading:
            section = heading.group(1).strip()
            data.setdefault(section, {})
        elif pair:
            data.setdefault(section, {})[pair.group(1)] = pair.group(2)
        else:
            raise IniError(number, raw)
    return data


def dumps(data):
    blocks = []
    for section in sorted(data, key=lambda name: name != ""):
        lines = [f"[{section}]"] if section else []
        lines += [f"{key} = {value}" for key, value in data[section].items()]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
