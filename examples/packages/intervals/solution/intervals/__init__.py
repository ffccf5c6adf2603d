def _check(intervals):
    checked = sorted(tuple(i) for i in intervals)
    for start, end in checked:
        if start >= end:
            raise ValueError(f"empty interval ({start}, {end})")
    return checked


def merge(intervals):
    merged = []
    for start, end in _check(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def contains(intervals, value):
    return any(start <= value < end for start, end in _check(intervals))


def subtract(intervals, others):
    left = merge(intervals)
    for low, high in merge(others):
        pieces = []
        for start, end in left:
            if start < min(end, low):
                pieces.append((start, min(end, low)))
            if max(start, high) < end:
                pieces.append((max(start, high), end))
        left = pieces
    return left
