from collections import deque


def nodes(graph):
    return sorted(set(graph) | {n for targets in graph.values() for n in targets})


def shortest_path(graph, start, goal):
    queue = deque([[start]])
    seen = {start}
    while queue:
        path = queue.popleft()
        if path[-1] == goal:
            return path
        for target in graph.get(path[-1], []):
            if target not in seen:
                seen.add(target)
                queue.append([*path, target])
    return None
