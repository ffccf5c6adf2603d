import heapq
from itertools import count


class PriorityQueue:
    def __init__(self):
        self._heap, self._entries, self._numbers = [], {}, count()

    def push(self, item, priority):
        entry = (priority, next(self._numbers), item)
        self._entries[item] = entry
        heapq.heappush(self._heap, entry)

    def _clean(self):
        while self._heap and self._entries.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)

    def peek(self):
        self._clean()
        return self._heap[0][2]

    def pop(self):
        item = self.peek()
        heapq.heappop(self._heap)
        del self._entries[item]
        return item

    def remove(self, item):
        return self._entries.pop(item, None) is not None

    def __len__(self):
        return len(self._entries)

    def drain(self):
        while len(self):
            yield self.pop()


def merge(*queues):
    best = {}
    for queue in queues:
        for priority, _, item in sorted(queue._entries.values()):
            if item not in best or priority < best[item]:
                best[item] = priority
    result = PriorityQueue()
    for item, priority in best.items():
        result.push(item, priority)
    return result
