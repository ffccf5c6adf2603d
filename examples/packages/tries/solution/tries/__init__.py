class Trie:
    def __init__(self, words=()):
        self._root, self._count = {}, 0
        for word in words:
            self.add(word)

    def _find(self, text):
        node = self._root
        for letter in text:
            node = node.get(letter)
            if node is None:
                return None
        return node

    def add(self, word):
        node = self._root
        for letter in word:
            node = node.setdefault(letter, {})
        if None not in node:
            node[None] = True
            self._count += 1

    def __contains__(self, word):
        node = self._find(word)
        return node is not None and None in node

    def __len__(self):
        return self._count

    def remove(self, word):
        if word not in self:
            raise KeyError(word)
        del self._find(word)[None]
        self._count -= 1

    def with_prefix(self, prefix):
        start, found = self._find(prefix), []
        stack = [(prefix, start)] if start is not None else []
        while stack:
            text, node = stack.pop()
            for letter, child in node.items():
                if letter is None:
                    found.append(text)
                else:
                    stack.append((text + letter, child))
        return sorted(found)

    def longest_prefix(self, text):
        node, best = self._root, "" if None in self._root else None
        for index, letter in enumerate(text):
            node = node.get(letter)
            if node is None:
                break
            if None in node:
                best = text[: index + 1]
        return best
