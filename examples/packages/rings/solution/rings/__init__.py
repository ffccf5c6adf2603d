from collections import deque


class Ring:
    def __init__(self, capacity):
        self._check(capacity)
        self._items, self._capacity = deque(), capacity

    @staticmethod
    def _check(capacity):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")

    def __len__(self):
        return len(self._items)

    def __iter__(self):
        return iter(self._items)

    def __getitem__(self, index):
        return self._items[index]

    @property
    def full(self):
        return len(self._items) == self._capacity

    def push(self, item):
        lost = self._items.popleft() if self.full else None
        self._items.append(item)
        return lost

    def pop(self):
        return self._items.popleft()

    def resize(self, capacity):
        self._check(capacity)
        self._capacity = capacity
        while len(self._items) > capacity:
            self._items.popleft()
