import re

_LENGTH = {"mm": 1.0, "cm": 10.0, "m": 1000.0, "km": 1e6, "in": 25.4, "ft": 304.8, "mi": 1609344.0}
_MASS = {"g": 1.0, "kg": 1000.0, "lb": 453.59237}
_TEMPERATURE = {"C": (1.0, 273.15), "F": (5 / 9, 459.67 * 5 / 9), "K": (1.0, 0.0)}


def _kind(unit):
    for table in (_LENGTH, _MASS, _TEMPERATURE):
        if unit in table:
            return table
    raise KeyError(unit)


def convert(value, source, target):
    table = _kind(source)
    if _kind(target) is not table:
        raise ValueError(f"{source} and {target} are of different kinds")
    if table is _TEMPERATURE:
        scale, shift = table[source]
        kelvin = value * scale + shift
        scale, shift = table[target]
        return (kelvin - shift) / scale
    return value * table[source] / table[target]


def parse(text):
    match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None:
        raise ValueError(f"{text!r} is no quantity")
    _kind(match.group(2))
    return float(match.group(1)), match.group(2)


def best(value, unit):
    for target in ("km", "m", "cm"):
        converted = convert(value, unit, target)
        if abs(converted) >= 1:
            return converted, target
    return convert(value, unit, "mm"), "mm"
