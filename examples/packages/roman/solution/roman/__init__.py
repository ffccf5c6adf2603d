_PARTS = [
    (1000, "M"),
    (900, "CM"),
    (500, "D"),
    (400, "CD"),
    (100, "C"),
    (90, "XC"),
    (50, "L"),
    (40, "XL"),
    (10, "X"),
    (9, "IX"),
    (5, "V"),
    (4, "IV"),
    (1, "I"),
]


def to_roman(number):
    if not 1 <= number <= 3999:
        raise ValueError(f"{number} is not in 1..3999")
    text = ""
    for value, sign in _PARTS:
        text += sign * (number // value)
        number %= value
    return text


def from_roman(text):
    rest, number = text.upper(), 0
    for value, sign in _PARTS:
        while rest.startswith(sign):
            number, rest = number + value, rest[len(sign) :]
    if rest or not text or number > 3999 or to_roman(number) != text.upper():
        raise ValueError(f"{text!r} is no Roman numeral")
    return number


def add(a, b):
    return to_roman(from_roman(a) + from_roman(b))
