class Trie:
    def __init__(self, words=()):
        self._words = list(words)

    def add(self, word):
        self._words.append(word)

    def __contains__(self, word):
        return word in self._words

    def __len__(self):
        return len(self._words)

    def with_prefix(self, prefix):
        return sorted(word for word in self._words if word.startswith(prefix))
