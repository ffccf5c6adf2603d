import re

_STEP = re.compile(r"(?:^|\.)([A-Za-z_]\w*)|\[(\d+)\]")
_dict_set = dict.__setitem__


def _steps(path):
    steps, place = [], 0
    while place < len(path):
        match = _STEP.match(path, place)
        if match is None:
            raise ValueError(f"malformed path {path!r}")
        steps.append(match.group(1) if match.group(1) is not None else int(match.group(2)))
        place = match.end()
    if not steps:
        raise ValueError("empty path")
    return steps


def _inside(data, step):
    if isinstance(step, int):
        return isinstance(data, list) and step < len(data)
    return isinstance(data, dict) and step in data


def get(data, path, default=None):
    for step in _steps(path):
        if not _inside(data, step):
            return default
        data = data[step]
    return data


def set(data, path, value):
    *steps, last = _steps(path)
    for step, following in zip(steps, [*steps[1:], last]):
        if not _inside(data, step):
            _store(data, step, [] if isinstance(following, int) else {})
        data = data[step]
    _store(data, last, value)


def _store(data, step, value):
    if isinstance(step, int):
        if step > len(data):
            raise IndexError(step)
        data[step : step + 1] = [value]
    else:
        _dict_set(data, step, value)


def delete(data, path):
    *steps, last = _steps(path)
    for step in [*steps, last]:
        if not _inside(data, step):
            raise KeyError(path)
        parent, data = data, data[step]
    del parent[last]


def flatten(data):
    found, stack = {}, [("", data)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, dict):
            stack += [(f"{path}.{k}" if path else k, v) for k, v in value.items()]
        elif isinstance(value, list):
            stack += [(f"{path}[{i}]", v) for i, v in enumerate(value)]
        else:
            found[path] = value
    return found
