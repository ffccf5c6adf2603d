class Cache:
    def __init__(self, capacity):
        self._items, self._capacity = {}, capacity

    def __len__(self):
        return len(self._items)

    def __contains__(self, key):
        return key in self._items

    def get(self, key, default=None):
        return self._items.get(key, default)

    def put(self, key, value):
        self._items[key] = value
        while len(self._items) > self._capacity:
            del self._items[next(iter(self._items))]
