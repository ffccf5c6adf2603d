from collections import OrderedDict
from functools import wraps


class Cache:
    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self._items = OrderedDict()
        self._capacity = capacity
        self.hits = self.misses = 0

    def __len__(self):
        return len(self._items)

    def __contains__(self, key):
        return key in self._items

    def get(self, key, default=None):
        if key not in self._items:
            self.misses += 1
            return default
        self.hits += 1
        self._items.move_to_end(key)
        return self._items[key]

    def put(self, key, value):
        self._items[key] = value
        self._items.move_to_end(key)
        if len(self._items) > self._capacity:
            self._items.popitem(last=False)


def memoize(capacity):
    def decorate(function):
        cache, missing = Cache(capacity), object()

        @wraps(function)
        def wrapper(*arguments):
            value = cache.get(arguments, missing)
            if value is missing:
                value = function(*arguments)
                cache.put(arguments, value)
            return value

        return wrapper

    return decorate
