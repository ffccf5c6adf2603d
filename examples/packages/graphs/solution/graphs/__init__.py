import heapq
from collections import deque


class CycleError(ValueError):
    pass


def nodes(graph):
    return sorted(set(graph) | {n for targets in graph.values() for n in targets})


def topological(graph):
    count = dict.fromkeys(nodes(graph), 0)
    for targets in graph.values():
        for target in targets:
            count[target] += 1
    ready = [n for n, c in count.items() if c == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        node = heapq.heappop(ready)
        order.append(node)
        for target in graph.get(node, []):
            count[target] -= 1
            if count[target] == 0:
                heapq.heappush(ready, target)
    if len(order) < len(count):
        raise CycleError("the graph has a cycle")
    return order


def shortest_path(graph, start, goal):
    before, queue = {start: None}, deque([start])
    while queue:
        node = queue.popleft()
        if node == goal:
            path = []
            while node is not None:
                path.append(node)
                node = before[node]
            return path[::-1]
        for target in graph.get(node, []):
            if target not in before:
                before[target] = node
                queue.append(target)
    return None


def components(graph):
    both = {n: set() for n in nodes(graph)}
    for node, targets in graph.items():
        for target in targets:
            both[node].add(target)
            both[target].add(node)
    found, seen = [], set()
    for node in both:
        if node in seen:
            continue
        group, stack = set(), [node]
        while stack:
            current = stack.pop()
            if current not in group:
                group.add(current)
                stack.extend(both[current])
        seen |= group
        found.append(sorted(group))
    return found
