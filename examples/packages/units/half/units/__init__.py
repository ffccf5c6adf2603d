_LENGTH = {"mm": 1.0, "cm": 10.0, "m": 1000.0, "km": 1e6, "in": 25.4, "ft": 304.8, "mi": 1609344.0}


def convert(value, source, target):
    return value * _LENGTH[source] / _LENGTH[target]


def parse(text):
    value, unit = text.split()
    return float(value), unit
