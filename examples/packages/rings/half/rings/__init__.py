class Ring:
    def __init__(self, capacity):
        self.items, self.capacity = [], capacity

    def push(self, item):
        self.items = [*self.items, item][-self.capacity :]

    def __len__(self):
        return len(self.items)

    def __iter__(self):
        return iter(self.items)

    def __getitem__(self, index):
        return self.items[index]
